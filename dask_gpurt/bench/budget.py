"""Divide the time of a query by what it was spent on, from the scheduler's own log.

A query's time is cut at five moments, which all come from the clock of one host:

====================  ===================================================================================
``build``             the user's code: expressions are made, with the metadata of each of them
``optimise``          ``compute`` until the scheduler has the expression: simplified, lowered, fused, sent
``graph``             the scheduler makes tasks of it, and orders them
``first_task``        until the first task computes
``computing``         from the begin of the first task to the end of the last
``collect``           until the result is with the client, sorted
====================  ===================================================================================
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from dask.utils import key_split
from distributed import Client, SchedulerPlugin

PHASES = ("build", "optimise", "graph", "first_task", "computing", "collect")
PLANNING = ("build", "optimise", "graph")
#: Kinds of tasks that are named; the others are summed up.
KINDS_NAMED = 8


class Step(NamedTuple):
    """Record something that a worker did for a task, in seconds since the epoch."""

    kind: str
    action: str
    thread: tuple[str, int]
    start: float
    stop: float


@dataclass(frozen=True)
class Logged:
    """Keep all that the scheduler knows of a query: when its graphs were made, and the steps of its tasks."""

    #: Begin and end of each graph.
    graphs: Sequence[tuple[float, float]]
    steps: Sequence[Step]


class TaskLog(SchedulerPlugin):
    """Keep the steps of all tasks, and when graphs came."""

    name = "gpurt-bench-tasks"

    def __init__(self) -> None:
        self._graphs: list[tuple[float, float]] = []
        self._steps: list[Step] = []

    def transition(self, key: Any, start: str, finish: str, *_: Any, **known: Any) -> None:
        """Note what a worker tells with a finished task."""
        if start != "processing" or finish not in ("memory", "erred"):
            return
        kind, thread = key_split(key), (str(known.get("worker")), known.get("thread") or 0)
        for step in known.get("startstops") or ():
            self._steps.append(Step(kind, step["action"], thread, step["start"], step["stop"]))

    def log_event(self, topic: str, msg: Any) -> None:
        """Note when a graph came, and when its tasks were there."""
        if topic == "scheduler" and isinstance(msg, dict) and msg.get("action") == "update-graph":
            metrics = msg.get("metrics")
            if metrics is not None:
                start = metrics["start_timestamp_seconds"]
                self._graphs.append((start, start + metrics["duration_seconds"]))

    def take(self) -> Logged:
        """Return what came since the last call."""
        logged = Logged(self._graphs, self._steps)
        self._graphs, self._steps = [], []
        return logged


def take_log(client: Client) -> Logged:
    """Return what the scheduler has logged since the last call."""

    def take(dask_scheduler: Any) -> Logged:
        log: TaskLog = dask_scheduler.plugins[TaskLog.name]
        return log.take()

    logged: Logged = client.run_on_scheduler(take)
    return logged


def budget(began: float, built: float, ended: float, logged: Logged, threads: int) -> dict[str, Any]:
    """Cut the time of a query into its phases, and sum up what its tasks did.

    Parameters
    ----------
    began, built, ended
        When the query began, was built, and had its result; seconds since the epoch.
    logged
        Of this query alone.
    threads
        Task threads of all workers.

    Returns
    -------
    dict
        ``seconds``: of each phase; they add up to ``ended - began``.
        ``graphs``: how many graphs it took; more than one where a part was computed to plan the rest.
        ``tasks``: for each kind how often and for how many seconds it computed, the longest first.
        ``steps``: seconds of all threads by action, such as ``compute``, ``transfer``, ``disk-read``.
        ``thread_busy``: the share of the task threads' time in which one had a task, while computing.
        ``gaps``: times between tasks in which a thread had none: how many, their seconds by thread on
        average, the median and the longest one.
    """
    computed = [step for step in logged.steps if step.action == "compute"]
    if not computed or not logged.graphs:
        raise ValueError("nothing of the query was logged by the scheduler")
    received, made = logged.graphs[-1]
    first, last = min(step.start for step in computed), max(step.stop for step in computed)
    # Workers' clocks are corrected by what Dask takes for their delay, which is off by milliseconds at times.
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
        "thread_busy": busy / (threads * span) if span else 1.0,
        "gaps": gaps(computed, first, last, threads),
    }


def by_kind(computed: Iterable[Step]) -> dict[str, dict[str, float]]:
    """Sum up the computing steps of each kind of task, the longest first."""
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


def gaps(computed: Iterable[Step], first: float, last: float, threads: int) -> dict[str, float]:
    """Sum up the times between ``first`` and ``last`` in which a thread had no task."""
    by_thread: dict[tuple[str, int], list[Step]] = {}
    for step in computed:
        by_thread.setdefault(step.thread, []).append(step)
    found: list[float] = []
    for steps in by_thread.values():
        free_since = first
        for step in sorted(steps, key=lambda step: step.start):
            if step.start > free_since:
                found.append(step.start - free_since)
            free_since = max(free_since, step.stop)
        if last > free_since:
            found.append(last - free_since)
    # A thread that had no task at all was free all the time.
    found += [last - first] * (threads - len(by_thread))
    return {
        "count": len(found),
        "seconds_a_thread": sum(found) / threads,
        "median": statistics.median(found) if found else 0.0,
        "longest": max(found, default=0.0),
    }


def planning(seconds: Mapping[str, float]) -> float:
    """Return the seconds of a budget that pass before there are tasks."""
    return sum(seconds[phase] for phase in PLANNING)
