"""Record the steps of one process while a trace is taken: a ring of bounded size, and NVTX ranges.

Nothing is recorded as long as :attr:`dask_gpurt.observe.Metrics.recording` is None, which is all that a step
looks at. Most steps are timed for a metric anyway: :data:`STEPS` names them. Threads append to the ring, and
events are taken from its other end; what does not fit pushes out the oldest, which count as lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from time import perf_counter
from typing import Any, NamedTuple

from dask.context import thread_state
from dask.utils import key_split

#: Events that a process keeps until they are taken; one takes about 300 bytes.
RING_EVENTS = 50_000
#: The domain of NVTX ranges, by which Nsight Systems filters.
NVTX_DOMAIN = "dask_gpurt"


class Kind(StrEnum):
    """Tell what an event is."""

    #: A step of one thread: steps of a thread are nested.
    SPAN = "span"
    #: A step beside others, which belongs to no thread: it waits, mostly.
    WAIT = "wait"
    #: A moment.
    MARK = "mark"
    #: The moment in which a thread offered a shard to its owner; both are in ``args``, and its bytes.
    SENT = "sent"
    #: The moment in which a thread read a shard that was offered.
    READ = "read"


class Event(NamedTuple):
    """Hold one event of a process.

    Attributes
    ----------
    at, seconds
        When it began, by the clock of :func:`time.perf_counter` in its process, and how long it took.
    thread
        The number of its thread, :func:`threading.get_ident`.
    task
        The key of the task that ran on the thread; empty without one.
    args
        What is known of it, as values that JSON holds.
    """

    kind: str
    step: str
    at: float
    seconds: float
    thread: int
    task: str
    args: Mapping[str, Any]


class Step(NamedTuple):
    """Name the step that a metric times, and its subject."""

    name: str
    subject: str = ""


#: The step of a thread that is a whole task.
TASK = "task"
#: The steps of threads, by the metric that times them.
STEPS: Mapping[str, Step] = {
    "shuffle.seconds.splitting": Step("split", "input"),
    "shuffle.seconds.packing": Step("pack", "input"),
    "shuffle.seconds.assembling": Step("assemble", "output"),
    "exchange.seconds.compressing": Step("compress"),
    "exchange.seconds.decompressing": Step("decompress"),
    "exchange.seconds.waiting-for-room": Step("wait for room"),
    "reads.seconds.reading": Step("read"),
    "reads.seconds.waiting": Step("wait for a turn"),
}
#: The counters of which each increase is an event: decisions and faults.
MARKED = frozenset(
    {
        "placement.shuffles",
        "shuffle.left.{why}",
        "shuffle.taken.{why}",
        "exchange.calls.repeated",
        "exchange.messages.stale",
        "memory.retries",
        "memory.waits.overdue",
        "shuffle.inputs.missing",
        "shuffle.lost.shards",
        "shuffle.outputs.moved",
        "shuffle.runs.recovered",
        "shuffle.runs.restarted",
        "shuffle.tasks.redirected",
    }
)


class Batch(NamedTuple):
    """Hold events that were taken out of a ring.

    Attributes
    ----------
    threads
        The names of threads, by number.
    lost
        Events that were pushed out of the ring so far, before they were taken.
    taken
        Events that were taken so far, these included.
    more
        Whether events are left in the ring.
    """

    events: list[Event]
    threads: dict[int, str]
    lost: int
    taken: int
    more: bool


class Recording:
    """Keep the last events of a process. Thread-safe; no method waits for anything.

    Parameters
    ----------
    capacity
        Events in the ring.
    ranges
        Where NVTX ranges are put around steps; nowhere if None.
    """

    def __init__(self, capacity: int = RING_EVENTS, ranges: Ranges | None = None):
        self._ranges = ranges
        self._lock = threading.Lock()
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._threads: dict[int, str] = {}
        self._lost = self._taken = 0
        #: By the clock of events.
        self.began = perf_counter()

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
        """Begin an NVTX range around a step of this thread, which is to be left."""
        if self._ranges is not None:
            self._ranges.push(step, _task())

    def leave(self, step: str, began: float, args: Mapping[str, Any]) -> None:
        """Record a step of this thread that ends now, and end its range."""
        self._append(Kind.SPAN, step, began, perf_counter() - began, args)
        if self._ranges is not None:
            self._ranges.pop()

    def timed(self, step: str, began: float, seconds: float, **args: Any) -> None:
        """Record a step of this thread that has ended; it has no range."""
        self._append(Kind.SPAN, step, began, seconds, args)

    def waited(self, step: str, began: float, **args: Any) -> None:
        """Record something that belongs to no thread, and ends now."""
        self._append(Kind.WAIT, step, began, perf_counter() - began, args)

    def mark(self, step: str, **args: Any) -> None:
        """Record something that happens now."""
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
        """Learn the name of another thread, if it has not ended."""
        if thread not in self._threads:
            self._threads |= {one.ident: one.name for one in threading.enumerate() if one.ident == thread}

    # ---- taking them -------------------------------------------------------------------

    def take(self, limit: int) -> Batch:
        """Take the oldest events out of the ring, so many at most."""
        with self._lock:
            events = [self._ring.popleft() for _ in range(min(limit, len(self._ring)))]
            self._taken += len(events)
            return Batch(events, dict(self._threads), self._lost, self._taken, bool(self._ring))


def _task() -> str:
    """Return the key of the task that Dask runs on this thread."""
    return str(getattr(thread_state, "key", ""))


class Ranges:
    """Put NVTX ranges around steps, named after the prefix of the task that takes them: ``pack (shuffle)``.

    Parameters
    ----------
    push, pop
        ``nvtx.push_range`` and ``nvtx.pop_range``.
    """

    def __init__(self, push: Callable[..., Any], pop: Callable[..., Any]):
        self._push = push
        self._pop = pop

    @classmethod
    def find(cls) -> Ranges | None:
        """Return ranges where the package ``nvtx`` is installed. Imports it."""
        try:
            import nvtx
        except ImportError:
            return None
        return cls(nvtx.push_range, nvtx.pop_range)

    def push(self, step: str, task: str) -> None:
        """Begin a range of this thread."""
        self._push(message=f"{step} ({key_split(task)})" if task else step, domain=NVTX_DOMAIN)

    def pop(self) -> None:
        """End the range of this thread that began last."""
        self._pop(domain=NVTX_DOMAIN)
