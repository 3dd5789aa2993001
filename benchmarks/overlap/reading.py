"""Time a program that reads Parquet files and computes, with reads beside compute and without.

    python -m benchmarks.overlap.reading --rounds 9 --json reading.json
    python -m benchmarks.overlap.reading --rate 50MiB          # a store: so much a second for each read

The program reads, filters, joins, groups and writes. Each round runs it on files on the disk (``cold``:
dropped from the page cache, best effort) and in the page cache (``warm``), with each value of
``gpurt.reads.beside`` in turn; the first run after a change does not count. ``compute alone`` is the same
program on persisted tables; ``decoding and computing alone`` is the program on files in the page cache
without any delay, one read at a time; ``disk alone`` only reads the files' bytes, with a thread per worker.
Each result is compared with the first. With ``--rate`` a worker waits when it opens a file, as if its bytes
came from a store of that speed. Nothing that was read is kept. ``--backend cudf`` runs it on GPUs.
"""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.context import thread_state
from distributed import Client, wait
from fsspec.implementations.local import LocalFileSystem
from rich.console import Console
from rich.table import Table

import dask_gpurt
from benchmarks.common.commandline import in_bytes, write
from benchmarks.common.environment import environment
from benchmarks.common.processes import say
from benchmarks.tpch.figures import spread
from dask_gpurt.cli.cluster import local_cluster

#: Rows of ``facts`` per row of ``keys``.
FACTS_PER_KEY = 8
GROUPS = 1000
#: Bytes per call of read for ``disk alone``.
BLOCK_BYTES = 2**22
#: What is measured without reading, or without waiting for the store.
COMPUTE, DECODE = "compute alone", "decoding and computing alone"
LONGER, LONGER_WITH_DECODING = (
    f"against the longer of {compute} and disk" for compute in ("compute", "decoding with compute")
)
#: Environment variable with the bytes per second of a slow store.
RATE = "GPURT_BENCHMARK_RATE"


class SlowFiles(LocalFileSystem):
    """Serve local files under ``slow://`` with the delay of a slow store to tasks, but not to planning.

    Attributes
    ----------
    bytes_per_s
        Speed of reading one file; from the environment, which workers inherit.
    """

    protocol = "slow"
    cachable = False

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        if mode == "rb" and hasattr(thread_state, "key"):  # of the task that runs on this thread
            wait_as_for_store(path)
        return super()._open(path, mode, block_size, **kwargs)


def wait_as_for_store(path: str | Path) -> None:
    """Sleep as long as a slow store would take for a file, if ``--rate`` is given."""
    if rate := os.environ.get(RATE):
        time.sleep(os.path.getsize(path) / float(rate))


