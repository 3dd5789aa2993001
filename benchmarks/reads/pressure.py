"""Run programs that need all memory of a GPU while it is full of kept columns, and while nothing is kept.

``python -m benchmarks.reads.pressure [--rounds 5] [--json FILE]``

In one session, in turns: the programs run right after a table was read that fills the cache of columns, and
after it was read with the cache switched off.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import dask_gpurt
from benchmarks.reads.columns import POOL, TIER, fill

ROWS, COLUMNS, FILES = 4_000_000, 8, 20
FRAMES = 18


def write(folder: Path) -> None:
    """Write a table of 5 GB, more than is kept."""
    random = np.random.default_rng(0)
    table = pa.table({f"c{number}": random.integers(0, 1 << 40, ROWS) for number in range(COLUMNS)})
    pq.write_table(table, folder / "0.parquet", compression=None, use_dictionary=False)
    for number in range(1, FILES):
        shutil.copy(folder / "0.parquet", folder / f"{number}.parquet")


def keep(on: bool, dask_worker: Any = None) -> None:
    """Switch the cache of a worker on or off."""
    tiers = dask_worker.plugins["gpurt"].tiers
    tiers.columns._room = tiers._left_for_columns if on else int
    tiers.columns.fit()


def kept(dask_worker: Any = None) -> tuple[int, float, float]:
    """Return the bytes that are kept, the allocations that failed, and those that dropped columns."""
    plugin = dask_worker.plugins["gpurt"]
    metrics = plugin.metrics
    counts = [sum(metrics.total(name).values()) for name in ("memory.short", "reads.dropped")]
    return plugin.tiers.columns.nbytes, *counts


def spilling(client: Any) -> None:
    """Hold more frames than the tier has room for, and use all of them."""
    many = client.map(fill, range(FRAMES), pure=False)
    sums = client.gather(client.map(lambda frame: int(frame.number.sum()), many, pure=False))
    assert sums == [number << 26 for number in range(FRAMES)]


def kernels(client: Any) -> None:
    """Sort 1 GiB in one task, which takes more than half of the pool."""

    def work(number: int) -> int:
        import cudf
        import cupy

        values = cudf.DataFrame({"x": cupy.arange(1 << 27, 0, -1)})
        return int(values.sort_values("x").x.iloc[number])

    assert client.gather(client.map(work, range(3), pure=False)) == [1, 2, 3]


PROGRAMS: tuple[Callable[[Any], None], ...] = (spilling, kernels)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    from dask_cuda import LocalCUDACluster
    from distributed import Client

    seconds: dict[str, dict[str, list[float]]] = {each.__name__: {"off": [], "auto": []} for each in PROGRAMS}
    with tempfile.TemporaryDirectory() as name:
        write(folder := Path(name))
        time.sleep(1.1)  # younger files are not kept
        with (
            dask.config.set({"gpurt.memory.device": TIER, "dataframe.backend": "cudf"}),
            LocalCUDACluster(n_workers=1, rmm_pool_size=POOL, rmm_maximum_pool_size=POOL) as local,
            Client(local) as client,
        ):
            dask_gpurt.enable(client)
            for number in range(given.rounds + 1):  # the first one warms up
                for setting in ("off", "auto") if number % 2 else ("auto", "off"):
                    client.run(keep, setting == "auto")
                    for program in PROGRAMS:
                        rows = dd.read_parquet(folder).map_partitions(len).sum().compute()
                        assert rows == ROWS * FILES
                        (before,) = client.run(kept).values()
                        began = time.perf_counter()
                        program(client)
                        took = time.perf_counter() - began
                        (after,) = client.run(kept).values()
                        if number:
                            seconds[program.__name__][setting].append(took)
                        print(
                            f"{program.__name__:10} {setting:5} {took:7.3f} s  {before} -> {after}",
                            flush=True,
                        )
            for program_name, of in seconds.items():
                medians = {setting: statistics.median(values) for setting, values in of.items()}
                print(program_name, medians, "ratio", round(medians["auto"] / medians["off"], 3))
            print("fallbacks", dask_gpurt.report(client)["fallbacks"])
            dask_gpurt.disable(client)
    if given.json:
        given.json.write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()
