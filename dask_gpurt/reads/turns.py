"""Limit the tasks that run user code on a worker to its number of slots, in the order in which they started.

So that reads of files run ahead, a worker starts more tasks than it has slots
(:mod:`dask_gpurt.reads.policy`). Dask alone would start these only later, when earlier ones have ended. So a
task runs user code only while it holds a turn, of which there are as many as the worker has slots. A task
queues for one when Dask starts it, gets it in FIFO order, and keeps it until it ends or leaves the worker's
pool (``secede``, ``worker_client``). Without a turn it may only read, before any user code, and write, after
all of it::

    A reads. B starts in A's slot, and will wait for an Event that A sets after its read
    B waits for its turn until A has ended: only then would Dask have started it

So the tasks with a turn are at any time those that Dask would run if it started the same tasks in the same
order. Whatever they wait for (an Event, a Lock, a database), they block each other only if they would there,
and a waiting task gets its turn once earlier ones end.

Decisions and their figures: ``docs/decisions/overlap.md``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dask.typing import Key
from distributed import Reschedule

from dask_gpurt.memory.waits import LineClosed, WaitLine
from dask_gpurt.observe import Metrics

#: Seconds between checks whether a thread with a turn has left the pool, of which nobody is notified.
LOOK_INTERVAL_S = 0.25


class ClosedError(Reschedule):
    """A task does not get a turn any more, since its worker closes. It may run on another one."""


@dataclass(eq=False)
class Turn:
    """Represent a task among those that hold a turn or wait for one.

    ``thread``: its thread, once that may run user code, and so may leave the pool.
    """

    key: Key
    thread: threading.Thread | None = None
    was_held: bool = False


class ComputeSlots:
    """Hand out the turns of a worker. Thread-safe.

    ``count``: the number of tasks that may run user code at once.
    ``has_left``: returns whether a thread has left the worker's pool, and so needs no turn.
    """

    def __init__(self, count: int, has_left: Callable[[threading.Thread], bool], metrics: Metrics) -> None:
        self.count = count
        self._has_left = has_left
        self._metrics = metrics
        self._line: WaitLine[Turn] = WaitLine("a turn to compute", metrics.lines)
        self._holders: set[Turn] = set()
        self._reading: set[Turn] = set()
        self._looked = time.perf_counter()

    def __repr__(self) -> str:
        with self._line.changed:
            waiting, holders = ([turn.key for turn in turns] for turns in (self._line.waiting, self._holders))
        return f"<ComputeSlots, to compute wait {waiting} for the end of {holders}>"

    def queue(self, turn: Turn) -> None:
        """Queue a task: behind all others, or before them if it has had its turn, as they started later.

        It gets the turn once one is free, even while it reads. A no-op if it is queued or holds the turn.
        """
        with self._changing():
            if turn not in self._holders:
                self._line.join(turn, time.monotonic(), ahead=turn.was_held)

    @property
    def waiting(self) -> tuple[Turn, ...]:
        """Return the tasks that wait for a turn, in their order."""
        with self._line.changed:
            return self._line.waiting

    def is_held(self, turn: Turn) -> bool:
        """Return whether a task holds its turn, and so would not wait for it."""
        with self._line.changed:
            return turn in self._holders

    def wait(self, turn: Turn) -> None:
        """Block until a task holds its turn; then the current thread may run user code.

        Raises ClosedError if the worker closes before.
        """
        with self._changing():
            if turn not in self._holders:
                with self._metrics.seconds("reads.seconds.waiting"):
                    self._wait(turn)
            turn.thread, turn.was_held = threading.current_thread(), True

    def end(self, turn: Turn) -> None:
        """Give up a turn, or the place in the queue; a no-op if there is neither."""
        with self._changing():
            self._holders.discard(turn)
            self._line.leave(turn, time.monotonic())

    @contextmanager
    def reading(self, turn: Turn) -> Iterator[None]:
        """Measure a read or write; with a turn or without."""
        with self._changing():
            self._reading.add(turn)
        try:
            with self._metrics.seconds("reads.seconds.reading"):
                yield
        finally:
            with self._changing():
                self._reading.discard(turn)

    def close(self) -> None:
        """Raise in all threads that wait now or later; those with a turn continue."""
        self._line.close()

    # ---- under the lock ----------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock, and hand out the turns that are free afterwards."""
        with self._line.changed:
            self._count_beside()
            try:
                yield
            finally:
                self._hand_out()

    def _hand_out(self) -> None:
        self._holders -= {turn for turn in self._holders if turn.thread and self._has_left(turn.thread)}
        given = self._line.waiting[: max(0, self.count - len(self._holders))]
        for turn in given:
            self._line.leave(turn, time.monotonic())
        self._holders.update(given)
        if given:
            self._line.wake()

    def _wait(self, turn: Turn) -> None:
        def attempt() -> bool:
            self._count_beside()
            self._hand_out()
            return turn in self._holders

        try:
            self._line.reserve_or_wait(turn, attempt, LOOK_INTERVAL_S)
        except LineClosed:
            raise ClosedError(
                f"{turn.key!r} was waiting for its turn to compute when its worker closed"
            ) from None

    def _count_beside(self) -> None:
        now = time.perf_counter()
        if self._reading and not self._holders <= self._reading:
            self._metrics.add("reads.seconds.beside", now - self._looked)
        self._looked = now
