"""Keep a worker from computing on more threads than it has slots, though more of its tasks have begun.

A task that leaves its slot while it reads (:mod:`dask_gpurt.reads.policy`) is still there when its read is
done, and so is the one that has begun in its place. They take turns: a thread computes only while it has one
of as many turns as the worker has slots. Those that wait get theirs in the order in which they ask.

Why nothing waits here for ever. Tasks may wait for each other (an Event, a Queue, a Lock)::

    A reads aside; B begins, and waits for an Event that A sets after its read
    A has read, and asks for the turn that B has

In Dask B would begin only after A has ended. So a turn is not worth waiting for where no thread makes use of
it: when no thread that has one has used its processor for ``TURN_PATIENCE_S``, the first that waits goes on
without. A thread that leaves the worker's pool (``secede``, ``worker_client``) has given up its turn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dask_gpurt.observe import Fallback, Metrics

#: Seconds in which all that have a turn use no processor, before another one goes on without a turn.
TURN_PATIENCE_S = 5.0
#: Seconds between looks at those that have a turn.
LOOK_INTERVAL_S = 0.25
#: The share of a thread's time below which it uses no processor. One that waits may wake up now and then; one
#: that computes where many others do gets little of it.
IDLE_SHARE = 0.002


class Turns:
    """The turns of a worker's threads. Thread-safe; a thread has one turn at most.

    Parameters
    ----------
    count
        Threads that may compute at once.
    has_left
        Tells whether a thread has left the worker's pool: then it is not held back.
    """

    def __init__(self, count: int, has_left: Callable[[threading.Thread], bool], metrics: Metrics) -> None:
        self._count = count
        self._has_left = has_left
        self._metrics = metrics
        self._changed = threading.Condition()
        self._computing: set[threading.Thread] = set()
        self._waiting: deque[threading.Thread] = deque()
        self._reading = 0
        self._closed = False
        self._looked = time.perf_counter()

    def take(self) -> None:
        """Wait for a turn of this thread."""
        thread = threading.current_thread()
        with self._changed:
            self._waiting.append(thread)
            if not self._is_next(thread):
                with self._metrics.seconds("reads.seconds.waiting"):
                    self._wait(thread)
            self._waiting.remove(thread)
            self._count_beside()
            self._computing.add(thread)
            self._changed.notify_all()  # there may be a turn for the next one too

    def give(self) -> None:
        """Give this thread's turn to the next one; nothing happens where it has none."""
        with self._changed:
            self._count_beside()
            self._computing.discard(threading.current_thread())
            self._changed.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read without a turn, and wait for one afterwards."""
        thread = threading.current_thread()
        with self._changed:
            self._count_beside()
            self._reading += 1
            self._computing.discard(thread)
            self._changed.notify_all()
        try:
            with self._metrics.seconds("reads.seconds.reading"):
                yield
        finally:
            with self._changed:
                self._count_beside()
                self._reading -= 1
            if not self._has_left(thread):
                self.take()

    def close(self) -> None:
        """Hold no thread back any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- with the lock held ------------------------------------------------------------------------

    def _is_next(self, thread: threading.Thread) -> bool:
        self._computing -= {one for one in self._computing if self._has_left(one)}
        return self._closed or (len(self._computing) < self._count and self._waiting[0] is thread)

    def _wait(self, thread: threading.Thread) -> None:
        since, before = time.monotonic(), self._processor_seconds()
        while not self._is_next(thread):
            self._changed.wait(LOOK_INTERVAL_S)
            now, used = time.monotonic(), self._processor_seconds()
            if used.keys() != before.keys() or any(
                used[one] - before[one] > IDLE_SHARE * (now - since) for one in used
            ):
                since, before = now, used
            elif now - since >= TURN_PATIENCE_S and self._waiting[0] is thread:
                self._metrics.fallback(
                    Fallback.READS_OVERDUE,
                    f"those that compute have used no processor for {TURN_PATIENCE_S} s, as if they waited",
                )
                return

    def _processor_seconds(self) -> dict[threading.Thread, float]:
        # Each of them gives up its turn before it ends, for which it needs the lock: all are alive.
        return {
            thread: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in self._computing
            if thread.ident is not None
        }

    def _count_beside(self) -> None:
        now = time.perf_counter()
        if self._reading and self._computing:
            self._metrics.add("reads.seconds.beside", now - self._looked)
        self._looked = now
