"""Order the workers with free memory by load, and keep root tasks away from the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeVar

from dask_gpurt.dask_hooks.types import SchedulerState, WorkerState
from dask_gpurt.placement.estimates import Estimates

WorkerT = TypeVar("WorkerT", bound=Hashable)

#: Among how many of the least loaded workers one is searched that may take a task.
MAX_FAR_WORKERS = 16
#: How many workers without free memory are admitted, for one root task each, while no worker has free memory.
MAX_ADMITTED = 8


@dataclass(slots=True)
class _Indexed:
    """Hold a worker's current load, and its load in the buckets."""

    load: int
    bucket_load: int


class LoadIndex(Generic[WorkerT]):
    """Index workers by load. Pure.

    A change only records the load, in constant time; the next lookup updates the buckets. Among equally
    loaded workers the one that has had its load longest comes first, so that equal workers take turns.
    """

    def __init__(self) -> None:
        #: Sets that keep insertion order. Unlike a plain dict, they find their first worker in constant time
        #: after many others have been removed from the front.
        self._buckets: dict[int, OrderedDict[WorkerT, None]] = {}
        self._workers: dict[WorkerT, _Indexed] = {}
        #: Workers whose load has changed since the last lookup, in the order of their latest changes.
        self._changed: dict[WorkerT, _Indexed] = {}

    def __contains__(self, worker: WorkerT) -> bool:
        return worker in self._workers

    def __len__(self) -> int:
        return len(self._workers)

    def put(self, worker: WorkerT, load: int) -> None:
        """Set the load of a worker, which is indexed if it was not."""
        known = self._workers.get(worker)
        if known is None:
            self._update()
            self._workers[worker] = _Indexed(load, load)
            self._bucket(load)[worker] = None
        elif known.load != load:
            known.load = load
            self._changed.pop(worker, None)
            self._changed[worker] = known

    def discard(self, worker: WorkerT) -> None:
        """Remove a worker from the index, if present."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._changed.pop(worker, None)
            self._take_out(worker, known.bucket_load)

    def least(self, number: int) -> Iterator[WorkerT]:
        """Return up to ``number`` workers, least loaded first."""
        self._update()
        if not self._buckets:
            return iter(())
        first = self._buckets[min(self._buckets)]
        if len(first) >= number:
            return islice(first, number)
        return islice(chain.from_iterable(self._buckets[load] for load in sorted(self._buckets)), number)

    def _update(self) -> None:
        for worker, known in self._changed.items():
            self._take_out(worker, known.bucket_load)
            self._bucket(known.load)[worker] = None
            known.bucket_load = known.load
        self._changed.clear()

    def _bucket(self, load: int) -> OrderedDict[WorkerT, None]:
        bucket = self._buckets.get(load)
        if bucket is None:
            bucket = self._buckets[load] = OrderedDict()
        return bucket

    def _take_out(self, worker: WorkerT, load: int) -> None:
        bucket = self._buckets[load]
        del bucket[worker]
        if not bucket:
            del self._buckets[load]


class AvailableWorkers:
    """Index the running workers with free memory by load."""

    def __init__(self, state: SchedulerState, estimates: Estimates):
        self._state = state
        self._estimates = estimates
        # By address, since hashing Dask's WorkerState calls a Python method, which is slow.
        self._index: LoadIndex[str] = LoadIndex()

    def __contains__(self, ws: WorkerState) -> bool:
        return ws.address in self._index

    def __bool__(self) -> bool:
        while len(self._index):
            if any(True for _ in self.least_loaded(MAX_FAR_WORKERS)):
                return True
        return False

    def check(self, ws: WorkerState) -> bool:
        """Update the load of a running worker; return whether it has free memory."""
        if self._estimates.has_room(ws):
            self._index.put(ws.address, len(ws.processing) // ws.nthreads)
            return True
        self._index.discard(ws.address)
        return False

    def discard(self, worker: str) -> None:
        """Remove a worker by its address."""
        self._index.discard(worker)

    def least_loaded(self, number: int) -> Iterator[WorkerState]:
        """Yield up to ``number`` available workers, least loaded first."""
        workers, running = self._state.workers, self._state.running
        for address in list(self._index.least(number)):
            ws = workers.get(address)
            if ws is not None and ws in running:
                yield ws
            else:  # it has left or stopped running since its last check
                self._index.discard(address)

    def least_loaded_of(self, workers: Collection[WorkerState]) -> WorkerState | None:
        """Return one of the given workers with a low load.

        None if many other workers have less load, or the given ones have no free memory. The lookup in the
        index comes first, since even ``next(iter(workers))`` is slow for a set that has had many elements.
        """
        for ws in self.least_loaded(MAX_FAR_WORKERS):
            if ws in workers:
                return ws
        return next(iter(workers)) if len(workers) == 1 else None


class IdleWorkerFilter:
    """Keep workers without free memory out of the scheduler's ``idle_task_count``.

    Dask assigns queued root tasks to the workers in that set. While no running worker has free memory, a few
    idle workers are admitted nevertheless, for one task each, so that the queue always makes progress.
    """

    def __init__(self, state: SchedulerState, available: AvailableWorkers):
        self._state = state
        self._available = available
        #: Idle workers without free memory, and those that are admitted nevertheless, by address.
        self._excluded: dict[str, WorkerState] = {}
        self._admitted: dict[str, WorkerState] = {}

    def check(self, ws: WorkerState) -> None:
        """Exclude a worker without free memory, after Dask has classified it by its tasks."""
        if self._excluded or self._admitted:
            self.discard(ws.address)
        if ws not in self._state.running:
            return
        if self._available.check(ws):
            if self._admitted:
                self._exclude_admitted()
            return
        self._state.idle_task_count.discard(ws)
        if not ws.processing:
            self._excluded[ws.address] = ws
        self.admit()

    def admit(self) -> None:
        """Admit some excluded workers if no worker has free memory."""
        if not self._excluded or self._available:
            return
        for address in list(islice(self._excluded, MAX_ADMITTED - len(self._admitted))):
            ws = self._excluded.pop(address)
            if ws in self._state.running:
                self._admitted[address] = ws
                self._state.idle_task_count.add(ws)

    def _exclude_admitted(self) -> None:
        self._state.idle_task_count.difference_update(self._admitted.values())
        self._excluded.update(self._admitted)
        self._admitted.clear()

    def clear(self) -> None:
        """Forget all excluded and admitted workers; Dask classifies all of them again."""
        self._excluded.clear()
        self._admitted.clear()

    def discard(self, worker: str) -> None:
        """Forget a worker by its address, since Dask has removed it or it is checked again."""
        self._excluded.pop(worker, None)
        self._admitted.pop(worker, None)
