"""Compare codecs on the bytes of a shard: ratio, speed, and the links on which they pay off.

python -m benchmarks.exchange.compression --size 64MiB
"""

from __future__ import annotations

import statistics
from datetime import UTC, datetime
from pathlib import Path

import click
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.commandline import in_bytes, write
from dask_gpurt.cli.environment import environment
from dask_gpurt.exchange.compression import PAYING_TIME_SHARE, Codec, Sample, codecs, sample

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


def measure(codec: Codec, column: np.ndarray, repeat: int) -> dict[str, float]:
    """Return the medians of ``repeat`` trials with a whole column."""
    buffer = np.ascontiguousarray(column).view(np.uint8)
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
    for name, by_codec in found.items():
        for codec, figures in by_codec.items():
            rates = (figures[rate] / GB for rate in ("compress", "decompress", "pays_below"))
            shown.add_row(name, codec, f"{figures['ratio']:.3f}", *(f"{rate:.2f}" for rate in rates))
    return shown


@click.command(help=__doc__)
@click.option("--size", default="64MiB", callback=in_bytes, help="Bytes of a column.")
@click.option("--repeat", default=3, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(size: int, repeat: int, output: Path | None) -> None:
    installed = codecs(memoryview)
    found = {
        name: {codec: measure(installed[codec], column, repeat) for codec in installed}
        for name, column in columns(size).items()
    }
    write(
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "parameters": {"size": size, "repeat": repeat},
            **environment(),
            "columns": found,
        },
        output,
    )
    Console().print(table(found))


if __name__ == "__main__":
    main()
