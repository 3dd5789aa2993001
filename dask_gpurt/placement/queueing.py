"""Order workers by load, and queued root tasks by their siblings."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count, islice
from typing import Generic, TypeVar

from dask_gpurt.dask_hooks.types import SchedulerState, SchedulerTask, WorkerState
from dask_gpurt.placement.estimates import Estimates
from dask_gpurt.topology import Topology

WorkerT = TypeVar("WorkerT", bound=Hashable)

#: The name of a device, an NVLink domain, a host, or the set of all workers.
Neighbourhood = tuple[str, ...]
#: The workers of a neighbourhood by load. The inner dicts are sets that keep insertion order.
Buckets = dict[int, dict[WorkerT, None]]
#: The neighbourhood of all workers.
EVERYWHERE: Neighbourhood = ("everywhere",)
#: How many of the least loaded workers are compared if any worker of the cluster will do.
MAX_FAR_WORKERS = 16
#: Tasks with more inputs have no siblings; and the longest chain of single inputs that is followed.
MAX_SIBLINGS, MAX_CHAIN = 16, 4
#: How many workers without free memory are admitted, for one root task each, while no worker has free memory.
MAX_ADMITTED = 8
#: How many idle workers without free memory are checked again when the queue advances, since memory may
#: become free without a report.
MAX_RECHECKED = 4


# ---- workers by load -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Indexed(Generic[WorkerT]):
    """Hold a worker's current load, its neighbourhoods and their buckets, and its load in the buckets."""

    load: int
    neighbourhoods: Sequence[Neighbourhood]
    buckets: list[Buckets[WorkerT]]
    bucket_load: int


class LoadIndex(Generic[WorkerT]):
    """Index workers by load, in each of their neighbourhoods. Pure.

    A change only records the load, in constant time; the next lookup updates the buckets. Among equally
    loaded workers the one that has had its load longest comes first, so that equal workers take turns.
    """

    def __init__(self) -> None:
        self._buckets: dict[Neighbourhood, Buckets[WorkerT]] = {}
        self._workers: dict[WorkerT, _Indexed[WorkerT]] = {}
        #: Workers whose load has changed since the last lookup, in the order of their latest changes.
        self._changed: dict[WorkerT, _Indexed[WorkerT]] = {}

    def __contains__(self, worker: WorkerT) -> bool:
        return worker in self._workers

    def __len__(self) -> int:
        return len(self._workers)

    def load(self, worker: WorkerT) -> int | None:
        """Return the load of a worker; None if it is not indexed."""
        known = self._workers.get(worker)
        return known.load if known else None

    def neighbourhoods(self, worker: WorkerT) -> Sequence[Neighbourhood]:
        """Return the neighbourhoods of a worker; empty if it is not indexed."""
        known = self._workers.get(worker)
        return known.neighbourhoods if known else ()

    def put(self, worker: WorkerT, load: int, neighbourhoods: Sequence[Neighbourhood]) -> None:
        """Index a worker."""
        if self.neighbourhoods(worker) == neighbourhoods and self.load(worker) == load:
            return
        self.discard(worker)
        buckets = [self._buckets.setdefault(name, {}) for name in neighbourhoods]
        self._workers[worker] = _Indexed(load, neighbourhoods, buckets, load)
        for each in buckets:
            each.setdefault(load, {})[worker] = None

    def change(self, worker: WorkerT, load: int) -> bool:
        """Set the load of a worker; return whether it is indexed."""
        known = self._workers.get(worker)
        if known is None:
            return False
        if known.load != load:
            known.load = load
            self._changed.pop(worker, None)
            self._changed[worker] = known
        return True

    def discard(self, worker: WorkerT) -> None:
        """Remove a worker from the index, if present."""
        self._update()
        known = self._workers.pop(worker, None)
        if known is None:
            return
        for name, each in zip(known.neighbourhoods, known.buckets, strict=True):
            _take_out(each, known.bucket_load, worker)
            if not each:
                del self._buckets[name]

    def lowest(self, neighbourhood: Neighbourhood) -> int | None:
        """Return the lowest load in a neighbourhood; None if it has no workers."""
        self._update()
        buckets = self._buckets.get(neighbourhood)
        return min(buckets) if buckets else None

    def least(self, neighbourhood: Neighbourhood, number: int) -> Iterator[WorkerT]:
        """Return up to ``number`` workers of a neighbourhood, least loaded first."""
        self._update()
        buckets = self._buckets.get(neighbourhood)
        if not buckets:
            return iter(())
        first = buckets[min(buckets)]
        if len(first) >= number:
            return islice(first, number)
        return islice(chain.from_iterable(buckets[load] for load in sorted(buckets)), number)

    def _update(self) -> None:
        for worker, known in self._changed.items():
            for each in known.buckets:
                _take_out(each, known.bucket_load, worker)
                each.setdefault(known.load, {})[worker] = None
            known.bucket_load = known.load
        self._changed.clear()


