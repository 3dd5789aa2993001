"""Tell clients whether the runtime is on, and keep which of them it plans for.

A client with the package says so as it connects (`client/following.py`). Its events may be older than the
runtime, which reads them when it is switched on.

Decisions and their figures: ``docs/decisions/scheduler.md``.
"""

from __future__ import annotations

import itertools
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
