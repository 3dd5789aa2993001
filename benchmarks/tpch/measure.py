"""Run queries with all contenders in turns, check each result, and record a budget of each run."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from distributed.metrics import time

from dask_gpurt.tools.bench.budget import budget, take_log
from dask_gpurt.tools.bench.counters import difference, read_counters
from dask_gpurt.tools.bench.measure import forget

from .contenders import ClusterOptions, Contender, start
from .gpu import begin_trace, can_trace, end_trace, take_utilisation
from .pauses import take_pauses
from .queries import QUERIES, Query
from .reference import check, collected
from .tables import ParquetTables


@dataclass
class Run:
    """Record one timed run of a query. ``turn`` 0 is the contender's first on a new cluster."""

    query: int
    contender: str
    round: int
    turn: int
    seconds: float = 0.0
    budget: dict[str, Any] = field(default_factory=dict)
    #: Set if the run failed or had a wrong result; it then has no time.
    error: str = ""


@dataclass(frozen=True)
class Plan:
    """Hold the queries to run, how often, and the expected results."""

    tables: ParquetTables
    queries: Sequence[int]
    #: Expected results by query; queries without one are not checked.
    wanted: Mapping[int, pd.DataFrame]
    #: Warm runs after each first run.
    warm: int


def measure_clusters(
    options: ClusterOptions, groups: Sequence[Sequence[str]], plan: Plan, round_number: int, trace: bool
) -> Iterator[Run]:
    """Start a cluster for each group of contenders, and run every query with every contender."""
    with start(options, groups) as contenders:
        traced = trace and all(can_trace(each.client) for each in contenders)
        yield from measure(contenders, plan, round_number=round_number, traced=traced)


def measure(contenders: Sequence[Contender], plan: Plan, *, round_number: int, traced: bool) -> Iterator[Run]:
    """Run every query with every contender: once first, then ``plan.warm`` times; in turns.

    Each turn runs every contender, starting with a different one. A contender that fails is skipped for the
    rest of this query.

    Parameters
    ----------
    contenders
        Contenders with running clusters.
    plan
        The queries and runs.
    round_number
        The number of the round, in which clusters were started.
    traced
        Whether to add an untimed run of each query with CUPTI.
    """
    for number in plan.queries:
        last: dict[str, Run] = {}
        for turn in range(plan.warm + 1):
            first = (turn + number) % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                if contender.name in last and last[contender.name].error:
                    continue
                run = last[contender.name] = Run(number, contender.name, round_number, turn)
                try:
                    run.seconds, run.budget = timed_run(contender, QUERIES[number], plan)
                except Exception as error:  # a failure is a result; the other contenders continue
                    run.error = repr(error)
                yield run
        for contender in contenders if traced else ():
            if not last[contender.name].error:
                last[contender.name].budget |= traced_run(contender, QUERIES[number], plan.tables)


def timed_run(contender: Contender, query: Query, plan: Plan) -> tuple[float, dict[str, Any]]:
    """Run a query and check its result; return its seconds and their budget."""
    client = contender.client
    threads = client.nthreads()
    forget(client)
    client.run(gc.collect)
    counted = read_counters(client, contender.has_runtime)
    take_log(client)
    if contender.on_gpu:
        take_utilisation(client)
    take_pauses(client)
    with contender.chosen():
        began = time()
        lazy = query.build(plan.tables)
        built = time()
        found = collected(query, lazy.compute())
        ended = time()
    pauses = take_pauses(client)
    spent = {**budget(began, built, ended, take_log(client), threads), "collections": pauses}
    if contender.on_gpu:
        spent["gpu_busy_nvml"] = take_utilisation(client)
    spent |= difference(counted, read_counters(client, contender.has_runtime))
    if query.number in plan.wanted:
        check(query, found, plan.wanted[query.number])
    return ended - began, spent


def traced_run(contender: Contender, query: Query, tables: ParquetTables) -> dict[str, Any]:
    """Run a query once more, untimed, and return the activity of the GPUs."""
    forget(contender.client)
    begin_trace(contender.client)
    with contender.chosen():
        query.build(tables).compute()
    return end_trace(contender.client)