def _take_out(buckets: Buckets[WorkerT], load: int, worker: WorkerT) -> None:
    bucket = buckets[load]
    del bucket[worker]
    if not bucket:
        del buckets[load]


class AvailableWorkers:
    """Index the running workers with free memory, by load and neighbourhood.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    topology
        The places of workers.
    estimates
        Loads and free memory of the workers.
    """

    def __init__(self, state: SchedulerState, topology: Topology, estimates: Estimates):
        self._state = state
        self._topology = topology
        self._estimates = estimates
        # By address, since hashing Dask's WorkerState calls a Python method, which is slow.
        self._index: LoadIndex[str] = LoadIndex()

    def __contains__(self, ws: WorkerState) -> bool:
        return ws.address in self._index

    def __bool__(self) -> bool:
        while len(self._index):
            if any(True for _ in self.least_loaded(EVERYWHERE, MAX_FAR_WORKERS)):
                return True
        return False

    def check(self, ws: WorkerState) -> bool:
        """Update the load of a running worker; return whether it has free memory."""
        address, load = ws.address, math.ceil(self._estimates.load(ws)) // ws.nthreads
        if not self._estimates.has_room(ws):
            self._index.discard(address)
            return False
        if not self._index.change(address, load):
            self._index.put(address, load, self._neighbourhoods(ws))
        return True

    def discard(self, worker: str) -> None:
        """Remove a worker by its address."""
        self._index.discard(worker)

    def has_moved(self, ws: WorkerState) -> bool:
        """Remove a worker if its neighbourhoods have changed; return whether they have."""
        if self._neighbourhoods(ws) == self._index.neighbourhoods(ws.address):
            return False
        self._index.discard(ws.address)
        return True

    def neighbourhoods(self, ws: WorkerState) -> Sequence[Neighbourhood]:
        """Return the neighbourhoods of a worker, from near to far."""
        return self._index.neighbourhoods(ws.address) or self._neighbourhoods(ws)

    def _neighbourhoods(self, ws: WorkerState) -> Sequence[Neighbourhood]:
        return *(self._topology.neighbourhoods(ws.address) or (("host", ws.host),)), EVERYWHERE

    def home(self, ws: WorkerState) -> Neighbourhood:
        """Return the NVLink domain of a worker, or its host if it has none."""
        return next(name for name in self.neighbourhoods(ws) if name[0] in ("nvlink", "host"))

    def lowest_load(self, neighbourhood: Neighbourhood) -> int | None:
        """Return the lowest load in a neighbourhood; None if it has no available workers."""
        return self._index.lowest(neighbourhood)

    def least_loaded(self, neighbourhood: Neighbourhood, number: int) -> Iterator[WorkerState]:
        """Yield up to ``number`` available workers of a neighbourhood, least loaded first."""
        workers, running = self._state.workers, self._state.running
        for address in list(self._index.least(neighbourhood, number)):
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
        for ws in self.least_loaded(EVERYWHERE, MAX_FAR_WORKERS):
            if ws in workers:
                return ws
        return next(iter(workers)) if len(workers) == 1 else None


# ---- root tasks ----------------------------------------------------------------------------------------


def siblings(ts: SchedulerTask) -> Iterator[SchedulerTask]:
    """Yield the tasks whose results will be needed together with a task's result; none if there are many."""
    dependent = next(iter(ts.dependents), None)
    for _ in range(MAX_CHAIN):
        if dependent is None or len(dependent.dependencies) > 1:
            break
        dependent = next(iter(dependent.dependents), None)
    if dependent is not None and 1 < len(dependent.dependencies) <= MAX_SIBLINGS:
        for sibling in dependent.dependencies:
            if (origin := _origin(sibling)) is not ts:
                yield origin


def _origin(ts: SchedulerTask) -> SchedulerTask:
    """Follow a chain of single inputs to its head, or to the first task that has a worker."""
    for _ in range(MAX_CHAIN):
        if len(ts.dependencies) != 1 or worker_of(ts):
            break
        ts = next(iter(ts.dependencies))
    return ts


def worker_of(ts: SchedulerTask) -> WorkerState | None:
    """Return a worker that has the result of a task, or will have it."""
    if ts.processing_on is not None:
        return ts.processing_on
    return next(iter(ts.who_has), None) if ts.who_has else None


