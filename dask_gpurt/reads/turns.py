"""Limit the computing threads of a worker to its number of slots, even if more tasks have started.

After a task has left its slot to read (:mod:`dask_gpurt.reads.policy`), both that task and the one started in
its place may want to compute. So a thread computes only while it holds a turn, of which there are as many as
the worker has slots. Waiting threads get turns in FIFO order.

No thread waits forever, even if tasks wait for each other (through an Event, a Queue, a Lock)::

    A reads without a slot. B starts, and waits for an Event that A sets after its read
    A has read, and requests the turn that B holds

In Dask, B would start only after A has ended. So a turn is not worth waiting for if no thread uses it: if no
thread with a turn has used CPU time for ``TURN_PATIENCE_S``, the first waiting thread continues without a
turn. A thread that leaves the worker's pool (``secede``, ``worker_client``) gives up its turn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dask_gpurt.observe import Fallback, Metrics

#: Seconds without CPU time of threads with a turn, after which a waiting thread continues without one.
TURN_PATIENCE_S = 5.0
#: Seconds between checks of the threads with a turn.
LOOK_INTERVAL_S = 0.25
#: A thread counts as idle below this share of CPU time. Waiting threads may wake up occasionally, and
#: computing threads get little CPU time on a busy host.
IDLE_SHARE = 0.002


class Turns:
    """Hand out the turns of a worker's threads, at most one to each thread. Thread-safe.

    Parameters
    ----------
    count
        The number of threads that may compute at once.
    has_left
        Returns whether a thread has left the worker's pool, and so needs no turn.
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
        """Block until this thread has a turn."""
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
        """Give up this thread's turn; a no-op if it has none."""
        with self._changed:
            self._count_beside()
            self._computing.discard(threading.current_thread())
            self._changed.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Give up the turn while the body reads, and wait for one afterwards."""
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
        """Let all threads continue without turns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- under the lock ----------------------------------------------------------------------------

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
                    f"computing threads have used no CPU time for {TURN_PATIENCE_S} s, and seem to wait",
                )
                return

    def _processor_seconds(self) -> dict[threading.Thread, float]:
        # All of these threads are alive, since a thread needs the lock to give up its turn before it ends.
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
