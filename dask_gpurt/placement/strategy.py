"""Replace the choices of Dask's scheduler by placement, and restore them.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from dask_gpurt.dask_hooks.scheduler import Overrides, Unsuitable, allowed_workers
from dask_gpurt.dask_hooks.types import SchedulerState, SchedulerTask, WorkerState
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.placement import cost
from dask_gpurt.placement.candidates import AvailableWorkers, CandidateSelector
from dask_gpurt.placement.cost import Candidate
from dask_gpurt.placement.estimates import Estimates, Headroom
from dask_gpurt.topology import Topology

logger = logging.getLogger(__name__)

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

    Examples
    --------
    >>> placement = Placement(state, topology, headroom, Metrics())  # doctest: +SKIP
    >>> placement.bind()  # doctest: +SKIP
    >>> state.transitions({"x": "processing"}, "start")  # doctest: +SKIP
    """

    def __init__(self, state: SchedulerState, topology: Topology, headroom: Headroom, metrics: Metrics):
        self._state = state
        self._metrics = metrics
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
        self._overrides.scheduler(self._state, lambda name: getattr(self, f"_{name}"))
        if (extension := self._state.extensions.get("stealing")) is not None:
            self._overrides.stealing(extension, lambda name: getattr(self, name))
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
