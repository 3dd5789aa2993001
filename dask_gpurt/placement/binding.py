"""Placement on a scheduler: our choices in the place of Dask's, on one instance, and taken back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import floor
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks.scheduler import Overrides, Unsuitable
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import stealing
from dask_gpurt.placement.chooser import Chooser
from dask_gpurt.placement.cost import Candidate, best
from dask_gpurt.placement.families import Families
from dask_gpurt.placement.gate import Gate
from dask_gpurt.placement.headroom import Headroom
from dask_gpurt.placement.history import MOST_KEYS, History
from dask_gpurt.placement.memory_manager import MemoryManager
from dask_gpurt.placement.outputs import Inputs, sites
from dask_gpurt.placement.owners import assign
from dask_gpurt.topology import Topology


class Placement:
    """Our choices on a scheduler of Dask's, or on a bare ``SchedulerState`` whose class has a ``__dict__``.

    Whoever drives the state tells of what Dask has no seam for: :meth:`submitted`, :meth:`ended`,
    :meth:`told`, :meth:`changed` and :meth:`left`. What raises, and what has parameters that we do not
    know, is decided by Dask.

    A bare state has no ``stimulus_queue_slots_maybe_opened``: give its class that method, with Dask's body,
    and call it after each event, as Dask does. It needs ``transitions(recommendations, stimulus_id)``.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``; if it has the extensions ``stealing`` and ``amm``, these follow too.
    topology
        Where workers are. It may learn that before or after Dask does, see :meth:`changed`.
    headroom
        What room they have.
    metrics
        Counts decisions and fallbacks.
    history
        The most keys whose last decision is remembered.

    Examples
    --------
    >>> placement = Placement(state, topology, headroom, Metrics())  # doctest: +SKIP
    >>> placement.bind()  # doctest: +SKIP
    >>> state.transitions({"x": "processing"}, "start")  # doctest: +SKIP
    >>> placement.explain("x")  # doctest: +SKIP
    """

    def __init__(
        self,
        state: Any,
        topology: Topology,
        headroom: Headroom,
        metrics: Metrics,
        history: int = MOST_KEYS,
    ):
        self._state = state
        self._topology = topology
        self._headroom = headroom
        self._metrics = metrics
        self._chooser = Chooser(state, topology, headroom)
        self._gate = Gate(state, self._chooser)
        self._families = Families(state)
        self._history = History(history)
        #: The root task that Dask is about to ask a worker for; it does not say which. And who has a slot.
        self._root: Any = None
        self._slot: Any = None
        self._overrides = Overrides(lambda name, why: metrics.fallback(f"placement.{name}", why))
        self._originals = self._overrides.originals

    # ---- on and off --------------------------------------------------------------------

    def bind(self) -> None:
        """Take over; workers and tasks may be there already."""
        self._overrides.scheduler(self._state, lambda name: getattr(self, f"_{name}"))
        if (extension := self._state.extensions.get("stealing")) is not None:
            self._overrides.stealing(extension, lambda name: getattr(self, name))
        if (manager := self._state.extensions.get("amm")) is not None:
            ours = MemoryManager(manager, self._state, self._topology, self._headroom, self._metrics)
            ours.bind(self._overrides)
        for ws in list(self._state.workers.values()):
            self._state.check_idle_saturated(ws)
        for ts in list(self._state.queued.sorted()):
            self._families.queued(ts)

    def unbind(self) -> None:
        """Give Dask back as shipped."""
        self._overrides.restore()
        for ws in list(self._state.workers.values()):
            self._state.check_idle_saturated(ws)

    # ---- what has happened -------------------------------------------------------------

    def submitted(self, keys: Iterable[Key]) -> None:
        """A graph has come, and none of its tasks has been placed yet."""
        self._overrides.guarded("submitted", self._submitted, lambda _: None)(keys)

    def _submitted(self, keys: Iterable[Key]) -> None:
        found = [ts for key in keys if (ts := self._state.tasks.get(key)) is not None and _is_ready(ts)]
        rootish = self._originals["is_rootish"]
        self._chooser.arrived([ts for ts in found if not rootish(ts)])

    def ended(self, key: Key, worker: str | None = None, seconds: float = 0.0) -> None:
        """A task is no longer on a worker; Dask has counted that already.

        Parameters
        ----------
        worker, seconds
            Who has done it, and the work that it took; without these it has not been done.
        """
        self._chooser.ended(key)
        ts = self._state.tasks.get(key)
        if ts is not None and worker is not None:
            self._chooser.estimates.finished(ts, worker, seconds)

    def told(self, worker: str) -> None:
        """A worker has told what room it has now."""
        ws = self._state.workers.get(worker)
        if ws is not None:
            self._chooser.estimates.told(ws)
            self._look_at(ws)

    def changed(self, worker: str) -> None:
        """The place of a worker is another than before."""
        ws = self._state.workers.get(worker)
        if ws is not None:
            self._chooser.look_anew(ws)
            self._look_at(ws)

    def _look_at(self, ws: Any) -> None:
        """Have Dask and the gate judge a worker again, and the queue move."""
        if ws in self._state.running:
            self._state.check_idle_saturated(ws)
            self._open_queue("gpurt-room")

    def left(self, worker: str) -> None:
        """Dask has removed a worker."""
        self._chooser.forget(worker)
        self._gate.forget(worker)
        self._gate.let_in()
        self._open_queue("gpurt-left")

    def _open_queue(self, stimulus_id: str) -> None:
        if self._state.queued and self._state.idle_task_count:
            self._state.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)

    def explain(self, key: Key) -> list[dict[str, Any]]:
        """A row for each candidate of the last decision about a key, see :class:`History`."""
        return self._history.explain(key)

    # ---- tasks with inputs, and all that Dask does not queue -------------------------------

    def _decide_worker_non_rootish(self, ts: Any) -> Any:
        state = self._state
        self._chooser.placing(ts)
        if not state.running or ts.actor:
            return self._originals["decide_worker_non_rootish"](ts)
        valid = state.valid_workers(ts)
        if valid is not None and not valid:
            if not ts.loose_restrictions:
                return None
            valid = None
        if ts.dependencies or valid is not None:
            candidates = self._chooser.candidates(ts, valid)
        else:
            candidates = self._chooser.root_candidates(ts, state.running)
        if not candidates:
            return self._originals["decide_worker_non_rootish"](ts)
        return self._take(ts, candidates, state.running if valid is None else valid)

    def _take(self, ts: Any, candidates: list[Candidate], allowed: Any) -> Any:
        """The worker of the best candidate; the decision is remembered."""
        chosen = best(candidates) if len(candidates) > 1 else candidates[0]
        ws = self._state.workers.get(chosen.worker)
        if ws is None or ws not in allowed:
            raise Unsuitable(f"{chosen.worker} was chosen for {ts.key!r} but may not run it")
        self._chooser.estimates.took(ts, chosen, ws)
        self._history.add(ts.key, chosen.worker, candidates)
        self._metrics.add("placement.decisions")
        return ws

    def _get_comm_cost(self, ts: Any, ws: Any) -> float:
        estimates = self._chooser.estimates
        return estimates.inputs(estimates.needs(ts), ws)[1]

    # ---- shuffles ----------------------------------------------------------------------

    def owners(self, barrier: Any, chosen: dict[int, str]) -> dict[int, str]:
        """The owner of each output of a shuffle, see :mod:`dask_gpurt.placement.owners`.

        Parameters
        ----------
        barrier
            The task that waits for all its transfers.
        chosen
            What Dask has chosen. Ours begin where these do, so that small shuffles take turns.
        """
        guarded = self._overrides.guarded("owners", self._owners, lambda _, chosen: chosen)
        found: dict[int, str] = guarded(barrier, chosen)
        return found

    def _owners(self, barrier: Any, chosen: dict[int, str]) -> dict[int, str]:
        valid = self._state.valid_workers(barrier)
        workers = sorted(self._state.running if valid is None else valid, key=lambda ws: ws.address)
        if not workers or not chosen:
            return chosen
        first = bisect_left([ws.address for ws in workers], chosen[min(chosen)])
        inputs = Inputs(barrier)
        found = sites(inputs, workers[first:] + workers[:first], self._chooser.estimates)
        self._metrics.add("placement.shuffles")
        return assign(chosen, found, inputs.nbytes)

    # ---- root tasks --------------------------------------------------------------------

    def _is_rootish(self, ts: Any) -> bool:
        rootish: bool = self._originals["is_rootish"](ts)
        self._root, self._slot = ts if rootish else None, None
        return rootish

    def _decide_worker_rootish_queuing_enabled(self) -> Any:
        ts, slot, self._root, self._slot = self._root, self._slot, None, None
        idle = self._state.idle_task_count
        if ts is None:
            return self._originals["decide_worker_rootish_queuing_enabled"]()
        if not idle:
            self._families.queued(ts)
            return None
        candidates = self._chooser.root_candidates(ts, idle, slot)
        if not candidates:
            return self._originals["decide_worker_rootish_queuing_enabled"]()
        ws = self._take(ts, candidates, idle)
        self._families.started(ts, self._chooser.home(ws))
        return ws

    def _decide_worker_rootish_queuing_disabled(self, ts: Any) -> Any:
        group, state = ts.group, self._state
        if (
            not (ws := group.last_worker)
            or not self._chooser.has_room(ws)
            or not group.last_worker_tasks_left
        ):
            candidates = self._chooser.root_candidates(ts, state.running)
            if candidates:
                ws = self._take(ts, candidates, state.running)
                # Dask goes on with the worker of the batch, and does the accounting.
                group.last_worker = ws
                share = floor(len(group) / state.total_nthreads * ws.nthreads)
                group.last_worker_tasks_left = max(1, share)
        return self._originals["decide_worker_rootish_queuing_disabled"](ts)

    def _stimulus_queue_slots_maybe_opened(self, *, stimulus_id: str) -> None:
        state = self._state
        self._chooser.settle()
        if not state.queued:
            return
        for ws in self._gate.look_again():
            state.check_idle_saturated(ws)
        while state.queued and state.idle_task_count:
            ts = self._next_root()
            state.transitions({ts.key: "processing"}, stimulus_id)
            if ts.state == "queued":
                return

    def _next_root(self) -> Any:
        self._slot = slot = self._gate.slot()
        self._root = (
            self._families.next(self._chooser.home(slot)) if slot is not None else self._state.queued.peek()
        )
        return self._root

    def _check_idle_saturated(self, ws: Any, occ: float = -1.0) -> None:
        self._originals["check_idle_saturated"](ws, occ)
        self._gate.check(ws)

    # ---- stealing ----------------------------------------------------------------------

    def _get_thief(self, scheduler: Any, ts: Any, potential_thieves: set[Any], *, occupancies: Any) -> Any:
        if ts.actor:
            return self._originals["_get_thief"](scheduler, ts, potential_thieves, occupancies=occupancies)
        valid = scheduler.valid_workers(ts)
        if valid is not None and ((able := potential_thieves & valid) or not ts.loose_restrictions):
            potential_thieves = able
        in_flight = scheduler.extensions["stealing"].in_flight_occupancy
        found = stealing.thief(
            self._chooser, ts, potential_thieves, lambda ws: occupancies[ws] + in_flight.get(ws, 0)
        )
        if found is None:
            return None
        ws, candidate = found
        estimates = self._chooser.estimates
        stays = estimates.cost(estimates.demand(ts), ts.processing_on)
        self._history.add(ts.key, candidate.worker, [stays, candidate])
        return ws


def _is_ready(ts: Any) -> bool:
    """Whether a task that nobody has asked for yet has inputs, and all are there."""
    return ts.state == "released" and bool(ts.dependencies) and all([dts.who_has for dts in ts.dependencies])
