"""Decide what may run when memory is short, estimate what a task will need, and let requests wait.

:class:`Admission` holds the rules, :class:`MemoryEstimator` the estimates; both are pure: time is passed
in. :class:`AdmissionQueue` has requests wait on the event loop of a worker.

A request for room comes from a task that is about to run or from data that are about to be fetched from
a peer. Data that are sent to a peer hold room too, but never wait. A request is admitted

1. when there is room for it (a fetch has to be the oldest request, too: there may always be another one), or
2. when nothing runs, whatever it needs, or
3. when it has been the oldest request for ``ADMISSION_PATIENCE_S``, with or without room.

Why nothing waits here for ever. Requests wait in the order of their arrival. While the oldest one waits,
either nothing runs, and rule 2 admits it as soon as it asks again, or its time runs out, and rule 3 does. It
asks again when something leaves, and anyhow every ``RETRY_INTERVAL_S`` seconds. Then the
next request is the oldest one. So the k-th request in the queue is admitted after k times the patience at
most, whatever runs does: tasks may wait for each other (an Event, a Queue, a Lock, the ranks of NCCL), and a
peer that data are sent to may have stopped. Without rule 3 there are deadlocks: of two tasks that wait for
each other one runs, and the other one waits here for it to end.

An admitted task has a thread: Dask executes at most as many tasks at a time as the worker has threads, and
those that wait here count among them. A task that has seceded has left its slot to another one, so it is left
out of what runs; it may wait for tasks of its own.

Rule 3 has a price: memory may go above its limit by one request for each patience. It is paid without need
where tasks take longer than that while memory is short, so the patience is long, and each case is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NamedTuple

from dask.typing import Key

from dask_gpurt.memory.reservations import Reservations
from dask_gpurt.observe import Fallback, Metrics

#: The kinds of requests.
TASK, FETCH, SEND = "task", "fetch", "send"
#: Seconds for which the oldest request waits for room before it is admitted without.
ADMISSION_PATIENCE_S = 30.0
#: Seconds after which a request asks again: room may have come from elsewhere, or its time has run out.
RETRY_INTERVAL_S = 0.5
#: Runs of a prefix that are remembered, and the share of them that would have had enough.
RUNS_REMEMBERED, SUFFICIENT_SHARE = 20, 0.9
#: The most that a task is estimated to need, as a multiple of any run so far: a few bytes in and many out,
#: as of a task that reads shards, would otherwise reserve everything for one that has inputs.
MAX_GROWTH = 2


class MemoryEstimator:
    """Estimate what tasks take besides their inputs, from what others of their prefix have taken."""

    def __init__(self) -> None:
        #: Bytes of inputs and the most that was needed, by prefix and whether there were inputs.
        self._runs: defaultdict[tuple[str, bool], deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=RUNS_REMEMBERED)
        )

    def learn(self, prefix: str, inputs: int, peak: int) -> None:
        """Remember a task that has run.

        Parameters
        ----------
        inputs, peak
            Bytes of its inputs, and the most that it took besides them.
        """
        self._runs[prefix, inputs > 0].append((inputs, peak))

    def estimate(self, prefix: str, inputs: int) -> int:
        """Return the bytes that a task will probably take besides its inputs.

        As long as nothing is known that is a result as large as these, and as much to work with.
        """
        runs = self._runs.get((prefix, inputs > 0))
        if not runs:
            return MAX_GROWTH * inputs
        if not inputs:
            return int(_sufficient([peak for _, peak in runs]))
        most = MAX_GROWTH * max(peak for _, peak in runs)
        return int(min(_sufficient([peak / nbytes for nbytes, peak in runs]) * inputs, most))


def _sufficient(runs: list[float] | list[int]) -> float:
    """Return what was enough for most of some runs."""
    return sorted(runs)[min(len(runs) - 1, int(SUFFICIENT_SHARE * len(runs)))]


class MemoryRequest(NamedTuple):
    """Request memory: for a task, or for data that come from a peer or go to one."""

    kind: str
    key: Key


def reservation(task: Key) -> MemoryRequest:
    """Return the key under which room is reserved for a running task."""
    return MemoryRequest(TASK, task)


class Admission:
    """Keep what one worker runs, fetches and sends, and which requests wait for room. Not thread-safe.

    Times are seconds by any clock that does not go back.

    Parameters
    ----------
    patience
        Seconds for which the oldest request waits before it is admitted without room.
    """

    def __init__(self, patience: float = ADMISSION_PATIENCE_S) -> None:
        self._patience = patience
        self._running: set[MemoryRequest] = set()
        self._waiting: deque[MemoryRequest] = deque()
        #: Since when the oldest request has been the oldest one.
        self._oldest_since = 0.0
        #: The number of requests that were admitted because their time had run out.
        self.overdue = 0

    def ask(self, request: MemoryRequest, fits: bool, now: float) -> bool:
        """Admit a request if that is possible; otherwise queue it, to ask again later.

        Parameters
        ----------
        fits
            Whether there is room for what it needs.
        """
        if self._running and not (fits and self._may_pass(request)):
            if not self._is_overdue(request, now):
                self._queue(request, now)
                return False
            self.overdue += 1
        self._withdraw(request, now)
        self._running.add(request)
        return True

    def _may_pass(self, request: MemoryRequest) -> bool:
        """Keep fetches from taking room from older requests: there may always be another fetch."""
        return request.kind != FETCH or self.first in (None, request)

    def _is_overdue(self, request: MemoryRequest, now: float) -> bool:
        return request == self.first and now - self._oldest_since >= self._patience

    @property
    def short(self) -> bool:
        """Return whether tasks wait, and for transfers only: nothing more should be sent then."""
        tasks_run = any(request.kind == TASK for request in self._running)
        return not tasks_run and any(request.kind == TASK for request in self._waiting)

    def leave(self, request: MemoryRequest, now: float) -> MemoryRequest | None:
        """Note that something has ended, seceded or given up; return the request that is to ask again."""
        self._running.discard(request)
        self._withdraw(request, now)
        return self.first

    @property
    def first(self) -> MemoryRequest | None:
        """Return the oldest request."""
        return self._waiting[0] if self._waiting else None

    def _queue(self, request: MemoryRequest, now: float) -> None:
        if not self._waiting:
            self._oldest_since = now
        if request not in self._waiting:
            self._waiting.append(request)

    def _withdraw(self, request: MemoryRequest, now: float) -> None:
        if request == self.first:
            self._oldest_since = now
        if request in self._waiting:
            self._waiting.remove(request)

    @property
    def running(self) -> frozenset[MemoryRequest]:
        """Return what goes on, apart from tasks that have seceded."""
        return frozenset(self._running)

    @property
    def waiting(self) -> tuple[MemoryRequest, ...]:
        """Return the requests that wait, oldest first."""
        return tuple(self._waiting)


class AdmissionQueue:
    """Queue the requests of a worker for its :class:`Admission`. On the event loop.

    Parameters
    ----------
    has_seceded
        Tells whether a task has given its slot to another one, or is not known any more.
    reservations
        Where room is reserved under each request.
    """

    def __init__(
        self, has_seceded: Callable[[Key], bool], reservations: Reservations, metrics: Metrics
    ) -> None:
        self._has_seceded = has_seceded
        self._reservations = reservations
        self._metrics = metrics
        self._admission = Admission(ADMISSION_PATIENCE_S)
        self._numbers = itertools.count()
        self._wake: dict[MemoryRequest, asyncio.Event] = {}

    @property
    def short(self) -> bool:
        """Return whether peers are to ask later."""
        return self._admission.short

    async def wait(self, request: MemoryRequest, reserve: Callable[[MemoryRequest], Awaitable[bool]]) -> None:
        """Wait until a request is admitted.

        Parameters
        ----------
        reserve
            Reserves room under it if there is some, and returns whether there is.
        """
        began = None
        while True:
            fits = await reserve(request)
            self._remove_seceded()
            if self._is_admitted(request, fits):
                self._notify(self._admission.first)  # there may be room for more
                if began is not None and (recording := self._metrics.recording) is not None:
                    recording.waited("admission", began, kind=request.kind, key=str(request.key))
                return
            if began is None:
                began = time.perf_counter()
            self._reservations.cancel(request)
            self._metrics.add("memory.waits")
            wake = self._wake.setdefault(request, asyncio.Event())
            wake.clear()
            with contextlib.suppress(TimeoutError):  # room may have come from elsewhere
                await asyncio.wait_for(wake.wait(), RETRY_INTERVAL_S)

    def _is_admitted(self, request: MemoryRequest, fits: bool) -> bool:
        before = self._admission.overdue
        admitted = self._admission.ask(request, fits, time.monotonic())
        if self._admission.overdue != before:
            self._metrics.add("memory.waits.overdue")
            self._metrics.fallback(
                Fallback.MEMORY_ADMITTED_OVERDUE,
                f"{request.kind} {request.key!r} had been the first to wait for {ADMISSION_PATIENCE_S} s: "
                "tasks wait for each other, or take longer than that while memory is short",
            )
        return admitted

    def waiting(self) -> dict[str, list[str]]:
        """Return what goes on and what waits, as plain values: to look into a cluster that stands still."""
        return {
            "running": sorted(map(str, self._admission.running)),
            "waiting": list(map(str, self._admission.waiting)),
        }

    def leave(self, request: MemoryRequest) -> None:
        """Give back the room of something that is done, or of a request that is withdrawn."""
        self._reservations.cancel(request)
        self._wake.pop(request, None)
        self._notify(self._admission.leave(request, time.monotonic()))

    @contextlib.asynccontextmanager
    async def receiving(
        self, reserve: Callable[[MemoryRequest], Awaitable[bool]]
    ) -> AsyncIterator[MemoryRequest]:
        """Wait for room for data from a peer, and keep it meanwhile; the request that has the room."""
        request = MemoryRequest(FETCH, next(self._numbers))
        try:
            await self.wait(request, reserve)
            yield request
        finally:
            self.leave(request)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Count data that go to a peer meanwhile: they cannot be spilled."""
        request = MemoryRequest(SEND, next(self._numbers))
        self._admission.ask(request, True, time.monotonic())
        try:
            yield
        finally:
            self.leave(request)

    def _notify(self, request: MemoryRequest | None) -> None:
        if request in self._wake:
            self._wake[request].set()

    def _remove_seceded(self) -> None:
        for request in self._admission.running:
            if request.kind == TASK and self._has_seceded(request.key):
                self.leave(request)
