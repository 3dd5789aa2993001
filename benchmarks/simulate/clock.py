"""Provide virtual time as a queue of events, and strings with a deterministic hash."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

#: Virtual seconds with only periodic events after which the simulation counts as stuck.
QUIET_PERIOD_S = 120.0


class DeadlockError(RuntimeError):
    """The workload is not done, and no event is left that could make progress."""


class Name(str):
    """Give a key or an address the same hash in every process.

    Dask breaks ties by the iteration order of sets of tasks and workers. For ordinary strings that order
    differs between processes.
    """

    __slots__ = ("_hash",)
    _hash: int

    def __new__(cls, text: str) -> Name:
        name = super().__new__(cls, text)
        name._hash = zlib.crc32(text.encode())
        return name

    def __hash__(self) -> int:
        return self._hash


class _Event(NamedTuple):
    when: float
    order: int
    periodic: bool
    action: Callable[..., object]
    arguments: tuple[Any, ...]


class Clock:
    """Run actions in the order of their virtual times; actions with the same time run in scheduling order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[_Event] = []
        self._order = itertools.count()
        self._pending = 0
        self._last_event = 0.0

    def at(self, when: float, action: Callable[..., object], *arguments: Any) -> None:
        """Schedule an action at a time, or now if that is past."""
        self._push(max(when, self.now), False, action, arguments)

    def after(self, delay: float, action: Callable[..., object], *arguments: Any) -> None:
        """Schedule an action in ``delay`` seconds."""
        self._push(self.now + delay, False, action, arguments)

    def every(
        self, interval: Callable[[], float], action: Callable[[], object], *, first: float = 0.0
    ) -> None:
        """Run an action periodically, until it returns False.

        ``interval``: returns the seconds until the next call.
        ``action``: called without arguments.
        ``first``: extra seconds before the first call.
        """

        def again() -> None:
            if action() is not False:
                self._push(self.now + interval(), True, again, ())

        self._push(self.now + interval() + first, True, again, ())

    def _push(
        self, when: float, periodic: bool, action: Callable[..., object], arguments: tuple[Any, ...]
    ) -> None:
        self._pending += not periodic
        heapq.heappush(self._events, _Event(when, next(self._order), periodic, action, arguments))

    def run(self, until: Callable[[], bool]) -> None:
        """Run actions until a condition holds.

        Raises DeadlockError if no event is left that could make it hold.
        """
        while not until():
            if not self._events:
                raise DeadlockError(f"nothing is left to do at {self.now:.3f} s")
            event = heapq.heappop(self._events)
            self.now = event.when
            if not event.periodic:
                self._pending -= 1
                self._last_event = event.when
            elif not self._pending and event.when - self._last_event > QUIET_PERIOD_S:
                raise DeadlockError(f"nothing has happened since {self._last_event:.3f} s")
            event.action(*event.arguments)
