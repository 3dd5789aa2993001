"""Run the queries of the bench with the runtime and with Dask's own shuffle, interleaved on one cluster."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import dask
import pandas as pd
from distributed import Client
from distributed.metrics import time

import dask_gpurt
from dask_gpurt.dask_hooks.expression_threads import sharing_expressions
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.tools.bench.budget import TaskLog, budget, take_log
from dask_gpurt.tools.bench.counters import (
    begin_peaks,
    difference,
    peak_memory,
    read_counters,
)
from dask_gpurt.tools.bench.results import GPURT, BenchResult, Machine, Observed, Run, Spent
from dask_gpurt.tools.bench.tables import QUERIES, Query, Tables, TableSize

#: Dask's default method on a cluster.
DEFAULT_METHOD = "p2p"
#: Methods to compare the runtime with.
METHODS = ("p2p", "tasks")
METHOD_KEY = "dataframe.shuffle.method"
FORGET_TIMEOUT_S, FORGET_POLL_INTERVAL_S = 30.0, 0.005


class BusyError(RuntimeError):
    """The cluster has tasks of other programs, which would disturb the bench and vice versa."""


class WrongResultError(ValueError):
    """A result differs from the first result of its query."""


def measure(
    client: Client,
    *,
    scale: float = 0.1,
    partitions: int | None = None,
    rounds: int = 3,
    against: str | None = None,
    backend: str = "pandas",
    folder: str | None = None,
    queries: Sequence[Query] = QUERIES,
    on_run: Callable[[Run, int], None] | None = None,
) -> BenchResult:
    """Measure what the runtime gains on a cluster, and where the time goes.

    Each round runs all queries with the runtime on and with the runtime off; the order alternates between
    rounds. Each query runs twice, and the second run counts. The cluster is restored to its original state.
    If the runtime was already on, it stays on, also for this client, and is not compared with anything.

    Parameters
    ----------
    scale
        Scale of the tables; 1 has 6 million items, as in TPC-H.
    partitions
        Number of partitions of the large tables; by default two per task thread.
    rounds
        Number of rounds, at least 1.
    against
        ``p2p`` or ``tasks``; by default the configured method, or Dask's default.
    folder
        A folder that the client and all workers can access under this name. The tables are written once, to
        its subfolder ``gpurt-bench``, and read by each query. Without it each query generates the tables.
    on_run
        Called after each run, with the run and the total number of runs.

    Raises
    ------
    ValueError
        If the cluster has no workers.
    BusyError
        If the cluster has tasks of other programs.
    WrongResultError
        If a result differs from the first result of its query.
    RuntimeError
        If the runtime cannot be switched on or off.
    """
    contenders = (GPURT, against or configured_method())
    threads = sum(client.nthreads().values())
    if not threads:
        raise ValueError("the cluster has no workers")
    _require_idle(client)
    tables = Tables(TableSize(scale, partitions or max(4, 2 * threads)), backend, folder)
    was_on = dask_gpurt.report(client).enabled
    compared = contenders[:1] if was_on else contenders
    bench = _Bench(client, tables)
    with client.as_current(), _observing(client):
        if folder is not None:
            tables.write()
        for number in range(rounds):
            for contender in compared if number % 2 == 0 else compared[::-1]:
                with bench.chosen(contender, switch=not was_on):
                    for run in bench.run_all(queries, contender, number):
                        if on_run is not None:
                            on_run(run, 2 * rounds * len(compared) * len(queries))
    return BenchResult(
        machine=machine(client, backend),
        tables=repr(tables),
        from_files=folder is not None,
        contenders=compared,
        runs=tuple(bench.runs),
        observed=bench.observed,
    )


def configured_method() -> str:
    """Return the shuffle method that Dask uses on a cluster without the runtime."""
    method: str | None = dask.config.get(METHOD_KEY, None)
    return method if method in METHODS else DEFAULT_METHOD


def machine(client: Client, backend: str) -> Machine:
    """Describe a cluster."""
    workers: Mapping[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
    return Machine(
        workers=len(workers),
        threads=sum(worker["nthreads"] for worker in workers.values()),
        hosts=len({worker["host"] for worker in workers.values()}),
        backend=backend,
    )


@contextmanager
def _observing(client: Client) -> Iterator[None]:
    """Log tasks on the scheduler during the body."""
    with ExitStack() as stack:
        stack.enter_context(sharing_expressions())  # the runtime is off in between
        client.register_plugin(TaskLog(), name=TaskLog.name)
        stack.callback(client.unregister_scheduler_plugin, TaskLog.name)
        yield


@dataclass
class _Bench:
    """Run queries on a cluster, one contender at a time."""

    client: Client
    tables: Tables
    runs: list[Run] = field(default_factory=list)
    observed: Observed = field(default_factory=lambda: Observed({}, 0))
    #: The first result of each query, which all later results have to equal.
    _wanted: dict[str, pd.DataFrame] = field(default_factory=dict)

    @contextmanager
    def chosen(self, contender: str, *, switch: bool) -> Iterator[None]:
        """Shuffle with a contender during the body; with ``switch`` the runtime is off afterwards."""
        if contender == GPURT:
            dask_gpurt.enable(self.client)  # only for this client, if the cluster already has it on
        try:
            with dask.config.set({METHOD_KEY: contender}):
                yield
            if contender == GPURT:
                self.observed = observe(self.client)
        finally:
            if contender == GPURT and switch:
                dask_gpurt.disable(self.client)

    def run_all(self, queries: Sequence[Query], contender: str, number: int) -> Iterator[Run]:
        """Run each query twice; yield each run when it has finished."""
        for query in queries:
            for warm in (False, True):
                self.runs.append(self._run(query, contender, number, warm))
                yield self.runs[-1]

    def _run(self, query: Query, contender: str, number: int, warm: bool) -> Run:
        client = self.client
        threads = client.nthreads()  # now, since a worker may have been replaced
        forget(client)
        client.run(gc.collect)
        counted = read_counters(client, contender == GPURT)
        has_peaks = begin_peaks(client)
        take_log(client)
        began = time()
        lazy = query.build(self.tables)
        built = time()
        found = query.collected(lazy.compute())
        ended = time()
        spent = budget(began, built, ended, take_log(client), threads)
        peak = peak_memory(client) if has_peaks else None
        meanwhile = difference(counted, read_counters(client, contender == GPURT))
        self._check(query, contender, found)
        return Run(
            query=query.name,
            contender=contender,
            round=number,
            warm=warm,
            seconds=ended - began,
            spent=Spent.of(spent, meanwhile, peak),
        )

    def _check(self, query: Query, contender: str, found: pd.DataFrame) -> None:
        wanted = self._wanted.setdefault(query.name, found)
        try:
            pd.testing.assert_frame_equal(found, wanted, check_exact=True)
        except AssertionError as error:
            raise WrongResultError(
                f"{query.name} with {contender} differs from the first result of this query: {error}"
            ) from error


def observe(client: Client) -> Observed:
    """Return the report of the runtime."""
    report = dask_gpurt.report(client)
    fallbacks: dict[str, int] = {}
    there = [one.fallbacks for one in report.workers.values()]
    gone = [one.fallbacks for one in report.departed]
    for counted in (report.fallbacks, *there, *gone):
        for id, known in counted.items():
            fallbacks[id] = fallbacks.get(id, 0) + known.count
    return Observed(fallbacks, len(report.departed))


def _require_idle(client: Client) -> None:
    there = client.run_on_scheduler(_count_tasks)
    if there:
        raise BusyError(
            f"the cluster has {there} tasks of other programs: it has to be idle, since the bench switches "
            "the runtime on and off and times it"
        )


def _count_tasks(dask_scheduler: SchedulerServer) -> int:
    return len(dask_scheduler.tasks)


def forget(client: Client) -> None:
    """Wait until the scheduler has no tasks left, so that no result of an earlier run is reused."""
    client.run_on_scheduler(_forgotten)


async def _forgotten(dask_scheduler: SchedulerServer) -> None:
    deadline = time() + FORGET_TIMEOUT_S
    while dask_scheduler.tasks:
        if time() > deadline:
            raise TimeoutError(f"the scheduler still has {len(dask_scheduler.tasks)} tasks of an earlier run")
        await asyncio.sleep(FORGET_POLL_INTERVAL_S)
