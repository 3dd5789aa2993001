"""Virtual time: what happens next, and names whose order is the same in every process."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

#: Virtual seconds with nothing but periodic work ahead, after which nothing else will come any more.
QUIET = 120.0


class Stuck(RuntimeError):
    """Nothing is under way, and yet the workload is not done."""


class Name(str):
    """A key or an address that hashes alike in every process.

    Dask breaks ties by the order of sets of tasks and workers, which for ordinary strings is another one in
    each process.
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
    """Runs what was put off, each at its time; what is for the same time, in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[_Event] = []
        self._order = itertools.count()
        self._ahead = 0
        self._last = 0.0

    def at(self, when: float, action: Callable[..., object], *arguments: Any) -> None:
        """Do something at a time, or now if that is past."""
        self._push(max(when, self.now), False, action, arguments)

    def after(self, delay: float, action: Callable[..., object], *arguments: Any) -> None:
        """Do something in so many seconds."""
        self._push(self.now + delay, False, action, arguments)

    def every(
        self, interval: Callable[[], float], action: Callable[[], object], *, first: float = 0.0
    ) -> None:
        """Do something again and again, until it returns False.

        Parameters
        ----------
        interval
            Tells each time in how many seconds the next time is.
        action
            What to do.
        first
            Seconds by which it begins later than after the first interval.
        """

        def again() -> None:
            if action() is not False:
                self._push(self.now + interval(), True, again, ())

        self._push(self.now + interval() + first, True, again, ())

    def _push(
        self, when: float, periodic: bool, action: Callable[..., object], arguments: tuple[Any, ...]
    ) -> None:
        self._ahead += not periodic
        heapq.heappush(self._events, _Event(when, next(self._order), periodic, action, arguments))

    def run(self, until: Callable[[], bool]) -> None:
        """Let time pass until a condition holds.

        Raises
        ------
        Stuck
            When nothing is left that could make it hold.
        """
        while not until():
            if not self._events:
                raise Stuck(f"nothing is left to do at {self.now:.3f} s")
            event = heapq.heappop(self._events)
            self.now = event.when
            if not event.periodic:
                self._ahead -= 1
                self._last = event.when
            elif not self._ahead and event.when - self._last > QUIET:
                raise Stuck(f"nothing happens any more since {self._last:.3f} s")
            event.action(*event.arguments)
