"""Queue tasks and fetches while memory is short, and estimate the memory that tasks need.

:class:`Admission` holds the rules, :class:`MemoryEstimator` the estimates; both are pure, with time as an
argument. :class:`AdmissionQueue` makes requests wait on the event loop of a worker.

Tasks about to run, and fetches of data from peers, request memory. Data sent to a peer hold memory too, but
never wait. A request is admitted

1. if there is room for it, and, for a fetch, if no other request is older (otherwise an endless series of
   fetches could starve it), or
2. if nothing is running, whatever it needs, except tasks that wait for the cluster themselves, or
3. if it has been the oldest request for ``ADMISSION_PATIENCE_S``, with or without room.

A request waits because running ones may free memory. A task that waits for a result, an event or a lock of
Dask does not, and may wait for the very task that waits here, which Dask would have started. So it does not
count (see ``worker/tasks.py``). It keeps its reservation, and counts again when it goes on.

No request waits forever. Requests wait in order of arrival. While the oldest one waits, either nothing is
running, and rule 2 admits it at its next retry, or its time runs out, and rule 3 does. It retries whenever a
running request leaves, and at least every ``RETRY_INTERVAL_S`` seconds. Then the next request is the oldest.
So the k-th request in the queue is admitted after at most k times the patience, whatever the running tasks
do: they may wait for each other (through threads, files, NCCL), and a peer that data are sent to
may be stopped. Without rule 3 there are deadlocks: if two tasks wait for each other, one may run while the
other waits here for it to end.

An admitted task has a thread: Dask executes at most as many tasks at once as the worker has threads, and
tasks that wait here count among them. A task that has seceded has left its slot to another one, and may be
waiting for tasks of its own, so it does not count as running.

Rule 3 may exceed the memory limit by one request per patience. That is unnecessary if tasks just run longer
than the patience while memory is short, so the patience is long, and each case is counted.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NamedTuple

from dask.typing import Key
from zict import LRU

from dask_gpurt.memory.spilling import Reservations
from dask_gpurt.memory.waits import Line, WaitLine
from dask_gpurt.observe import Fallback, Metrics

#: The kinds of requests.
TASK, FETCH, SEND = "task", "fetch", "send"
#: Seconds for which a request waits as the oldest one, before it is admitted without room.
ADMISSION_PATIENCE_S = 30.0
#: Seconds between retries of a request, since memory may be freed without notice, and patience runs out.
RETRY_INTERVAL_S = 0.5
#: Prefixes, and runs of each, that are remembered, and the share of these runs that an estimate has to be
#: sufficient for.
PREFIXES_REMEMBERED, RUNS_REMEMBERED, SUFFICIENT_SHARE = 1_000, 20, 0.9
#: The largest estimate, as a multiple of the largest past run. Otherwise a run with tiny inputs and a large
#: result, as when reading shards, would make the estimate for large inputs arbitrarily high.
MAX_GROWTH = 2


class MemoryEstimator:
    """Estimate the memory that tasks need besides their inputs, from past tasks of the same prefix."""

    def __init__(self) -> None:
        #: Bytes of inputs and peak memory of past runs, by prefix and by whether there were inputs. Bounded,
        #: since programs that name keys themselves may have a prefix for each.
        self._runs: LRU[tuple[str, bool], deque[tuple[int, int]]] = LRU(PREFIXES_REMEMBERED, {})

    def learn(self, prefix: str, inputs: int, peak: int) -> None:
        """Add a completed task.

        ``inputs``, ``peak``: bytes of its inputs, and its peak memory besides them.
        """
        self._runs.setdefault((prefix, inputs > 0), deque(maxlen=RUNS_REMEMBERED)).append((inputs, peak))

    def estimate(self, prefix: str, inputs: int) -> int:
        """Return the estimated bytes that a task needs besides its inputs.

        Without past runs, assume a result and a working set as large as the inputs.
        """
        runs = self._runs.get((prefix, inputs > 0))
        if not runs:
            return MAX_GROWTH * inputs
        if not inputs:
            return int(_sufficient([peak for _, peak in runs]))
        most = MAX_GROWTH * max(peak for _, peak in runs)
        return int(min(_sufficient([peak / nbytes for nbytes, peak in runs]) * inputs, most))


def _sufficient(runs: list[float] | list[int]) -> float:
    """Return the value that was sufficient for most runs."""
    return sorted(runs)[min(len(runs) - 1, int(SUFFICIENT_SHARE * len(runs)))]


class MemoryRequest(NamedTuple):
    """Identify a request for memory: of a task, a fetch from a peer, or a send to one."""

    kind: str
    key: Key


def reservation(task: Key) -> MemoryRequest:
    """Return the key under which room is reserved for a running task."""
    return MemoryRequest(TASK, task)


class Admission:
    """Track the running and the waiting requests of one worker. Not thread-safe.

    Times are in seconds of any monotonic clock.

    ``patience``: seconds for which a request waits as the oldest one, before it is admitted without room.
    """

    def __init__(
        self, patience: float = ADMISSION_PATIENCE_S, line: Line[MemoryRequest] | None = None
    ) -> None:
        self._patience = patience
        self._running: set[MemoryRequest] = set()
        self._line = line or Line()
        #: The numbers of requests admitted because their patience ran out, and because all running tasks
        #: waited for something.
        self.overdue = self.past_idle = 0

    def ask(
        self,
        request: MemoryRequest,
        fits: bool,
        now: float,
        waits: Callable[[MemoryRequest], bool] = lambda _: False,
    ) -> bool:
        """Admit a request, or queue it for a later retry; return whether it is admitted.

        ``fits``: whether there is room for it.
        ``waits``: returns whether a running request waits for something itself.
        """
        if not (fits and self._may_pass(request)) and self._running:
            if self.first in (None, request) and all([waits(other) for other in self._running]):
                self.past_idle += 1
            elif self._is_overdue(request, now):
                self.overdue += 1
            else:
                self._line.join(request, now)
                return False
        self._line.leave(request, now)
        self._running.add(request)
        return True

    def _may_pass(self, request: MemoryRequest) -> bool:
        """Return False for a fetch if another request is older, so that fetches cannot starve it."""
        return request.kind != FETCH or self.first in (None, request)

    def _is_overdue(self, request: MemoryRequest, now: float) -> bool:
        return request == self.first and now - self._line.first_since >= self._patience

    @property
    def short(self) -> bool:
        """Return whether tasks wait while only transfers run, in which case peers should not be served."""
        tasks_run = any(request.kind == TASK for request in self._running)
        return not tasks_run and any(request.kind == TASK for request in self.waiting)

    def leave(self, request: MemoryRequest, now: float) -> MemoryRequest | None:
        """Remove a request that has ended, seceded or given up; return the request that should retry."""
        self._running.discard(request)
        self._line.leave(request, now)
        return self.first

    @property
    def first(self) -> MemoryRequest | None:
        """Return the oldest waiting request."""
        return self._line.first

    @property
    def running(self) -> frozenset[MemoryRequest]:
        """Return the running requests, except tasks that have seceded."""
        return frozenset(self._running)

    @property
    def waiting(self) -> tuple[MemoryRequest, ...]:
        """Return the waiting requests, oldest first."""
        return self._line.waiting


class AdmissionQueue:
    """Queue the memory requests of a worker, by the rules of :class:`Admission`. On the event loop.

    ``has_seceded``: returns whether a task has seceded, or is no longer known.
    ``waits_for_cluster``: returns whether a running task is in a call of Dask that waits for the cluster.
    """

    def __init__(
        self,
        has_seceded: Callable[[Key], bool],
        reservations: Reservations,
        metrics: Metrics,
        waits_for_cluster: Callable[[Key], bool] = lambda key: False,
    ) -> None:
        self._has_seceded = has_seceded
        self._waits_for_cluster = waits_for_cluster
        self._reservations = reservations
        self._metrics = metrics
        self._line: WaitLine[MemoryRequest] = WaitLine("memory", metrics.lines)
        self._admission = Admission(ADMISSION_PATIENCE_S, self._line)
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        running, waiting = sorted(map(str, self._admission.running)), list(map(str, self._admission.waiting))
        return f"<AdmissionQueue, for memory wait {waiting}, of {running} that run>"

    @property
    def short(self) -> bool:
        """Return whether peers should retry later; see :attr:`Admission.short`."""
        return self._admission.short

    async def wait(self, request: MemoryRequest, reserve: Callable[[MemoryRequest], Awaitable[bool]]) -> None:
        """Wait until a request is admitted.

        ``reserve``: reserves room for the request if there is any, and returns whether there was.
        """
        began = None

        async def attempt() -> bool:
            nonlocal began
            fits = await reserve(request)
            self._remove_seceded()
            if self._is_admitted(request, fits):
                return True
            if began is None:
                began = time.perf_counter()
                self._metrics.add("memory.waits")
            self._reservations.cancel(request)
            return False

        await self._line.reserve_or_wait_async(request, attempt, RETRY_INTERVAL_S)
        if began is not None and (recording := self._metrics.recording) is not None:
            recording.waited("admission", began, kind=request.kind, key=str(request.key))

    def _is_admitted(self, request: MemoryRequest, fits: bool) -> bool:
        before, past_idle = self._admission.overdue, self._admission.past_idle
        admitted = self._admission.ask(request, fits, time.monotonic(), self._waits)
        if self._admission.past_idle != past_idle:
            self._metrics.add("memory.waits.past-idle")
        if self._admission.overdue != before:
            self._metrics.add("memory.waits.overdue")
            self._metrics.fallback(
                Fallback.MEMORY_ADMITTED_OVERDUE,
                f"{request.kind} {request.key!r} had been the oldest request for {ADMISSION_PATIENCE_S} s: "
                "tasks wait for each other, or run longer than that while memory is short",
            )
        return admitted

    def _waits(self, request: MemoryRequest) -> bool:
        return request.kind == TASK and self._waits_for_cluster(request.key)

    def leave(self, request: MemoryRequest) -> None:
        """Release the memory of a request that is done or withdrawn."""
        self._reservations.cancel(request)
        self._admission.leave(request, time.monotonic())
        self._line.wake_first()

    @contextlib.asynccontextmanager
    async def receiving(
        self, reserve: Callable[[MemoryRequest], Awaitable[bool]]
    ) -> AsyncIterator[MemoryRequest]:
        """Wait for room for data from a peer, and hold it in the context; yield the request."""
        request = MemoryRequest(FETCH, next(self._numbers))
        try:
            await self.wait(request, reserve)
            yield request
        finally:
            self.leave(request)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Count data being sent to a peer as running in the context, since they cannot be spilled."""
        request = MemoryRequest(SEND, next(self._numbers))
        self._admission.ask(request, True, time.monotonic())
        try:
            yield
        finally:
            self.leave(request)

    def _remove_seceded(self) -> None:
        for request in self._admission.running:
            if request.kind == TASK and self._has_seceded(request.key):
                self.leave(request)
