"""Measure the throughput of concurrent threads, or processes, on one GPU, in tasks per second.

    python -m benchmarks.overlap.concurrency --output concurrency.json
    python -m benchmarks.overlap.concurrency --backend pandas --rows 100000 --seconds 1   # what it does

A task is typical of a user's program: a join, an assignment and a groupby of the DataFrame API, which pass no
stream. Threads share one process and its default stream, or have a default stream each
(``CUDF_PER_THREAD_STREAM``); memory comes from a pool, or from the driver's (``async``). Processes share the
GPU in turns, or under MPS where it runs. Each cell is measured ``--repeat`` times, the cells in turns.
Each task must return the same sum as when it runs alone.
"""

from __future__ import annotations

import importlib
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.common.commandline import split_list, write
from benchmarks.common.environment import environment
from benchmarks.common.processes import Barrier, Child, one_of_each, say

#: Average rows per key in the larger side of a join.
ALIKE = 8
#: Share of the GPU's memory that all pools of a cell have together.
POOLS = 0.5


@dataclass(frozen=True)
class Cell:
    """Describe one way of running tasks concurrently.

    Attributes
    ----------
    processes, threads
        Processes on the GPU, and threads of each that run tasks.
    streams
        ``default`` for one stream per process, ``per-thread`` for one per thread.
    memory
        ``pool`` or ``async``.
    """

    processes: int
    threads: int
    streams: str
    memory: str

    @property
    def name(self) -> str:
        return f"{self.processes} x {self.threads}, {self.streams}, {self.memory}"


@dataclass(frozen=True)
class Work:
    """Hold the sizes of tasks and the length of a measurement."""

    backend: str
    rows: tuple[int, ...]
    seconds: float
    repeat: int


def task(left: Any, right: Any) -> Any:
    """Join, assign and group as a query does, and return the sum of the result."""
    joined = left.merge(right, on="key")
    joined = joined.assign(value=joined["value"] * 2 + joined["weight"])
    return joined.groupby("group")["value"].sum().sum()


def inputs(backend: str, rows: int, seed: int) -> tuple[Any, Any]:
    """Make both sides of a join, with integer values so that sums are exact."""
    library = importlib.import_module(backend)
    arrays = importlib.import_module({"cudf": "cupy", "pandas": "numpy"}[backend])
    random, distinct = arrays.random.RandomState(seed), max(1, rows // ALIKE)
    left = {
        "key": random.randint(0, distinct, rows, dtype="int64"),
        "group": random.randint(0, 1000, rows, dtype="int64"),
        "value": random.randint(0, 1000, rows, dtype="int64"),
    }
    right = {
        "key": arrays.arange(distinct, dtype="int64"),
        "weight": random.randint(0, 9, distinct, dtype="int64"),
    }
    return library.DataFrame(left), library.DataFrame(right)


def run_process(cell: Cell, work: Work, barrier: Path, rank: int) -> Iterator[int]:
    """Yield the tasks that one process of a cell completes in each measurement, size by size."""
    if cell.streams == "per-thread":
        os.environ["CUDF_PER_THREAD_STREAM"] = "1"  # read when cudf is imported
    if work.backend == "cudf":
        _take_memory(cell)
    with Barrier(barrier, rank, cell.processes) as meeting:
        for rows in work.rows:
            seeds = range(cell.threads * rank, cell.threads * (rank + 1))
            sides = [inputs(work.backend, rows, seed) for seed in seeds]
            expected = [int(task(*side)) for side in sides]
            for _ in range(work.repeat):
                meeting.meet()
                yield sum(_together(sides, expected, work.seconds))


def _take_memory(cell: Cell) -> None:
    rmm, cupy = importlib.import_module("rmm"), importlib.import_module("cupy")
    if cell.memory == "async":
        rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource())
    else:
        share = int(cupy.cuda.runtime.memGetInfo()[1] * POOLS / cell.processes) // 256 * 256
        pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=share)
        rmm.mr.set_current_device_resource(pool)
    cupy.cuda.set_allocator(importlib.import_module("rmm.allocators.cupy").rmm_cupy_allocator)


