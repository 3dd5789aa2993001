"""Run programs that need all memory of a GPU while it is full of kept columns, and while nothing is kept.

``python -m benchmarks.reads.pressure [--rounds 8] [--json FILE]``

In one session, in turns: the programs run right after a table was read that fills the cache of columns, with
the tier below the device (``tier``, the default), without it (``device``), and after the table was read with
nothing kept (``off``). ``--backend pandas`` rehearses it on a host.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from distributed import Client

import dask_gpurt
from benchmarks.common.commandline import write as write_results
from benchmarks.common.environment import environment
from benchmarks.reads.columns import POOL, TIER
from benchmarks.reads.passes import forget
from benchmarks.reads.tier import SIDES, use

WHAT = (
    "seconds of programs that need the memory of a GPU, in turns right after kept columns filled it, with a "
    "tier below it (tier) and without (device), and with nothing kept (off) (benchmarks.reads.pressure)"
)
ROWS, COLUMNS, FILES = 4_000_000, 8, 20
FRAMES = 18
#: Rows of a frame, by backend: 512 MiB on a GPU.
FRAME_ROWS = {"cudf": 1 << 26, "pandas": 1 << 20}
RESAMPLES = 2_000


def write(folder: Path, rows: int) -> None:
    """Write a table; on a GPU of 5 GB, more than is kept."""
    random = np.random.default_rng(0)
    table = pa.table({f"c{number}": random.integers(0, 1 << 40, rows) for number in range(COLUMNS)})
    pq.write_table(table, folder / "0.parquet", compression=None, use_dictionary=False)
    for number in range(1, FILES):
        shutil.copy(folder / "0.parquet", folder / f"{number}.parquet")


def kept(dask_worker: Any = None) -> dict[str, float]:
    """Return the bytes that are kept, the allocations that failed, and those that dropped columns."""
    plugin = dask_worker.plugins["gpurt"]
    counts = {name: sum(plugin.metrics.total(name).values()) for name in ("memory.short", "reads.dropped")}
    return {"kept": plugin.tiers.columns.nbytes, "below": plugin.tiers.below.nbytes, **counts}


def frame(number: int, backend: str) -> Any:
    """Return a frame of a column of one number."""
    rows = FRAME_ROWS[backend]
    if backend == "pandas":
        import pandas as pd

        return pd.DataFrame({"number": np.full(rows, number, "int64")})
    import cudf
    import cupy

    return cudf.DataFrame({"number": cupy.full(rows, number, "int64")})


def spilling(client: Any, backend: str) -> None:
    """Hold more frames than the tier has room for, and use all of them."""
    many = client.map(partial(frame, backend=backend), range(FRAMES), pure=False)
    sums = client.gather(client.map(lambda one: int(one.number.sum()), many, pure=False))
    assert sums == [number * FRAME_ROWS[backend] for number in range(FRAMES)]


def kernels(client: Any, backend: str) -> None:
    """Sort 1 GiB in one task, which takes more than half of the pool."""

    rows = 2 * FRAME_ROWS[backend]

    def work(number: int) -> int:
        if backend == "pandas":
            import pandas as pd

            values: Any = pd.DataFrame({"x": np.arange(rows, 0, -1)})
        else:
            import cudf
            import cupy

            values = cudf.DataFrame({"x": cupy.arange(rows, 0, -1)})
        return int(values.sort_values("x").x.iloc[number])

    assert client.gather(client.map(work, range(3), pure=False)) == [1, 2, 3]


def shuffled(client: Any, backend: str) -> None:
    """Shuffle and add up frames of which the tier has room for less than all."""

    def keyed(number: int) -> Any:
        one = frame(number, backend)
        one["key"] = (one.reset_index()["index"] * 7919 + number) % 1009
        return one

    frames = dd.from_map(keyed, range(FRAMES // 2))
    result = frames.shuffle("key").map_partitions(len, meta=("n", int)).sum().compute()
    assert int(result) == FRAMES // 2 * FRAME_ROWS[backend]


PROGRAMS: tuple[Callable[[Any, str], None], ...] = (spilling, kernels, shuffled)


def cluster(backend: str) -> Any:
    """Return a cluster of one worker."""
    if backend == "pandas":
        from distributed import LocalCluster

        return LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0")
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(
        n_workers=1, rmm_pool_size=POOL, rmm_maximum_pool_size=POOL, dashboard_address=":0"
    )


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return medians, and the ratios to the runs of the same round with nothing kept, with an interval."""
    found = []
    for program in dict.fromkeys(row["program"] for row in rows):
        of = {
            side: [row["seconds"] for row in rows if (row["program"], row["side"]) == (program, side)]
            for side in SIDES
        }
        row: dict[str, Any] = {"program": program}
        for side, seconds in of.items():
            ratios = [one / other for one, other in zip(seconds, of["off"], strict=True)]
            row[side] = round(median(seconds), 4)
            if side != "off":
                row |= dict(zip((f"{side} / off", "low", "high"), interval(ratios), strict=True))
                row[f"{side} / off, interval"] = [row.pop("low"), row.pop("high")]
        found.append(row)
    return found


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios, and a bootstrapped interval of 95%."""
    draw = random.Random(0)
    means = sorted(geometric_mean(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = means[RESAMPLES // 40], means[-RESAMPLES // 40]
    return round(geometric_mean(ratios), 3), round(low, 3), round(high, 3)


def main() -> None:
    """Run the programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--backend", choices=["cudf", "pandas"], default="cudf")
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no round after that many.")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    backend, rows, began = given.backend, list[dict[str, Any]](), time.monotonic()
    programs = [*PROGRAMS]
    table_rows = ROWS if backend == "cudf" else ROWS // 100
    with tempfile.TemporaryDirectory() as name:
        write(folder := Path(name), table_rows)
        time.sleep(1.1)  # younger files are not kept
        settings = {"dataframe.backend": backend, "gpurt.memory.device": TIER}
        with dask.config.set(settings), cluster(backend) as local, Client(local) as client:
            dask_gpurt.enable(client)
            for turn in range(given.rounds + 1):  # the first one warms up
                if time.monotonic() - began > given.seconds:
                    break
                for side in SIDES if turn % 2 else SIDES[::-1]:
                    client.run(partial(use, side))
                    for program in [*programs]:
                        forget(client)
                        count = dd.read_parquet(folder).map_partitions(len, meta=("n", int)).sum().compute()
                        assert count == table_rows * FILES
                        (before,) = client.run(kept).values()
                        start = time.perf_counter()
                        try:
                            program(client, backend)
                        except Exception as error:
                            print(f"{program.__name__} is left out: {error!r}")
                            programs.remove(program)
                            continue
                        seconds = time.perf_counter() - start
                        (after,) = client.run(kept).values()
                        row = {"turn": turn, "side": side, "program": program.__name__, "seconds": seconds}
                        row |= {what: [before[what], after[what]] for what in before}
                        print(row, flush=True)
                        if turn:
                            rows.append(row)
            fallbacks = str(dask_gpurt.report(client)["fallbacks"])
            done = {program.__name__ for program in programs}
            found = figures([row for row in rows if row["program"] in done])
            for each in found:
                print(each)
            print("fallbacks", fallbacks)
            dask_gpurt.disable(client)
    about = {"what": WHAT, "date": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}
    write_results({**about, "fallbacks": fallbacks, "rows": rows, "figures": found}, given.json)


if __name__ == "__main__":
    main()
