"""Replace the choices of Dask's scheduler by placement, and restore them.

Candidates for a task are workers that hold its inputs, and few others.

Decisions and their figures: ``docs/decisions/placement.md`` and ``docs/decisions/scheduler.md``.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from dask_gpurt.dask_hooks.scheduler import Overrides, Unsuitable, allowed_workers
from dask_gpurt.dask_hooks.seams import PLACEMENT, STEALING
from dask_gpurt.dask_hooks.types import SchedulerState, SchedulerTask, WorkerState
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import Candidate
from dask_gpurt.placement.estimates import Demand, Estimates, Headroom, is_alias
from dask_gpurt.topology import Topology

logger = logging.getLogger(__name__)

# ---- workers with free memory, by load ---------------------------------------------------------------

WorkerT = TypeVar("WorkerT", bound=Hashable)

#: Among how many of the least loaded workers one is searched that may take a task.
MAX_FAR_WORKERS = 16


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

    def check(self, ws: WorkerState) -> None:
        """Update the load of a running worker."""
        if self._estimates.has_room(ws):
            self._index.put(ws.address, len(ws.processing) // ws.nthreads)
        else:
            self._index.discard(ws.address)

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


# ---- candidates --------------------------------------------------------------------------------------

#: How many holders of inputs are compared, those with the most bytes, and how many holders of one input.
MAX_HOLDERS, MAX_REPLICAS = 4, 4


class CandidateSelector:
    """Select the candidates for a task, and estimate its cost on each."""

    def __init__(self, state: SchedulerState, estimates: Estimates, available: AvailableWorkers):
        self._state = state
        self._estimates = estimates
        self._available = available

    def for_task(self, ts: SchedulerTask, valid: Collection[WorkerState] | None) -> list[Candidate]:
        """Return the costs of a task on holders of its inputs, or on others if it fits on none of these.

        ``valid``: the running workers that the task may run on; None for all running workers.
        """
        allowed = self._state.running if valid is None else valid
        demand = self._estimates.demand(ts)
        estimate = partial(self._estimates.cost, demand)
        if len(allowed) == 1:
            return [estimate(ws) for ws in allowed]
        found = [estimate(ws) for ws in self._holders(demand) if ws in allowed]
        if found and is_alias(ts):  # an alias needs no additional memory where its data are
            return found
        if not any([candidate.fits for candidate in found]):
            found += [estimate(ws) for ws in self._far(allowed)]
        return found

    def _holders(self, demand: Demand) -> list[WorkerState]:
        """Return the workers with the most bytes of inputs; ties are broken by the least work."""
        # By address, since hashing Dask's WorkerState calls a Python method, which is slow.
        found = {ws.address: ws for _, _, holders, _ in demand.inputs for ws in islice(holders, MAX_REPLICAS)}
        if len(found) <= MAX_HOLDERS:
            return list(found.values())
        held: defaultdict[str, int] = defaultdict(int)
        for _, nbytes, holders, _ in demand.inputs:
            for ws in islice(holders, MAX_REPLICAS):
                held[ws.address] += nbytes
        most = nsmallest(MAX_HOLDERS, held, key=lambda one: (-held[one], found[one].occupancy, one))
        return [found[address] for address in most]

    def _far(self, allowed: Collection[WorkerState]) -> Collection[WorkerState]:
        """Return a few workers anywhere, for a task without inputs or without memory near its inputs."""
        if len(allowed) <= MAX_FAR_WORKERS:
            return allowed
        found = [ws for ws in self._available.least_loaded(MAX_FAR_WORKERS) if ws in allowed]
        return found or nsmallest(
            MAX_FAR_WORKERS, allowed, key=lambda ws: (len(ws.processing) / ws.nthreads, ws.address)
        )

    # ---- root tasks ----------------------------------------------------------------------

    def for_root(self, ts: SchedulerTask, open_to: Collection[WorkerState]) -> list[Candidate]:
        """Return the cost of a root task on the least loaded worker; nothing if none has free memory.

        ``open_to``: the workers that accept root tasks now.
        """
        ws = self._available.least_loaded_of(open_to)
        return [] if ws is None else [self._estimates.cost(self._estimates.demand(ts), ws)]


# ---- choices -----------------------------------------------------------------------------------------

#: How many thieves have their costs compared, and from how many of the least loaded workers these are taken.
MAX_THIEVES, MAX_THIEVES_LOOKED_UP = 4, 64


class Placement:
    """Choose workers for tasks, root tasks and steals on a scheduler of Dask.

    The caller reports events for which Dask has no hook through the ``on_…`` methods. If a choice raises, or
    Dask's method differs from the known one, Dask chooses.

    Simulations may pass a bare ``SchedulerState`` whose class has a ``__dict__`` and
    ``transitions(recommendations, stimulus_id)``.

    ``state``: Dask's ``SchedulerState``. Its extension ``stealing`` is bound too, if present.
    ``topology``: the places of workers. It may learn them before or after Dask does, see
    :meth:`on_place_changed`.
    ``kept_at``: returns the worker that has kept what a task reads, if it is known; the task goes there.

    Examples
    --------
    >>> placement = Placement(state, topology, headroom, Metrics())  # doctest: +SKIP
    >>> placement.bind()  # doctest: +SKIP
    >>> state.transitions({"x": "processing"}, "start")  # doctest: +SKIP
    """

    def __init__(
        self,
        state: SchedulerState,
        topology: Topology,
        headroom: Headroom,
        metrics: Metrics,
        kept_at: Callable[[SchedulerTask], WorkerState | None] = lambda ts: None,
    ):
        self._state = state
        self._metrics = metrics
        self._kept_at = kept_at
        self._estimates = Estimates(state, topology, headroom)
        self._available = AvailableWorkers(state, self._estimates)
        self._candidates = CandidateSelector(state, self._estimates, self._available)
        #: The root task that Dask places next, by a method that does not receive it.
        self._root: SchedulerTask | None = None
        self._overrides = Overrides(lambda name, why: metrics.fallback(Fallback.PLACEMENT, why, name))
        self._originals = self._overrides.originals
        self._is_bound = False

    # ---- on and off --------------------------------------------------------------------

    def bind(self) -> None:
        """Replace Dask's choices. Workers and tasks may exist already."""
        self._is_bound = True
        self._overrides.replace(PLACEMENT, self._state, lambda name: getattr(self, f"_{name}"))
        if (extension := self._state.extensions.get("stealing")) is not None:
            self._overrides.replace(STEALING, extension, lambda name: getattr(self, name))
        for ws in self._state.workers.values():
            self._check(ws)

    def unbind(self) -> None:
        """Restore Dask's choices. Learned estimates are kept for the next :meth:`bind`."""
        self._is_bound = False
        self._overrides.restore()

    # ---- events ------------------------------------------------------------------------

    def on_memory_reported(self, worker: str) -> None:
        """Note that a worker has reported its memory."""
        if (ws := self._state.workers.get(worker)) is not None:
            self._estimates.on_memory_reported(ws)
            self._check(ws)

    def on_place_changed(self, worker: str) -> None:
        """Note that the topology's place of a worker has changed."""
        self._estimates.routes.clear()
        if (ws := self._state.workers.get(worker)) is not None:
            self._check(ws)

    def _check(self, ws: WorkerState) -> None:
        if self._is_bound and ws in self._state.running:
            self._available.check(ws)

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that Dask has removed."""
        self._available.discard(worker)
        self._estimates.on_worker_removed(worker)

    # ---- tasks with inputs, and root tasks that Dask does not queue ------------------------

    def _decide_worker_non_rootish(self, ts: SchedulerTask) -> WorkerState | None:
        state = self._state
        if not state.running or ts.actor:
            return self._dasks("decide_worker_non_rootish", ts)
        if not ts.dependencies and (place := self._kept_at(ts)) is not None:
            return place
        valid = allowed_workers(state, ts)
        if valid is not None and not valid:
            return None
        if ts.dependencies or valid is not None:
            candidates = self._candidates.for_task(ts, valid)
        else:
            candidates = self._candidates.for_root(ts, state.running)
        if not candidates:
            return self._dasks("decide_worker_non_rootish", ts)
        return self._decide(ts, candidates, state.running if valid is None else valid)

    def _dasks(self, name: str, *args: Any, **kwargs: Any) -> WorkerState | None:
        """Return the choice of Dask's own method."""
        ws: WorkerState | None = self._originals[name](*args, **kwargs)
        return ws

    def _decide(
        self, ts: SchedulerTask, candidates: list[Candidate], allowed: Collection[WorkerState]
    ) -> WorkerState:
        """Return the worker of the best candidate, and record the decision."""
        chosen = cost.best(candidates) if len(candidates) > 1 else candidates[0]
        ws: WorkerState | None = self._state.workers.get(chosen.worker)
        if ws is None or ws not in allowed:
            raise Unsuitable(f"{chosen.worker} was chosen for {ts.key!r} but may not run it")
        self._estimates.on_decided(chosen, ws)
        if logger.isEnabledFor(logging.DEBUG):
            _log("placed", ts, chosen, candidates)
        self._metrics.add("placement.decisions")
        if (recording := self._metrics.recording) is not None:
            recording.mark(
                "placement",
                key=str(ts.key),
                worker=chosen.worker,
                candidates=len(candidates),
                seconds=chosen.seconds,
                moving=chosen.moving,
                fits=bool(chosen.fits),
            )
        return ws

    # ---- root tasks --------------------------------------------------------------------

    def _is_rootish(self, ts: SchedulerTask) -> bool:
        rootish: bool = self._originals["is_rootish"](ts)
        self._root = ts if rootish else None
        return rootish

    def _decide_worker_rootish_queuing_enabled(self) -> WorkerState | None:
        idle, queued = self._state.idle_task_count, self._state.queued
        ts, self._root = self._root, None
        if not idle:
            return None
        if ts is None and queued:  # the first task of the queue gets its turn
            ts = queued.peek()
        candidates = [] if ts is None else self._candidates.for_root(ts, idle)
        if ts is None or not candidates:
            return self._dasks("decide_worker_rootish_queuing_enabled")
        return self._decide(ts, candidates, idle)

    def _check_idle_saturated(self, ws: WorkerState, occ: float = -1.0) -> None:
        self._originals["check_idle_saturated"](ws, occ)
        self._check(ws)

    # ---- stealing ----------------------------------------------------------------------

    def _get_thief(
        self,
        scheduler: SchedulerState,
        ts: SchedulerTask,
        potential_thieves: set[WorkerState],
        *,
        occupancies: Mapping[WorkerState, float],
    ) -> WorkerState | None:
        victim = ts.processing_on
        if ts.actor or victim is None:
            return self._dasks("_get_thief", scheduler, ts, potential_thieves, occupancies=occupancies)
        valid = scheduler.valid_workers(ts)
        if valid is not None and ((able := potential_thieves & valid) or not ts.loose_restrictions):
            potential_thieves = able
        in_flight = scheduler.extensions["stealing"].in_flight_occupancy

        def wait(ws: WorkerState) -> float:
            """Return the work before a task in seconds; tasks being stolen count for the thief."""
            return float((occupancies[ws] + in_flight.get(ws, 0)) / ws.nthreads)

        demand = self._estimates.demand(ts)
        free = (ws for ws in self._available.least_loaded(MAX_THIEVES_LOOKED_UP) if ws in potential_thieves)
        found = [
            self._estimates.cost(demand, ws)._replace(waiting=wait(ws)) for ws in islice(free, MAX_THIEVES)
        ]
        fitting = [candidate for candidate in found if candidate.fits and candidate.worker != victim.address]
        if not fitting or (thief := cost.best(fitting)).seconds >= wait(victim):
            return None
        if logger.isEnabledFor(logging.DEBUG):
            _log("stolen", ts, thief, found)
        ws: WorkerState = self._state.workers[thief.worker]
        return ws


def _log(what: str, ts: SchedulerTask, chosen: Candidate, candidates: Collection[Candidate]) -> None:
    """Log a decision at DEBUG with the candidates that it has rejected."""
    rejected = [candidate for candidate in candidates if candidate.worker != chosen.worker]
    logger.debug("%r is %s on %s; rejected: %s", ts.key, what, chosen, rejected or "none")