def _priority(ts: SchedulerTask) -> tuple[float, ...]:
    """Return the priority of a queued task, which is never None."""
    assert ts.priority is not None
    return ts.priority


class SiblingQueue:
    """Order queued root tasks such that siblings start near each other.

    Dask's own queue is authoritative: tasks that are no longer queued there are skipped. When a task starts,
    its queued siblings are reserved for the next slots of the same neighbourhood; other slots take other
    tasks first.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    """

    def __init__(self, state: SchedulerState):
        self._state = state
        self._heap: list[tuple[tuple[float, ...], int, SchedulerTask]] = []
        self._arrivals = count()
        self._reserved: set[SchedulerTask] = set()
        self._reservations: defaultdict[Neighbourhood, deque[SchedulerTask]] = defaultdict(deque)

    def on_queued(self, ts: SchedulerTask) -> None:
        """Add a task that has entered Dask's queue."""
        heappush(self._heap, (_priority(ts), next(self._arrivals), ts))

    def on_started(self, ts: SchedulerTask, home: Neighbourhood) -> None:
        """Reserve the siblings of a task that starts in a neighbourhood."""
        if not self._state.queued:
            self.clear()
            return
        if ts in self._reserved:
            self._reserved.discard(ts)
            return
        family = [sibling for sibling in siblings(ts) if self._is_free(sibling)]
        if family:
            self._reserved.update(family)
            self._reservations[home].extend(sorted(family, key=_priority))

    def next(self, home: Neighbourhood) -> SchedulerTask:
        """Return the task for a slot in a neighbourhood; Dask's queue must not be empty."""
        reservations = self._reservations.get(home)
        while reservations:
            ts = reservations.popleft()
            if ts in self._reserved and self._is_queued(ts):
                return ts
        self._reservations.pop(home, None)
        while self._heap:
            _, _, ts = heappop(self._heap)
            if self._is_free(ts):
                return ts
        first: SchedulerTask = self._state.queued.peek()
        return first

    def _is_free(self, ts: SchedulerTask) -> bool:
        return self._is_queued(ts) and ts not in self._reserved

    def _is_queued(self, ts: SchedulerTask) -> bool:
        return ts.state == "queued" and self._state.tasks.get(ts.key) is ts

    def clear(self) -> None:
        """Forget all tasks."""
        self._heap.clear()
        self._reserved.clear()
        self._reservations.clear()


class IdleWorkerFilter:
    """Keep workers without free memory out of the scheduler's ``idle_task_count``.

    Dask assigns queued root tasks to the workers in that set. While no running worker has free memory, a few
    idle workers are admitted nevertheless, for one task each, so that the queue always makes progress.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    available
        The workers with free memory.
    """

    def __init__(self, state: SchedulerState, available: AvailableWorkers):
        self._state = state
        self._available = available
        #: Idle workers without free memory, and those that are admitted nevertheless, by address.
        self._excluded: dict[str, WorkerState] = {}
        self._admitted: dict[str, WorkerState] = {}
        #: The worker that became idle last. While tasks are queued it is mostly the only idle one.
        self._last_idle: WorkerState | None = None

    def check(self, ws: WorkerState) -> None:
        """Exclude a worker without free memory, after Dask has classified it by its tasks."""
        address = ws.address
        if self._excluded or self._admitted:
            self.discard(address)
        if ws not in self._state.running:
            return
        if self._available.check(ws):
            if self._admitted:
                self._exclude_admitted()
            if ws in self._state.idle_task_count:
                self._last_idle = ws
            return
        self._state.idle_task_count.discard(ws)
        if not ws.processing:
            self._excluded[address] = ws
        self.admit()

    def slot(self) -> WorkerState | None:
        """Return a worker with a low load among those that accept root tasks; None if many others have less.

        Iterating over a set that has had many elements is slow, so a single idle worker is remembered. While
        some workers are paused, the index is used nevertheless, which removes them.
        """
        state, idle = self._state, self._state.idle_task_count
        if len(idle) == 1 and len(state.running) == len(state.workers) and self._last_idle in idle:
            return self._last_idle
        return self._available.least_loaded_of(idle)

    def some_excluded(self) -> list[WorkerState]:
        """Return some excluded workers, to be checked again."""
        if not self._excluded:
            return []
        return [ws for ws in islice(self._excluded.values(), MAX_RECHECKED) if ws in self._state.running]

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
        self._last_idle = None

    def discard(self, worker: str) -> None:
        """Forget a worker by its address, since Dask has removed it or it is checked again."""
        self._excluded.pop(worker, None)
        self._admitted.pop(worker, None)
