"""Divide the time of a query into phases, using the scheduler's own log.

A query's time is cut at five instants, all on the clock of one host:

====================  ===================================================================================
``build``             the user's code: creates expressions with their metadata
``optimise``          from ``compute`` until the scheduler has the expression: simplify, lower, fuse, send
``graph``             the scheduler creates and orders the tasks
``first_task``        until the first task computes
``computing``         from the start of the first task to the end of the last
``collect``           until the client has the sorted result
====================  ===================================================================================
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from dask.typing import Key
from dask.utils import key_split
from distributed import Client, SchedulerPlugin
from distributed.metrics import time

from dask_gpurt.dask_hooks.types import SchedulerServer

PHASES = ("build", "optimise", "graph", "first_task", "computing", "collect")
PLANNING = ("build", "optimise", "graph")
#: Number of kinds of tasks that are listed; all others are summed.
KINDS_NAMED = 8
#: How long, and how often, it is checked whether tasks of an earlier run are left.
FORGET_TIMEOUT_S, FORGET_POLL_INTERVAL_S = 30.0, 0.005


class Step(NamedTuple):
    """Record an action of a worker for a task; times are in seconds since the epoch."""

    kind: str
    action: str
    thread: tuple[str, int]
    start: float
    stop: float


@dataclass(frozen=True)
class Logged:
    """Hold the scheduler's log of a query: the times of its graphs, and the steps of its tasks."""

    #: Begin and end of each graph.
    graphs: Sequence[tuple[float, float]]
    steps: Sequence[Step]


class TaskLog(SchedulerPlugin):
    """Log the steps of all tasks, and the times of graphs."""

    name = "gpurt-task-log"

    def __init__(self) -> None:
        self._graphs: list[tuple[float, float]] = []
        self._steps: list[Step] = []

    def transition(self, key: Key, start: str, finish: str, *_: Any, **known: Any) -> None:
        """Record the steps that a worker reports with a finished task."""
        if start != "processing" or finish not in ("memory", "erred"):
            return
        kind, thread = key_split(key), (str(known.get("worker")), known.get("thread") or 0)
        for step in known.get("startstops") or ():
            self._steps.append(Step(kind, step["action"], thread, step["start"], step["stop"]))

    def log_event(self, topic: str, msg: object) -> None:
        """Record when a graph arrived, and when its tasks were created."""
        if topic == "scheduler" and isinstance(msg, dict) and msg.get("action") == "update-graph":
            metrics = msg.get("metrics")
            if metrics is not None:
                start = metrics["start_timestamp_seconds"]
                self._graphs.append((start, start + metrics["duration_seconds"]))

    def take(self) -> Logged:
        """Return and clear the log since the last call."""
        logged = Logged(self._graphs, self._steps)
        self._graphs, self._steps = [], []
        return logged


def take_log(client: Client) -> Logged:
    """Return and clear the scheduler's log since the last call."""

    def take(dask_scheduler: SchedulerServer) -> Logged:
        log: Any = dask_scheduler.plugins[TaskLog.name]
        found: Logged = log.take()
        return found

    logged: Logged = client.run_on_scheduler(take)
    return logged


