"""Read a table twice on GPUs, change and replace it, and fill the GPU while its columns are kept.

``python -m benchmarks.reads.columns [--gpus 1] [--files 6] [--json FILE]``

Each line shows the seconds of a pass over four programs, the bytes of columns that were decoded and that came
from memory of the GPU, and what is kept. Every result is compared with pandas.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

import dask_gpurt

#: So that a pool, a table and what fills the rest take seconds to make.
POOL, TIER = "10GB", "8GB"
ROWS, GROUP = 2_000_000, 500_000
WORDS = np.array([f"word {number}" for number in range(40)])


def write(folder: Path, number: int, seed: int) -> None:
    """Write or replace a file, the latter with one of the same times and, of its numbers, the same sizes."""
    random = np.random.default_rng(seed)
    x = random.random(ROWS)
    x[::97] = np.nan
    frame = {
        "k": random.integers(0, 1000, ROWS),
        "x": pa.array(x, from_pandas=True),
        "day": np.datetime64("2020-01-01", "ms") + random.integers(0, 1000, ROWS).astype("m8[D]"),
        "word": WORDS[random.integers(0, len(WORDS), ROWS)],
        "text": [f"line {number} {row % 9999}" for row in range(ROWS)],
    }
    path, new = folder / f"{number}.parquet", folder / ".new"
    pq.write_table(pa.table(frame), new, row_group_size=GROUP, use_dictionary=["word"])
    os.utime(new, (1e9, 1e9))
    new.replace(path)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "sums": lambda table: table[table.day < "2021-01-01"].groupby("word").x.sum(),
    "means": lambda table: table.groupby("k")[["x"]].mean(),
    "texts": lambda table: table[table.k < 5].groupby("word").text.max(),
    "order": lambda table: table[["x", "k", "word"]].groupby(["word", "k"]).x.count(),
}


def results(table: Any) -> dict[str, pd.DataFrame]:
    """Return the results of the programs, sorted."""
    found = {}
    for name, program in PROGRAMS.items():
        result = program(table)
        result = result.compute() if hasattr(result, "compute") else result
        result = result.to_pandas() if hasattr(result, "to_pandas") else result
        found[name] = result.sort_index()
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise if results differ."""
    for name, each in expected.items():
        compare = pd.testing.assert_series_equal if each.ndim == 1 else pd.testing.assert_frame_equal
        compare(found[name], each, check_dtype=False, check_index_type=False)


def spoil(frame: Any) -> Any:
    """Write into a result in place, as a user's function may."""
    frame.iloc[:, 0] = 0
    frame["x"].values[:] = -1
    frame["x"].fillna(7, inplace=True)
    frame.loc[frame.index[:10], "k"] = 3
    return frame.head(1)


def fill(number: int) -> Any:
    """Return a frame of 512 MiB."""
    import cudf
    import cupy

    return cudf.DataFrame({"number": cupy.full(1 << 26, number, "int64")})


class Passes:
    """Run and print passes over a table."""

    def __init__(self, client: Any, folder: Path):
        self.client, self.folder = client, folder
        self.rows: list[dict[str, Any]] = []
        self._before: dict[str, float] = {}

    def run(self, what: str, work: Callable[[], Any]) -> Any:
        """Do some work, and print what it took."""
        began = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - began
        report = dask_gpurt.report(self.client)
        now = report["counters"]
        names = (
            "reads.bytes.decoded",
            "reads.bytes.device",
            "reads.dropped",
            "memory.short",
            "reads.replaced",
        )
        changes = {name: now.get(name, 0) - self._before.get(name, 0) for name in names}
        self._before = now
        memory = dask_gpurt.memory_usage(self.client).to_pandas()
        kept = int(memory[memory.tier == "device"].cached.sum())
        row = {"pass": what, "seconds": round(seconds, 3), **changes, "kept": kept}
        self.rows.append(row | {"fallbacks": report["fallbacks"]})
        megabytes = [
            f"{name.split('.')[-1]} {value / 1e6:9.1f}" for name, value in changes.items() if "bytes" in name
        ]
        counts = [f"{name} {value:.0f}" for name, value in changes.items() if "bytes" not in name]
        print(f"{what:28} {seconds:7.3f} s ", *megabytes, *counts, f"kept {kept}", sep="  ", flush=True)
        return result

    def table(self) -> Any:
        """Return the table."""
        return dd.read_parquet(self.folder, split_row_groups=False, aggregate_files=False)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--files", type=int, default=6)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    from dask_cuda import LocalCUDACluster
    from distributed import Client, wait

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(given.files):
            write(folder, number, number)
        expected = results(pd.read_parquet(folder))
        time.sleep(1.1)  # younger files are not kept
        with (
            dask.config.set({"gpurt.memory.device": TIER, "dataframe.backend": "cudf"}),
            LocalCUDACluster(n_workers=given.gpus, rmm_pool_size=POOL, rmm_maximum_pool_size=POOL) as local,
            Client(local) as client,
        ):
            dask_gpurt.enable(client)
            passes = Passes(client, folder)
            for what in ("first", "second", "third"):
                compare(passes.run(what, lambda: results(passes.table())), expected)
            passes.run("write into results", lambda: passes.table().map_partitions(spoil).compute())
            compare(passes.run("after that", lambda: results(passes.table())), expected)
            write(folder, 0, 99)
            expected = results(pd.read_parquet(folder))
            time.sleep(1.1)
            compare(passes.run("a file replaced", lambda: results(passes.table())), expected)
            compare(passes.run("again", lambda: results(passes.table())), expected)
            numbers = range(18 * given.gpus)
            many = client.map(fill, numbers)
            passes.run("fill the GPUs", lambda many=many: wait(many))
            sums = client.map(lambda frame: int(frame.number.sum()), many)
            assert (
                passes.run("sums of that", lambda sums=sums: sum(client.gather(sums))) == sum(numbers) << 26
            )
            compare(passes.run("while it is full", lambda: results(passes.table())), expected)
            del many, sums
            compare(passes.run("after it was full", lambda: results(passes.table())), expected)
            compare(passes.run("and again", lambda: results(passes.table())), expected)
            print("fallbacks", dask_gpurt.report(client)["fallbacks"])
            print(dask_gpurt.memory_usage(client))
            dask_gpurt.disable(client)
        if given.json:
            given.json.write_text(json.dumps(passes.rows, indent=1, default=str))
        print("all results are right")


if __name__ == "__main__":
    main()
