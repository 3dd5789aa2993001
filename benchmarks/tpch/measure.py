"""Run queries with all contenders in turns, check each result, and record a budget of each run."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import process_time
from typing import Any

import pandas as pd
from distributed import Client
from distributed.metrics import time

from ..common.budget import budget, forget, take_log
from ..common.counters import difference, read_counters
from .contenders import ClusterOptions, Contender, start
from .gpu import begin_trace, can_trace, end_trace, take_utilisation
from .pauses import take_pauses
from .queries import Query
from .reference import check, collected, computed
from .styles import CAREFUL, STYLES
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
    style: str = CAREFUL


@dataclass(frozen=True)
class Plan:
    """Hold the queries to run, how often, and the expected results."""

    tables: ParquetTables
    queries: Sequence[int]
    #: Expected results by query; queries without one are not checked.
    wanted: Mapping[int, pd.DataFrame]
    #: Warm runs after each first run.
    warm: int
    styles: Sequence[str] = (CAREFUL,)


def measure_clusters(
    options: ClusterOptions, groups: Sequence[Sequence[str]], plan: Plan, round_number: int, trace: bool
) -> Iterator[Run]:
    """Start a cluster for each group of contenders, and run every query with every contender."""
    with start(options, groups) as contenders:
        traced = trace and all(can_trace(each.client) for each in contenders)
        yield from measure(contenders, plan, round_number=round_number, traced=traced)


def measure(contenders: Sequence[Contender], plan: Plan, *, round_number: int, traced: bool) -> Iterator[Run]:
    """Run every query in every style with every contender: once first, then ``plan.warm`` times; in turns.

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
    for number, style in itertools.product(plan.queries, plan.styles):
        last: dict[str, Run] = {}
        for turn in range(plan.warm + 1):
            first = (turn + number) % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                if contender.name in last and last[contender.name].error:
                    continue
                run = run_case(contender, style, number, plan, round_number, turn)
                last[contender.name] = run
                yield run
        for contender in contenders if traced else ():
            if not last[contender.name].error:
                query = STYLES[style][number]
                last[contender.name].budget |= traced_run(contender, query, plan.tables)


def run_case(contender: Contender, style: str, number: int, plan: Plan, round_number: int, turn: int) -> Run:
    """Run a query in a style once; a failure is a result, and the other contenders continue."""
    run = Run(number, contender.name, round_number, turn, style=style)
    try:
        run.seconds, run.budget = timed_run(contender, STYLES[style][number], plan)
    except Exception as error:
        run.error = repr(error)
    return run


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
    processes = cpu_of_processes(client)
    with contender.chosen():
        began = time()
        lazy = query.build(plan.tables)
        built = time()
        found = collected(query, computed(lazy))
        ended = time()
    cpu = sum(difference(processes, cpu_of_processes(client)).values())
    pauses = take_pauses(client)
    spent = {**budget(began, built, ended, take_log(client), threads), "collections": pauses}
    spent["cpu_seconds"] = cpu
    if contender.on_gpu:
        spent["gpu_busy_nvml"] = take_utilisation(client)
    spent |= difference(counted, read_counters(client, contender.has_runtime))
    if query.number in plan.wanted:
        check(query, found, plan.wanted[query.number])
    return ended - began, spent


def cpu_of_processes(client: Client) -> dict[str, float]:
    """Return the CPU seconds of the workers, the scheduler and this process, which may be the same."""

    def spent() -> tuple[int, float]:
        return os.getpid(), process_time()

    found = [*client.run(spent).values(), client.run_on_scheduler(spent), spent()]
    return {str(process): seconds for process, seconds in found}


def traced_run(contender: Contender, query: Query, tables: ParquetTables) -> dict[str, Any]:
    """Run a query once more, untimed, and return the activity of the GPUs."""
    forget(contender.client)
    begin_trace(contender.client)
    with contender.chosen():
        computed(query.build(tables))
    return end_trace(contender.client)
