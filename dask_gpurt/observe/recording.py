"""Record the steps of one process while a trace is taken, in a bounded ring buffer and as NVTX ranges.

While no trace is taken, :attr:`dask_gpurt.observe.Metrics.recording` is None, and checking it is the only
cost of a step. Most steps are timed for a metric anyway: :data:`STEPS` names them. Threads append to the
ring, and :meth:`Recording.take` removes events from its other end. When the ring is full, the oldest event is
dropped and counts as lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from time import perf_counter, time
from typing import Any, NamedTuple

from dask.context import thread_state
from dask.utils import key_split

#: Capacity of the ring; an event takes about 300 bytes.
RING_EVENTS = 50_000
#: How often clocks are compared; the least difference counts, since a thread may be interrupted within one.
CLOCK_READINGS = 5
#: The domain of NVTX ranges, for filtering in Nsight Systems.
NVTX_DOMAIN = "dask_gpurt"


class Kind(StrEnum):
    """Define the kinds of events."""

    #: A step of one thread; the steps of a thread are nested.
    SPAN = "span"
    #: A step that belongs to no thread and overlaps with others; usually a wait.
    WAIT = "wait"
    #: An instant.
    MARK = "mark"
    #: The instant at which a thread offered a shard; ``args`` has the shard, its owner and its bytes.
    SENT = "sent"
    #: The instant at which a thread read an offered shard.
    READ = "read"


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
    """Keep the last events of a process. Thread-safe and non-blocking.

    ``ranges``: emits NVTX ranges around steps; None to emit none.
    """

    def __init__(self, capacity: int = RING_EVENTS, ranges: Ranges | None = None):
        self._ranges = ranges
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
        self.enter(step)
        began = perf_counter()
        try:
            yield
        finally:
            self.leave(step, began, args)

    def enter(self, step: str) -> None:
        """Begin an NVTX range around a step of this thread; :meth:`leave` ends it."""
        if self._ranges is not None:
            self._ranges.push(step, _task())

    def leave(self, step: str, began: float, args: Mapping[str, Any]) -> None:
        """Record a step of this thread that ends now, and end its range."""
        self._append(Kind.SPAN, step, began, perf_counter() - began, args)
        if self._ranges is not None:
            self._ranges.pop()

    def timed(self, step: str, began: float, seconds: float, **args: Any) -> None:
        """Record a step of this thread that has already ended, without an NVTX range."""
        self._append(Kind.SPAN, step, began, seconds, args)

    def waited(self, step: str, began: float, **args: Any) -> None:
        """Record a wait that ends now and belongs to no thread."""
        self._append(Kind.WAIT, step, began, perf_counter() - began, args)

    def mark(self, step: str, **args: Any) -> None:
        """Record an instant."""
        self._append(Kind.MARK, step, perf_counter(), 0.0, args)

    def sent(self, shard: str, owner: str, nbytes: int) -> None:
        """Record that this thread offers a shard to the worker at an address."""
        self._append(Kind.SENT, "", perf_counter(), 0.0, {"shard": shard, "owner": owner, "bytes": nbytes})

    def read(self, shard: str) -> None:
        """Record that this thread reads a shard."""
        self._append(Kind.READ, "", perf_counter(), 0.0, {"shard": shard})

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


class Ranges:
    """Emit NVTX ranges around steps, named after the step and the prefix of its task: ``pack (shuffle)``.

    ``push``, ``pop``: ``nvtx.push_range`` and ``nvtx.pop_range``.
    """

    def __init__(self, push: Callable[..., Any], pop: Callable[..., Any]):
        self._push = push
        self._pop = pop

    @classmethod
    def find(cls) -> Ranges | None:
        """Return ranges if the package ``nvtx`` is installed, which this imports; otherwise None."""
        try:
            import nvtx
        except ImportError:
            return None
        return cls(nvtx.push_range, nvtx.pop_range)

    def push(self, step: str, task: str) -> None:
        """Begin a range of this thread."""
        self._push(message=f"{step} ({key_split(task)})" if task else step, domain=NVTX_DOMAIN)

    def pop(self) -> None:
        """End the innermost range of this thread."""
        self._pop(domain=NVTX_DOMAIN)
