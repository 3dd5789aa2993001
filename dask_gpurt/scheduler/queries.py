"""Describe the computations of a scheduler: how long they take, and what clients have planned of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from distributed.metrics import time

from dask_gpurt.dask_hooks.types import SchedulerServer

#: The operations that are named of a computation, those that took longest first.
STEPS = 3
#: The most names of results, and of shuffles, of which it is known how they came about.
MAX_TOLD = 1_000
#: States of tasks that have yet to be computed.
LEFT = ("waiting", "queued", "no-worker", "processing")


class Computations:
    """Know the computations of a scheduler since the runtime is on.

    ``since``: when it was switched on, in seconds since the epoch.
    """

    def __init__(self, scheduler: SchedulerServer, since: float):
        self._scheduler = scheduler
        self._since = since
        #: What rules did and left, by a name in the keys of results, and what shuffles are for, by theirs.
        self._rules: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._shuffles: OrderedDict[str, str] = OrderedDict()

    def told(self, plan: Mapping[str, Any]) -> None:
        """Take how a plan came about, as a client says."""
        rules = {name: plan.get(name, []) for name in ("applied", "left")}
        if any(rules.values()):
            _keep(self._rules, dict.fromkeys(plan.get("names", ()), rules))
        _keep(self._shuffles, plan.get("shuffles", {}))

    def purpose(self, outputs: str, label: str) -> str:
        """Return the operation that a shuffle is for, with the line of the program if it is known.

        ``outputs``: the name in the keys of its outputs.
        ``label``: the operation as the scheduler knows it.
        """
        return self._shuffles.get(outputs, label)

    def rows(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return what is known of each computation as plain values, oldest first.

        Dask counts graphs as one computation that arrive while tasks of another one run.

        ``most``: how many at most, the latest ones.
        """
        found = [each for each in self._scheduler.computations if each.start >= self._since and each.groups]
        return [self._row(each) for each in (found if most is None else found[-most:])]

    def _row(self, computation: Any) -> dict[str, Any]:
        groups = sorted(computation.groups, key=lambda group: -group.duration)
        states = computation.states
        tasks, left = sum(states.values()), sum(states[state] for state in LEFT)
        rules = (self._rules[group.name] for group in groups if group.name in self._rules)
        return {
            "began": computation.start,
            "state": "running" if left else "failed" if states["erred"] else "done",
            "seconds": max(0.0, (time() if left else computation.stop) - computation.start),
            "tasks": tasks,
            "done": tasks - left,
            "computing": sum(group.duration for group in groups),
            "bytes": sum(group.nbytes_total for group in groups),
            "steps": [group.prefix.name for group in groups[:STEPS]],
            "line": _line(computation.code),
            **next(rules, {"applied": [], "left": []}),
        }


def _keep(kept: OrderedDict[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        kept[name] = value
        kept.move_to_end(name)
    while len(kept) > MAX_TOLD:
        kept.popitem(last=False)


def _line(code: Any) -> str:
    """Return the line of the program that computes; Dask sends it if its setting ``nframes`` is not 0."""
    frame = next((frames[-1] for frames in code if frames), None)
    return "" if frame is None else f"{frame.filename.rpartition('/')[2]}:{frame.lineno_frame}"