def budget(
    began: float, built: float, ended: float, logged: Logged, threads: Mapping[str, int]
) -> dict[str, Any]:
    """Divide the time of a query into its phases, and summarise its tasks.

    ``began``, ``built``, ``ended``: when the query began, was built, and had its result, in seconds since the
    epoch.
    ``threads``: number of task threads of each worker, by address, as from ``client.nthreads()``.
    Returns ``seconds``: the duration of each phase; they add up to ``ended - began``. ``graphs``: the number
    of graphs; more than one if a part was computed to plan the rest. ``tasks``: for each kind of task its
    count and computing seconds, the longest first. ``steps``: seconds of all threads by action, such as
    ``compute``, ``transfer``, ``disk-read``. ``thread_busy``: the seconds in tasks relative to those of the
    task threads, while computing; more than 1 if tasks have left their slot, as for a read. ``gaps``: times
    in which a thread had no task: their number, mean seconds per thread, median and maximum.
    """
    computed = [step for step in logged.steps if step.action == "compute"]
    if not computed or not logged.graphs:
        raise ValueError("the scheduler has logged nothing of the query")
    received, made = logged.graphs[-1]
    first, last = min(step.start for step in computed), max(step.stop for step in computed)
    # Dask corrects workers' clocks by an estimated delay, which is sometimes off by milliseconds.
    cuts = list(accumulate([began, built, received, made, first, min(last, ended), ended], max))
    span = last - first
    busy = sum(step.stop - step.start for step in computed)
    actions: dict[str, float] = {}
    for step in logged.steps:
        actions[step.action] = actions.get(step.action, 0.0) + step.stop - step.start
    return {
        "seconds": {name: cuts[i + 1] - cuts[i] for i, name in enumerate(PHASES)},
        "graphs": len(logged.graphs),
        "tasks": by_kind(computed),
        "steps": actions,
        "thread_busy": busy / (sum(threads.values()) * span) if span else 1.0,
        "gaps": gaps(computed, first, last, threads),
    }


def by_kind(computed: Iterable[Step]) -> dict[str, dict[str, float]]:
    """Summarise the computing steps of each kind of task, the longest first."""
    found: dict[str, dict[str, float]] = {}
    for step in computed:
        one = found.setdefault(step.kind, {"count": 0, "seconds": 0.0})
        one["count"] += 1
        one["seconds"] += step.stop - step.start
    ordered = sorted(found.items(), key=lambda item: -item[1]["seconds"])
    named = dict(ordered[:KINDS_NAMED])
    if others := [of for _, of in ordered[KINDS_NAMED:]]:
        named["(others)"] = {name: sum(of[name] for of in others) for name in ("count", "seconds")}
    return named


def gaps(computed: Iterable[Step], first: float, last: float, threads: Mapping[str, int]) -> dict[str, float]:
    """Summarise the times between ``first`` and ``last`` in which a thread had no task.

    Tasks are counted by worker and not by thread: a task that has left its slot, as for a read, leaves its
    thread too, so that another thread takes its place.
    """
    by_worker: dict[str, list[Step]] = {worker: [] for worker in threads}
    for step in computed:
        by_worker.setdefault(step.thread[0], []).append(step)
    # A worker that has left meanwhile had at least one thread.
    found = [
        gap
        for worker, steps in by_worker.items()
        for slot in range(threads.get(worker, 1))
        for gap in _below(steps, slot + 1, first, last)
    ]
    return {
        "count": len(found),
        "seconds_a_thread": sum(found) / sum(threads.values()),
        "median": statistics.median(found) if found else 0.0,
        "longest": max(found, default=0.0),
    }


def _below(steps: Iterable[Step], count: int, first: float, last: float) -> Iterator[float]:
    """Yield the lengths of the times between ``first`` and ``last`` with fewer than ``count`` tasks."""
    # Added up for each instant, so that there is no gap between a task and one that starts as it stops.
    changes = Counter[float]()
    for step in steps:
        changes[step.start] += 1
        changes[step.stop] -= 1
    running = 0
    free_since: float | None = first
    for at in sorted(changes):
        running += changes[at]
        if running >= count and free_since is not None:
            if at > free_since:
                yield at - free_since
            free_since = None
        elif running < count and free_since is None:
            free_since = at
    if free_since is not None and last > free_since:
        yield last - free_since


def planning(seconds: Mapping[str, float]) -> float:
    """Return the seconds of a budget before the scheduler has tasks."""
    return sum(seconds[phase] for phase in PLANNING)


def forget(client: Client) -> None:
    """Wait until the scheduler has no tasks left, so that no result of an earlier run is reused."""
    client.run_on_scheduler(_forgotten)


async def _forgotten(dask_scheduler: SchedulerServer) -> None:
    deadline = time() + FORGET_TIMEOUT_S
    while dask_scheduler.tasks:
        if time() > deadline:
            raise TimeoutError(f"the scheduler still has {len(dask_scheduler.tasks)} tasks of an earlier run")
        await asyncio.sleep(FORGET_POLL_INTERVAL_S)