def make_tables(folder: Path, files: int, rows: int) -> None:
    """Write ``facts`` to ``files`` files, and ``keys``, the other side of the join, to a quarter as many."""
    rng = np.random.default_rng(0)
    keys = files * rows // FACTS_PER_KEY
    for name in ("facts", "keys"):
        (folder / name).mkdir()
    for part in range(files):
        facts = {
            "key": rng.integers(0, keys, rows),
            "value": rng.integers(0, 1000, rows),
            "text": rng.integers(0, 10**9, rows).astype(str),
            "price": rng.random(rows),
        }
        pd.DataFrame(facts).to_parquet(folder / "facts" / f"{part:04}.parquet")
    for part, some in enumerate(np.array_split(np.arange(keys), max(1, files // 4))):
        other = {"key": some, "group": some % GROUPS, "weight": rng.integers(0, 9, len(some))}
        pd.DataFrame(other).to_parquet(folder / "keys" / f"{part:04}.parquet")


def tables(folder: Path, *, delayed: bool = True) -> tuple[Any, ...]:
    """Return the two tables as collections, of files of the slow store if there is one."""
    files = SlowFiles() if delayed and RATE in os.environ else "fsspec"
    return tuple(dd.read_parquet(str(folder / name), filesystem=files) for name in ("facts", "keys"))


def run_program(facts: Any, keys: Any, output: Path) -> float:
    """Filter, join, group and write; return the sum of the written values."""
    some = facts[(facts.value >= 300) & (facts.text.str.len() > 3)]
    joined = some.merge(keys, on="key")
    joined["score"] = joined.value * joined.weight
    grouped = joined.groupby("group")[["score", "value"]].sum(split_out=4).reset_index()
    shutil.rmtree(output, ignore_errors=True)
    grouped.to_parquet(output)
    return float(pd.read_parquet(output).score.sum())


def drop_from_cache(folder: Path) -> None:
    """Flush files, and ask the kernel to drop them from the page cache."""
    for path in folder.rglob("*.parquet"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_bytes(folder: Path, threads: int) -> int:
    """Read all files with ``threads`` threads; return their bytes."""

    def read(path: Path) -> int:
        wait_as_for_store(path)
        with path.open("rb", buffering=0) as file:
            return sum(len(block) for block in iter(lambda: file.read(BLOCK_BYTES), b""))

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, sorted(folder.rglob("*.parquet"))))


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the duration of a call in seconds, and its result."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def measure(
    client: Client, folder: Path, beside: Sequence[int | str], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield measurements: what was measured, its seconds, and the counters of its reads."""
    output, workers = folder / "written", len(client.nthreads())
    expected: float | None = None

    def timed_program(facts: Any, keys: Any) -> float:
        nonlocal expected
        seconds, found = timed(lambda: run_program(facts, keys, output))
        expected = found if expected is None else expected
        if found != expected:
            raise click.ClickException(f"the sum is {found}, and was {expected}")
        return seconds

    for number in range(rounds + 1):  # the first round warms up and is discarded
        turns = [*beside[number % len(beside) :], *beside[: number % len(beside)]]
        for limit in turns:
            with dask.config.set({"gpurt.reads.beside": limit, "gpurt.cache": "off"}):
                dask_gpurt.enable(client)
            timed_program(*tables(folder))  # in which `auto` adapts
            for state in ("cold", "warm"):
                if state == "cold":
                    drop_from_cache(folder)
                before = dask_gpurt.report(client)["counters"]
                seconds = timed_program(*tables(folder))
                after = dask_gpurt.report(client)["counters"]
                reads = {
                    name: after[name] - before.get(name, 0) for name in after if name.startswith("reads.")
                }
                if number:
                    yield {"what": f"{state}, {limit} beside", "seconds": seconds, "counters": reads}
            dask_gpurt.disable(client)
        with dask.config.set({"gpurt.reads.beside": 0, "gpurt.cache": "off"}):
            dask_gpurt.enable(client)
        held = [table.persist() for table in tables(folder)]
        wait(held)
        computing = timed_program(*held)
        del held
        decoding = timed_program(*tables(folder, delayed=False))
        dask_gpurt.disable(client)
        if number:
            yield {"what": COMPUTE, "seconds": computing}
            yield {"what": DECODE, "seconds": decoding}
        for state in ("cold", "warm"):
            if state == "cold":
                drop_from_cache(folder)
            seconds, _ = timed(lambda: read_bytes(folder, workers))
            if number:
                yield {"what": f"disk alone, {state}", "seconds": seconds}


def figures(measured: Sequence[dict[str, Any]], beside: Sequence[int | str]) -> dict[str, Any]:
    """Return the spread of each time, and of its ratio to ``beside`` 0 in the same round."""
    seconds: dict[str, list[float]] = {}
    for one in measured:
        seconds.setdefault(one["what"], []).append(one["seconds"])
    ratios = {
        f"{state}, {limit} beside": [
            with_reads / without
            for with_reads, without in zip(
                seconds[f"{state}, {limit} beside"], seconds[f"{state}, 0 beside"], strict=True
            )
        ]
        for state in ("cold", "warm")
        for limit in beside
        if limit and 0 in beside
    }

    def against_longer(compute: str) -> dict[str, float]:
        longer = {
            state: max(statistics.median(seconds[name]) for name in (compute, f"disk alone, {state}"))
            for state in ("cold", "warm")
        }
        return {
            name: statistics.median(values) / longer[name.partition(",")[0]]
            for name, values in seconds.items()
            if name.endswith("beside")
        }

    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "against none beside": {name: spread(values) for name, values in ratios.items()},
        LONGER: against_longer(COMPUTE),
        LONGER_WITH_DECODING: against_longer(DECODE),
    }


def print_figures(found: dict[str, Any]) -> None:
    against = "against the longer alone", "the same with decoding"
    table = Table("", "median s", "interval", "against none beside", "interval", *against)
    for name, of in sorted(found["seconds"].items()):
        ratio = found["against none beside"].get(name)
        longer = [found[which].get(name) for which in (LONGER, LONGER_WITH_DECODING)]
        table.add_row(
            name,
            f"{of['median']:.2f}",
            f"{of['low']:.2f} to {of['high']:.2f}",
            f"{ratio['median']:.3f}" if ratio else "",
            f"{ratio['low']:.3f} to {ratio['high']:.3f}" if ratio else "",
            *(f"{each:.2f}" if each else "" for each in longer),
        )
    Console(highlight=False).print(table)


@click.command(help=__doc__.partition("\n")[0])
@click.option(
    "--files", type=click.IntRange(min=4), default=16, show_default=True, help="Files of the facts."
)
@click.option(
    "--rows", type=click.IntRange(min=100), default=500_000, show_default=True, help="Rows of a file."
)
@click.option("--backend", type=click.Choice(["pandas", "cudf"]), default="pandas", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of a worker.")
@click.option("--beside", default="0,1,auto", show_default=True, help="Values of gpurt.reads.beside.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--rate", callback=in_bytes, help="Bytes a second of a slow store.  [default: the disk's]")
@click.option("--directory", type=click.Path(file_okay=False), help="Folder on the disk to read from.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    files: int,
    rows: int,
    backend: str,
    workers: int,
    threads: int,
    beside: str,
    rounds: int,
    rate: int | None,
    directory: str | None,
    output: Path | None,
) -> None:
    if rate is not None:
        os.environ[RATE] = str(rate)
    limits = [limit if limit == "auto" else int(limit) for limit in beside.split(",")]
    with TemporaryDirectory(prefix="gpurt-reading-", dir=directory) as name:
        folder = Path(name)
        make_tables(folder, files, rows)
        nbytes = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
        measured = []
        with (
            local_cluster(backend, workers, threads=threads) as cluster,
            dask.config.set({"dataframe.backend": backend}),
            Client(cluster) as client,
        ):
            for one in measure(client, folder, limits, rounds):
                measured.append(one)
                say(f"{one['what']}: {one['seconds']:.2f} s")
    found = figures(measured, limits)
    parameters = {
        "files": files,
        "rows": rows,
        "bytes": nbytes,
        "backend": backend,
        "workers": workers,
        "threads": threads,
        "rate": rate,
    }
    write({"parameters": parameters, **environment(), **found, "runs": measured}, output)
    print_figures(found)


if __name__ == "__main__":
    # Import under the full name, so that workers can unpickle functions of this module.
    importlib.import_module("benchmarks.overlap.reading").main()