def _together(sides: list[tuple[Any, Any]], expected: list[int], seconds: float) -> list[int]:
    """Run tasks on one thread per pair of sides for ``seconds``; return the tasks done by each."""
    done, wrong = [0] * len(sides), []
    ready = threading.Barrier(len(sides))

    def run(number: int) -> None:
        ready.wait()
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            if (found := int(task(*sides[number]))) != expected[number]:
                wrong.append((found, expected[number]))
                return
            done[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(sides))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise ValueError(f"concurrent tasks returned {wrong[0][0]}, not {wrong[0][1]}")
    return done


def measure(cell: Cell, work: Work, folder: Path) -> dict[int, list[float]]:
    """Return the tasks per second of all processes of a cell, by rows and measurement."""
    barrier = Barrier.prepare(folder / f"{time.monotonic_ns()}.barrier", cell.processes)
    children = [Child(run_process, cell, work, barrier, rank) for rank in range(cell.processes)]
    try:
        return {
            rows: [sum(one_of_each(children)) / work.seconds for _ in range(work.repeat)]
            for rows in work.rows
        }
    finally:
        for child in children:
            child.end()


def cells(backend: str, most: int, streams: list[str], memories: list[str]) -> list[Cell]:
    """List all cells: a single thread, several threads, then several single-threaded processes."""
    if backend == "pandas":
        streams, memories = streams[:1], memories[:1]
    counts = [count for count in (1, 2, 4) if count <= most]
    threads = [Cell(1, count, *way) for way in product(streams, memories) for count in counts]
    return threads + [Cell(count, 1, streams[0], memories[0]) for count in counts if count > 1]


@click.command(context_settings={"show_default": True})
@click.option("--backend", type=click.Choice(["cudf", "pandas"]), default="cudf")
@click.option("--rows", multiple=True, type=int, default=[100_000, 1_000_000, 10_000_000])
@click.option("--seconds", default=1.0, help="Seconds of a measurement.")
@click.option("--repeat", default=3)
@click.option("--most", default=4, help="Maximum of threads or processes.")
@click.option("--streams", default="default,per-thread", callback=split_list(["default", "per-thread"]))
@click.option("--memory", default="pool,async", callback=split_list(["pool", "async"]))
@click.option("--output", type=click.Path(path_type=Path))
def main(
    backend: str,
    rows: tuple[int, ...],
    seconds: float,
    repeat: int,
    most: int,
    streams: list[str],
    memory: list[str],
    output: Path | None,
) -> None:
    """Measure the throughput of threads or processes on one GPU, in tasks per second."""
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for cell in cells(backend, most, streams, memory):
            one: dict[str, Any] = asdict(cell)
            try:
                one["tasks a second"] = measure(cell, Work(backend, rows, seconds, repeat), Path(folder))
            except (RuntimeError, ValueError) as error:
                one["error"] = str(error).strip().rpartition("\n")[2]
            found.append(one)
            say(f"{cell.name}: {one.get('tasks a second') or one['error']}")
            write({**environment(), "rows": rows, "seconds": seconds, "cells": found}, output)
    show(found, rows)


def show(found: list[dict[str, Any]], rows: tuple[int, ...]) -> None:
    """Print tasks per second of each cell, and the speedup over one thread of one process."""
    table = Table("processes", "threads", "streams", "memory", *(f"{count:,} rows" for count in rows))
    base = found[0].get("tasks a second")
    for one in found:
        names = [str(one[name]) for name in ("processes", "threads", "streams", "memory")]
        if (rates := one.get("tasks a second")) is None:
            table.add_row(*names, one["error"])
            continue
        medians = {count: statistics.median(rates[count]) for count in rows}
        factors = {count: medians[count] / statistics.median(base[count]) if base else 1.0 for count in rows}
        table.add_row(*names, *(f"{medians[count]:.1f}/s, {factors[count]:.2f} x" for count in rows))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
