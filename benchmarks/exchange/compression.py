"""Compare codecs on the bytes of a shard: ratio, speed, and the links on which they pay off.

    python -m benchmarks.exchange.compression --size 64MiB

The codecs are those of this process's device and those of the host.
"""

from __future__ import annotations

import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.commandline import in_bytes, write
from dask_gpurt.cli.environment import environment
from dask_gpurt.device.discover import discover
from dask_gpurt.exchange.compression import PAYING_TIME_SHARE, Sample, sample

GB = 1e9


def columns(nbytes: int) -> dict[str, np.ndarray]:
    """Return columns as shuffles move them, some compressible and some not."""
    rows, random = nbytes // 8, np.random.default_rng(0)
    return {
        "keys below a million": random.integers(0, 1_000_000, rows),
        "row numbers": np.arange(rows),
        "words": np.frombuffer(b"".join(random.choice([b"apple ", b"pear ", b"plum "], nbytes // 4)), "u1"),
        "noise": random.random(rows),
    }


def limit(figures: Sample) -> float:
    """Return the speed of the fastest link on which a codec pays off, in bytes per second."""
    return max(0.0, PAYING_TIME_SHARE - figures.ratio) / (
        1 / figures.compress_rate + 1 / figures.decompress_rate
    )


def measure(codec: Any, device: Any, column: np.ndarray, repeat: int) -> dict[str, float]:
    """Return the medians of ``repeat`` trials with a whole column."""
    [buffer] = device.from_host([np.ascontiguousarray(column).view(np.uint8)])
    trials = [sample(codec, codec.whole([buffer])) for _ in range(repeat)]
    median = Sample(
        codec.name,
        trials[0].ratio,
        statistics.median(trial.compress_rate for trial in trials),
        statistics.median(trial.decompress_rate for trial in trials),
    )
    return {
        "ratio": median.ratio,
        "compress": median.compress_rate,
        "decompress": median.decompress_rate,
        "pays_below": limit(median),
    }


def table(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    shown = Table(
        "column", "codec", "ratio", "compress GB/s", "restore GB/s", "pays below GB/s", box=SIMPLE_HEAD
    )
    for name, codecs in found.items():
        for codec, figures in codecs.items():
            rates = (figures[rate] / GB for rate in ("compress", "decompress", "pays_below"))
            shown.add_row(name, codec, f"{figures['ratio']:.3f}", *(f"{rate:.2f}" for rate in rates))
    return shown


@click.command(help=__doc__)
@click.option("--size", default="64MiB", callback=in_bytes, help="Bytes of a column.")
@click.option("--repeat", default=3, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(size: int, repeat: int, output: Path | None) -> None:
    devices = discover(2**30)
    device = devices.get("cuda", devices["host"])
    codecs = [*device.own_codecs().values(), *device.host_codecs().values()]
    found = {
        name: {codec.name: measure(codec, device, column, repeat) for codec in codecs}
        for name, column in columns(size).items()
    }
    write(
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "parameters": {"size": size, "repeat": repeat, "device": device.describe()},
            **environment(),
            "columns": found,
        },
        output,
    )
    Console().print(table(found))


if __name__ == "__main__":
    main()
