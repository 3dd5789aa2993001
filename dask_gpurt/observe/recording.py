"""Record the steps of one process while a trace is taken, in a bounded ring buffer.

While no trace is taken, :attr:`dask_gpurt.observe.Metrics.recording` is None, and checking it is the only
cost of a step. Most steps are timed for a metric anyway: :data:`STEPS` names them. Threads append to the
ring, and :meth:`Recording.take` removes events from its other end. When the ring is full, the oldest event is
dropped and counts as lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from time import perf_counter, time
from typing import Any, NamedTuple

from dask.context import thread_state

#: Capacity of the ring; an event takes about 300 bytes.
RING_EVENTS = 50_000
#: How often clocks are compared; the least difference counts, since a thread may be interrupted within one.
CLOCK_READINGS = 5


class Kind(StrEnum):
    """Define the kinds of events."""

    #: A step of one thread; the steps of a thread are nested.
    SPAN = "span"
    #: A step that belongs to no thread and overlaps with others; usually a wait.
    WAIT = "wait"
    #: An instant.
    MARK = "mark"


class Event(NamedTuple):
    """Hold one event of a process.

    ``at``, ``seconds``: begin, by :func:`time.perf_counter` of its process, and duration.
    ``thread``: the number of its thread, :func:`threading.get_ident`.
    ``task``: the key of the task that ran on the thread; empty if there was none.
    ``args``: details, as JSON-serialisable values.
    """

    kind: str
    step: str
    at: float
    seconds: float
    thread: int
    task: str
    args: Mapping[str, Any]


class Step(NamedTuple):
    """Name the step that a metric times, and the key of its subject in ``args``."""

    name: str
    subject: str = ""


#: The step that spans a whole task.
TASK = "task"
#: The steps of threads, by the metric that times them.
STEPS: Mapping[str, Step] = {
    "shuffle.seconds.splitting": Step("split", "input"),
    "shuffle.seconds.packing": Step("pack", "input"),
    "shuffle.seconds.assembling": Step("assemble", "output"),
    "exchange.seconds.waiting-for-room": Step("wait for room"),
    "reads.seconds.reading": Step("read"),
    "reads.seconds.waiting": Step("wait for a turn"),
}
#: Counters of decisions and faults, of which each increment is recorded as an event.
MARKED = frozenset(
    {
        "shuffle.left.{why}",
        "shuffle.taken.{why}",
        "exchange.calls.repeated",
        "exchange.messages.stale",
        "memory.retries",
        "memory.waits.overdue",
        "memory.waits.past-idle",
        "shuffle.inputs.missing",
        "shuffle.lost.shards",
        "shuffle.outputs.moved",
        "shuffle.runs.recovered",
        "shuffle.runs.restarted",
        "shuffle.tasks.redirected",
    }
)


class Batch(NamedTuple):
    """Hold events taken from a ring.

    ``lost``: events dropped from the ring so far before they were taken.
    ``taken``: events taken so far, including this batch.
    ``more``: whether the ring has more events.
    """

    events: list[Event]
    threads: dict[int, str]
    lost: int
    taken: int
    more: bool


class Recording:
    """Keep the last events of a process. Thread-safe and non-blocking."""

    def __init__(self, capacity: int = RING_EVENTS):
        self._lock = threading.Lock()
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._threads: dict[int, str] = {}
        self._lost = self._taken = 0
        #: By the clock of events.
        self.began = perf_counter()
        #: The wall-clock time, as Dask uses it, at which the clock of events is 0.
        self.epoch = min(-perf_counter() + time() for _ in range(CLOCK_READINGS))

    # ---- events ------------------------------------------------------------------------

    @contextmanager
    def span(self, step: str, **args: Any) -> Iterator[None]:
        """Record the body as a step of this thread."""
        began = perf_counter()
        try:
            yield
        finally:
            self.timed(step, began, perf_counter() - began, **args)

    def timed(self, step: str, began: float, seconds: float, **args: Any) -> None:
        """Record a step of this thread that has ended."""
        self._append(Kind.SPAN, step, began, seconds, args)

    def waited(self, step: str, began: float, **args: Any) -> None:
        """Record a wait that ends now and belongs to no thread."""
        self._append(Kind.WAIT, step, began, perf_counter() - began, args)

    def mark(self, step: str, **args: Any) -> None:
        """Record an instant."""
        self._append(Kind.MARK, step, perf_counter(), 0.0, args)

    def add(self, event: Event) -> None:
        """Record an event that was timed elsewhere."""
        with self._lock:
            if len(self._ring) == self._ring.maxlen:
                self._lost += 1
            self._ring.append(event)

    def _append(self, kind: Kind, step: str, at: float, seconds: float, args: Mapping[str, Any]) -> None:
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        self.add(Event(kind, step, at, seconds, thread, _task(), args))

    def see(self, thread: int) -> None:
        """Record the name of another thread, if it is still alive."""
        if thread not in self._threads:
            self._threads |= {one.ident: one.name for one in threading.enumerate() if one.ident == thread}

    # ---- taking them -------------------------------------------------------------------

    def take(self, limit: int) -> Batch:
        """Remove and return the oldest events of the ring, at most ``limit``."""
        with self._lock:
            events = [self._ring.popleft() for _ in range(min(limit, len(self._ring)))]
            self._taken += len(events)
            return Batch(events, dict(self._threads), self._lost, self._taken, bool(self._ring))


def _task() -> str:
    """Return the key of the task that Dask runs on this thread."""
    return str(getattr(thread_state, "key", ""))
