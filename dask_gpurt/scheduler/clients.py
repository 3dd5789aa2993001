"""Know the clients of a scheduler, which of them the runtime plans for, and what they compute.

A client with the package says so as it connects (`client/following.py`). Its events may be older than the
runtime, which reads them when it is switched on.

Decisions and their figures: ``docs/decisions/scheduler.md``.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from dask.typing import Key
from distributed.metrics import time

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import CLIENTS_TOPIC, STATE_TOPIC

#: Numbers the switches of all schedulers of this process.
_numbers = itertools.count(1)
#: Parts of the names of Dask's tasks that the runtime would plan, or whose rows it would move.
PLANNED = ("shuffle", "hash-join", "read_parquet")
#: Why the runtime does not plan for a client that has never said that it has the package.
MISSING = "install dask-gpurt where it runs, and keep Dask's preload hooks"


class Clients:
    """Know the clients of a scheduler."""

    def __init__(self, scheduler: SchedulerServer, metrics: Metrics):
        self._scheduler = scheduler
        self._metrics = metrics
        #: Why clients that have the package are planned for by Dask, by id; None for those that are not.
        self._known: dict[str, str | None] = {}
        #: Sentences on clients that have computed without the runtime's planning.
        self._said: dict[str, str] = {}

    @property
    def unplanned(self) -> list[str]:
        """The clients whose computations are planned by Dask, although they would gain, with the reasons."""
        return list(self._said.values())

    def planned(self) -> int:
        """Return for how many clients the runtime plans."""
        return sum(reason is None for reason in self._known.values())

    def begin(self) -> None:
        """Take what clients have said before, once the runtime hears what they say from now on."""
        for _, message in self._scheduler.get_events(CLIENTS_TOPIC):
            self.heard(message)

    def heard(self, message: Mapping[str, Any]) -> None:
        """Take what a client says of itself."""
        if (client := message["client"]) in self._scheduler.clients:
            self._known[client] = message["reason"]

    def tell(self, on: bool) -> None:
        """Tell all clients that have the package whether the runtime is on."""
        state = {"on": on, "number": next(_numbers), "version": __version__}
        self._scheduler.log_event(STATE_TOPIC, state)
        # The subscription of a client that has just connected may be on its way; the number makes one of two.
        event = {"op": "event", "topic": STATE_TOPIC, "event": (time(), state)}
        self._scheduler.send_all({client: [event] for client in self._known}, {})

    def remove(self, client: str) -> None:
        """Forget a client that has closed."""
        self._known.pop(client, None)
        self._said.pop(client, None)

    def computes(self, client: str, tasks: Iterable[Key]) -> None:
        """Count a client that computes dataframes which the runtime has not planned."""
        reason = self._known.get(client, MISSING)
        if reason is not None and client not in self._said and any(map(_would_gain, tasks)):
            self._said[client] = f"{client} would gain: {reason}"
            self._metrics.fallback(Fallback.PLANNING_CLIENT, self._said[client])


def _would_gain(key: Key) -> bool:
    name = str(key[0] if isinstance(key, tuple) else key)
    return any(part in name for part in PLANNED)


# ---- what clients compute ----------------------------------------------------------------------------

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
