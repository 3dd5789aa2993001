"""Compare the planning of queries with the runtime's planning cache and without, in turns.

    python -m benchmarks.tpch.planning_cache --scale 1 --json planning-cache.json

In each turn all queries are planned twice with Dask as shipped, and twice with an initially empty cache: in
the first run a query can reuse entries of earlier queries, in the second run its own too. Planning means
building a query, optimising it and making its graph. The order alternates. No cluster is needed; the shuffle
method is Dask's ``tasks``. On a machine with other load, ``--clock cpu`` measures the CPU time of this
process.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click
import dask
from rich.console import Console

from benchmarks.common.environment import environment
from dask_gpurt.client.planning import PlanningCache
from dask_gpurt.observe import Metrics

from ..common.commandline import write
from .figures import rounded, spread
from .options import planning_options
from .planning import MetadataClock, OnePlanner
from .queries import QUERIES, Query
from .tables import ARROW, FOLDER, PATTERN, ParquetTables

DASK, KEPT = "dask", "kept"
RUNS = ("first", "warm")
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": perf_counter, "cpu": process_time}


@contextmanager
def planned_by(contender: str, metrics: Metrics) -> Iterator[None]:
    """Plan as Dask does, or with a fresh cache that is removed at the end."""
    cache = PlanningCache(OnePlanner, metrics)
    if contender == KEPT:
        cache.install()
    try:
        yield
    finally:
        cache.remove()
        gc.collect()


def seconds_of(query: Query, tables: ParquetTables, clock: Callable[[], float]) -> float:
    """Return the seconds to build and optimise a query and to make its graph."""
    start = clock()
    query.build(tables).optimize(fuse=True).__dask_graph__()
    return clock() - start


def take_turns(
    queries: Sequence[Query], tables: ParquetTables, turns: int, metrics: Metrics, clock: Callable[[], float]
) -> dict[tuple[str, str], list[list[float]]]:
    """Return the seconds of each query by contender and run, turn by turn."""
    seconds: dict[tuple[str, str], list[list[float]]] = {
        (who, run): [] for who in (DASK, KEPT) for run in RUNS
    }
    for query in queries:
        seconds_of(query, tables, clock)  # imports modules
    for turn in range(turns):
        for contender in (DASK, KEPT) if turn % 2 == 0 else (KEPT, DASK):
            with planned_by(contender, metrics):
                for run in RUNS:
                    seconds[contender, run].append([seconds_of(query, tables, clock) for query in queries])
    return seconds


def metadata_calls(queries: Sequence[Query], tables: ParquetTables, contender: str) -> dict[str, int]:
    """Count computations of expressions' metadata in a first and in a second run."""
    calls = {}
    with planned_by(contender, Metrics()):
        for run in RUNS:
            with MetadataClock() as metadata:
                for query in queries:
                    seconds_of(query, tables, perf_counter)
            calls[run] = int(metadata.summary()["calls"])
    return calls


def figures_of(seconds: dict[tuple[str, str], list[list[float]]], numbers: Sequence[int]) -> dict[str, Any]:
    """Return medians over the turns with their intervals, and how many times as long Dask's take.

    Returns
    -------
    dict
        ``queries``: of each query the median seconds by contender and run. ``sums``: of all queries.
        ``median_query``, ``largest_query``: of the medians of the queries. ``ratios``: Dask's sum over that
        with the cache in the same turn, for first and for warm runs.
    """
    by_query = {
        who_and_run: [statistics.median(of_query) for of_query in zip(*turns, strict=True)]
        for who_and_run, turns in seconds.items()
    }
    sums = {who_and_run: [sum(turn) for turn in turns] for who_and_run, turns in seconds.items()}
    named = {key: "-".join(key) for key in seconds}
    return {
        "queries": [
            {"query": number, **{named[key]: by_query[key][at] for key in seconds}}
            for at, number in enumerate(numbers)
        ],
        "sums": {named[key]: spread(sums[key]) for key in seconds},
        "median_query": {named[key]: statistics.median(by_query[key]) for key in seconds},
        "largest_query": {named[key]: max(by_query[key]) for key in seconds},
        "ratios": {
            run: spread([ours / kept for ours, kept in zip(sums[DASK, run], sums[KEPT, run], strict=True)])
            for run in RUNS
        },
    }


@click.command(help=__doc__.partition("\n")[0])
@planning_options
@click.option("--named", type=click.Choice([FOLDER, PATTERN, ARROW]), default=FOLDER, show_default=True)
@click.option("--turns", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--clock", type=click.Choice([*CLOCKS]), default="wall", show_default=True)
def main(
    tables: ParquetTables,
    queries: list[int],
    backend: str,
    named: str,
    turns: int,
    clock: str,
    output: Path | None,
) -> None:
    tables = ParquetTables(tables.directory, named)
    chosen, metrics = [QUERIES[number] for number in queries], Metrics()
    with dask.config.set({"dataframe.shuffle.method": "tasks", "dataframe.backend": backend}):
        seconds = take_turns(chosen, tables, turns, metrics, CLOCKS[clock])
        calls = {contender: metadata_calls(chosen, tables, contender) for contender in (DASK, KEPT)}
    figures = figures_of(seconds, queries)
    results = {
        "parameters": {
            **{"scale": tables.scale, "parts": tables.parts, "backend": backend},
            **{"named": named, "turns": turns, "clock": clock},
        },
        **environment(),
        "figures": rounded(figures),
        "metadata_calls": calls,
        "counters": metrics.snapshot()["counters"],
    }
    write(results, output)
    Console().print({name: results["figures"][name] for name in figures if name != "queries"}, calls)


if __name__ == "__main__":
    main()
