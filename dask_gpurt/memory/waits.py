"""Wait in line for a resource: memory, room in a pool, bytes in flight, a slot to compute.

What waits loops: it tries, and where the resource is refused it waits until that may have changed
(rapidsmpf calls this ``reserve_or_wait``). What differs is the policy, which is passed: how to try, whether
later requests may pass the first one, and after how long it is admitted all the same.

A wake-up between an attempt and the wait must not be lost::

    Thread 1: finds the pool full          Thread 2: frees a block, and wakes all that wait
    Thread 1: waits, although there is room

So wake-ups are counted, and what waits compares with the count that it read before it tried. Where a resource
may be freed without notice, ``retry_s`` bounds the time between attempts.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, MutableSet
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Hashable)


class LineClosed(Exception):
    """Nothing waits in a line any more."""


class Line(Generic[R]):
    """Order the requests that wait, the oldest first, by any clock. Pure; not thread-safe."""

    def __init__(self) -> None:
        self._requests: OrderedDict[R, None] = OrderedDict()
        #: Time since which the first request has been the first.
        self.first_since = 0.0

    @property
    def first(self) -> R | None:
        """Return the oldest request; None if none waits."""
        return next(iter(self._requests), None)

    @property
    def waiting(self) -> tuple[R, ...]:
        """Return the requests, the oldest first."""
        return tuple(self._requests)

    def join(self, request: R, now: float, *, ahead: bool = False) -> None:
        """Add a request at the end, or ahead of all others; a no-op if it waits already."""
        if request not in self._requests:
            if ahead or not self._requests:
                self.first_since = now
            self._requests[request] = None
            self._requests.move_to_end(request, last=not ahead)

    def leave(self, request: R, now: float) -> None:
        """Remove a request that is admitted or withdrawn; a no-op if it does not wait."""
        if request == self.first:
            self.first_since = now
        self._requests.pop(request, None)


class WaitLine(Line[R]):
    """Let threads, and coroutines of one event loop, wait in line.

    ``what``: what they wait for, in words.
    ``lines``: all lines of a worker, for the description of its waits: :attr:`Metrics.lines`. They hold it
    weakly.
    ``changed``: the lock of the line and of what it is for; reentrant. Coroutines need it only where threads
    wait too.
    ``wakes``: the number of wake-ups so far.
    """

    def __init__(self, what: str, lines: MutableSet[Any]) -> None:
        super().__init__()
        self.what = what
        self.changed = threading.Condition()
        self.wakes = 0
        self.closed = False
        self._asleep: dict[R, asyncio.Future[None]] = {}
        lines.add(self)

    def __repr__(self) -> str:
        with self.changed:
            waiting, seconds = self.waiting, time.monotonic() - self.first_since
        since = f", the first for {seconds:.1f} s" if waiting else ""
        return f"<WaitLine for {self.what}: {list(map(str, waiting))}{since}>"

    def wake(self) -> None:
        """Have all that wait try again."""
        with self.changed:
            self.wakes += 1
            self.changed.notify_all()
            for asleep in self._asleep.values():
                _wake(asleep)

    def wake_first(self) -> None:
        """Have the first coroutine try again; if it succeeds, it wakes the next one. On its event loop."""
        self.wakes += 1
        _wake(self._asleep.get(self.first) if self.first is not None else None)

    def close(self) -> None:
        """Raise LineClosed in all that wait, now or later. What succeeds at once does not wait."""
        self.closed = True
        self.wake()

    def reserve_or_wait(self, request: R, attempt: Callable[[], bool], retry_s: float) -> None:
        """Block until an attempt succeeds. Attempts are made under the lock.

        Raises LineClosed if the line is closed before.
        """
        with self.changed:
            try:
                while not attempt():
                    self._join(request)
                    self.changed.wait(retry_s)
            finally:
                self.leave(request, time.monotonic())

    def wait(self, request: R, seen: int, retry_s: float, ask: Callable[[], Any]) -> None:
        """Block until the next wake-up, at most ``retry_s`` seconds; return at once if it has been.

        ``seen``: the value of ``wakes`` before the attempt that failed.
        ``ask``: called, under the lock, before it blocks.
        """
        with self.changed:
            self._join(request)
            try:
                if self.wakes == seen:
                    ask()
                    self.changed.wait(retry_s)
            finally:
                self.leave(request, time.monotonic())

    async def reserve_or_wait_async(
        self, request: R, attempt: Callable[[], Awaitable[bool]], retry_s: float | None = None
    ) -> None:
        """Wait until an attempt succeeds; then wake the first of the others. On the event loop.

        Raises LineClosed if the line is closed before.
        """
        try:
            while True:
                seen = self.wakes
                if await attempt():
                    return
                self._join(request)
                if self.wakes == seen:
                    self._asleep[request] = asyncio.get_running_loop().create_future()
                    await asyncio.wait([self._asleep[request]], timeout=retry_s)
        finally:
            self._asleep.pop(request, None)
            self.leave(request, time.monotonic())
            self.wake_first()  # there may be room for more, or this one was woken as it gave up

    def _join(self, request: R) -> None:
        if self.closed:
            raise LineClosed(f"{request} was waiting for {self.what}, which has ended")
        self.join(request, time.monotonic())


def _wake(asleep: asyncio.Future[None] | None) -> None:
    if asleep is not None and not asleep.done():
        asleep.set_result(None)
