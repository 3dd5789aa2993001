"""Replace the choices of Dask's scheduler by placement, and restore them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from math import floor
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks.scheduler import Overrides, Unsuitable
from dask_gpurt.dask_hooks.types import SchedulerState, SchedulerTask, WorkerState
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.placement import cost
from dask_gpurt.placement.candidates import CandidateSelector
from dask_gpurt.placement.cost import Candidate
from dask_gpurt.placement.free_memory import Headroom
from dask_gpurt.placement.history import MAX_KEYS, History
from dask_gpurt.placement.queueing import IdleWorkerFilter, SiblingQueue
from dask_gpurt.topology import Topology

#: How many thieves of a neighbourhood have their costs compared, and from how many of the least loaded
#: workers these are taken.
MAX_THIEVES, MAX_THIEVES_LOOKED_UP = 4, 64


class Placement:
    """Choose workers for tasks, root tasks and steals on a scheduler of Dask.

    The caller reports events for which Dask has no hook through the ``on_…`` methods. If a choice raises, or
    Dask's method differs from the known one, Dask chooses.

    Simulations may pass a bare ``SchedulerState`` whose class has a ``__dict__`` and
    ``transitions(recommendations, stimulus_id)``. They must add ``stimulus_queue_slots_maybe_opened`` to its
    class, with Dask's body, and call it after each event, as Dask does.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``. Its extension ``stealing`` is bound too, if present.
    topology
        The places of workers. It may learn them before or after Dask does, see :meth:`on_place_changed`.
    headroom
        Free memory of the workers.
    metrics
        Counts decisions and fallbacks.
    history
        How many keys have their last decision kept.

    Examples
    --------
    >>> placement = Placement(state, topology, headroom, Metrics())  # doctest: +SKIP
    >>> placement.bind()  # doctest: +SKIP
    >>> state.transitions({"x": "processing"}, "start")  # doctest: +SKIP
    >>> placement.explain("x")  # doctest: +SKIP
    """

    def __init__(
        self,
        state: SchedulerState,
        topology: Topology,
        headroom: Headroom,
        metrics: Metrics,
        history: int = MAX_KEYS,
    ):
        self._state = state
        self._topology = topology
        self._headroom = headroom
        self._metrics = metrics
        self._candidates = CandidateSelector(state, topology, headroom)
        self._estimates = self._candidates.estimates
        self._available = self._candidates.available
        self._idle = IdleWorkerFilter(state, self._available)
        self._roots = SiblingQueue(state)
        self._history = History(history)
        #: The root task that Dask places next, by a method that does not receive it, and a worker with a
        #: slot.
        self._root: SchedulerTask | None = None
        self._slot: WorkerState | None = None
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
        for ws in list(self._state.workers.values()):
            self._state.check_idle_saturated(ws)
        for ts in list(self._state.queued.sorted()):
            self._roots.on_queued(ts)

    def unbind(self) -> None:
        """Restore Dask's choices. Learned estimates are kept for the next :meth:`bind`."""
        self._is_bound = False
        self._overrides.restore()
        self._estimates.forget_pending()
        self._roots.clear()
        self._idle.clear()
        for ws in list(self._state.workers.values()):
            self._state.check_idle_saturated(ws)

    # ---- events ------------------------------------------------------------------------

    def on_graph(self, keys: Iterable[Key]) -> None:
        """Note a new graph, before any of its tasks is placed."""
        self._overrides.guarded("submitted", self._on_graph, lambda _: None)(keys)

    def _on_graph(self, keys: Iterable[Key]) -> None:
        found = [ts for key in keys if (ts := self._state.tasks.get(key)) is not None and _is_ready(ts)]
        is_rootish = self._originals["is_rootish"]
        self._candidates.on_graph([ts for ts in found if not is_rootish(ts)])

    def on_task_ended(self, key: Key, worker: str | None = None, seconds: float = 0.0) -> None:
        """Note that a task has left its worker, after Dask has updated its own state.

        Parameters
        ----------
        worker, seconds
            The worker that has computed it, and the duration; omitted for a task without a result.
        """
        self._candidates.on_task_ended(key)
        ts = self._state.tasks.get(key)
        if ts is not None and worker is not None:
            self._estimates.on_task_finished(ts, worker, seconds)

    def on_memory_reported(self, worker: str) -> None:
        """Note that a worker has reported its memory."""
        ws = self._state.workers.get(worker)
        if ws is not None:
            self._estimates.on_memory_reported(ws)
            self._check(ws)

    def on_place_changed(self, worker: str) -> None:
        """Note that the topology's place of a worker has changed."""
        ws = self._state.workers.get(worker)
        if ws is not None:
            self._candidates.on_place_changed(ws)
            self._check(ws)

    def _check(self, ws: WorkerState) -> None:
        """Have Dask and the filter check a worker again, and let the queue advance."""
        if self._is_bound and ws in self._state.running:
            self._state.check_idle_saturated(ws)
            self._open_queue("gpurt-room")

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that Dask has removed."""
        self._candidates.on_worker_removed(worker)
        self._idle.discard(worker)
        if self._is_bound:
            self._idle.admit()
            self._open_queue("gpurt-left")

    def _open_queue(self, stimulus_id: str) -> None:
        if self._state.queued and self._state.idle_task_count:
            self._state.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)

    def latest(self, most: int) -> list[dict[str, Any]]:
        """Return the latest decisions with their reasons, see :meth:`History.latest`."""
        return self._history.latest(most)

    def explain(self, key: Key) -> list[dict[str, Any]]:
        """Return a row for each candidate of the last decision about a key, see :class:`History`."""
        return self._history.explain(key)

    def slowdowns(self) -> Iterable[float]:
        """Return the slowdown of each worker that has run tasks."""
        return self._estimates.slowdown.known()

    @property
    def history(self) -> History:
        """Return the latest decisions."""
        return self._history

    # ---- tasks with inputs, and root tasks that Dask does not queue ------------------------

    def _decide_worker_non_rootish(self, ts: SchedulerTask) -> WorkerState | None:
        state = self._state
        self._candidates.on_placing(ts)
        if not state.running or ts.actor:
            return self._dasks("decide_worker_non_rootish", ts)
        valid = state.valid_workers(ts)
        if valid is not None and not valid:
            if not ts.loose_restrictions:
                return None
            valid = None
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
        self._estimates.on_decided(ts, chosen, ws)
        self._history.add(ts.key, chosen.worker, candidates)
        self._metrics.add("placement.decisions")
        if (recording := self._metrics.recording) is not None:
            terms = chosen.terms
            recording.mark(
                "placement",
                key=str(ts.key),
                worker=chosen.worker,
                candidates=len(candidates),
                seconds=terms.seconds,
                moving=terms.moving,
                fits=bool(terms.fits),
            )
        return ws

    def _get_comm_cost(self, ts: SchedulerTask, ws: WorkerState) -> float:
        return self._estimates.fetch(self._estimates.inputs(ts), ws).seconds

    # ---- root tasks --------------------------------------------------------------------

    def _is_rootish(self, ts: SchedulerTask) -> bool:
        rootish: bool = self._originals["is_rootish"](ts)
        self._root, self._slot = ts if rootish else None, None
        return rootish

    def _decide_worker_rootish_queuing_enabled(self) -> WorkerState | None:
        ts, slot, self._root, self._slot = self._root, self._slot, None, None
        idle = self._state.idle_task_count
        if ts is None:
            return self._dasks("decide_worker_rootish_queuing_enabled")
        if not idle:
            self._roots.on_queued(ts)
            return None
        candidates = self._candidates.for_root(ts, idle, slot)
        if not candidates:
            return self._dasks("decide_worker_rootish_queuing_enabled")
        ws = self._decide(ts, candidates, idle)
        self._roots.on_started(ts, self._available.home(ws))
        return ws

    def _decide_worker_rootish_queuing_disabled(self, ts: SchedulerTask) -> WorkerState | None:
        group, state = ts.group, self._state
        if not (ws := group.last_worker) or ws not in self._available or not group.last_worker_tasks_left:
            candidates = self._candidates.for_root(ts, state.running)
            if candidates:
                ws = self._decide(ts, candidates, state.running)
                # Dask's own method then continues with this worker for the batch, and does the accounting.
                group.last_worker = ws
                share = floor(len(group) / state.total_nthreads * ws.nthreads)
                group.last_worker_tasks_left = max(1, share)
        return self._dasks("decide_worker_rootish_queuing_disabled", ts)

    def _stimulus_queue_slots_maybe_opened(self, *, stimulus_id: str) -> None:
        state = self._state
        self._candidates.on_graph_placed()
        if not state.queued:
            return
        for ws in self._idle.some_excluded():
            state.check_idle_saturated(ws)
        while state.queued and state.idle_task_count:
            ts = self._next_root()
            state.transitions({ts.key: "processing"}, stimulus_id)
            if ts.state == "queued":
                return

    def _next_root(self) -> SchedulerTask:
        self._slot = slot = self._idle.slot()
        self._root = root = (
            self._roots.next(self._available.home(slot)) if slot is not None else self._state.queued.peek()
        )
        return root

    def _check_idle_saturated(self, ws: WorkerState, occ: float = -1.0) -> None:
        self._originals["check_idle_saturated"](ws, occ)
        self._idle.check(ws)

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
        found = self._thief(ts, victim, potential_thieves, lambda ws: occupancies[ws] + in_flight.get(ws, 0))
        if found is None:
            return None
        ws, candidate = found
        stays = self._estimates.cost(self._estimates.demand(ts), victim)
        self._history.add(ts.key, candidate.worker, [stays, candidate])
        return ws

    def _thief(
        self,
        ts: SchedulerTask,
        victim: WorkerState,
        thieves: Collection[WorkerState],
        occupancy: Callable[[WorkerState], float],
    ) -> tuple[WorkerState, Candidate] | None:
        """Return the nearest worker with free memory that would finish a task earlier; None if there is none.

        Parameters
        ----------
        victim
            The worker that has the task.
        thieves
            The workers that may steal it.
        occupancy
            Returns the work of a worker in seconds; tasks being stolen count for the thief.
        """
        demand = self._estimates.demand(ts)
        wait = occupancy(victim) / victim.nthreads
        for name in self._available.neighbourhoods(victim):
            least_loaded = self._available.least_loaded(name, MAX_THIEVES_LOOKED_UP)
            near = (ws for ws in least_loaded if ws in thieves and ws is not victim)
            found = {ws.address: ws for ws in islice(near, MAX_THIEVES)}
            costs = [
                self._estimates.cost(demand, ws).after(occupancy(ws) / ws.nthreads) for ws in found.values()
            ]
            fitting = [candidate for candidate in costs if candidate.terms.fits]
            if fitting and (candidate := cost.best(fitting)).terms.seconds < wait:
                return found[candidate.worker], candidate
        return None


def _is_ready(ts: SchedulerTask) -> bool:
    """Return whether a released task has inputs, and all of them are in memory."""
    return ts.state == "released" and bool(ts.dependencies) and all([dts.who_has for dts in ts.dependencies])
