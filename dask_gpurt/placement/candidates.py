"""Select the workers that are compared for a task: those with its inputs, and a bounded few around them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from heapq import nsmallest

from dask.typing import Key

from dask_gpurt.dask_hooks.types import SchedulerState, SchedulerTask, TaskGroup, WorkerState
from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import Candidate
from dask_gpurt.placement.estimates import Estimates, InputRef, is_alias
from dask_gpurt.placement.free_memory import Headroom
from dask_gpurt.placement.queueing import (
    EVERYWHERE,
    MAX_FAR_WORKERS,
    AvailableWorkers,
    siblings,
    worker_of,
)
from dask_gpurt.topology import Topology

#: Holders of inputs that are compared, those with the most bytes.
MAX_HOLDERS = 4
#: The least loaded workers of each neighbourhood that are compared.
MAX_NEAR_WORKERS = 2
#: Bytes of a result that is not known: enough to keep siblings together, too few to outweigh a task.
UNKNOWN_RESULT_BYTES = 1 << 20
#: The least gain, in seconds, for which inputs move.
MIN_GAIN_S = 0.05
#: Seconds of a move that are neglected: the scheduler spends a part of that on a task.
NEGLIGIBLE_MOVE_S = 0.001
#: The relative error of a predicted wait.
WAIT_ERROR = 1 / 3


class CandidateSelector:
    """Select the workers that are compared for a task, and estimate its cost on them.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    topology
        Where the workers are, and how fast the links between them are.
    headroom
        Free memory of the workers.

    Attributes
    ----------
    estimates
        The costs.
    available
        The running workers with free memory.
    """

    def __init__(self, state: SchedulerState, topology: Topology, headroom: Headroom):
        self._state = state
        self._topology = topology
        self.estimates = Estimates(state, topology, headroom)
        self.available = AvailableWorkers(state, topology, self.estimates)

    # ---- events ------------------------------------------------------------------------

    def on_place_changed(self, ws: WorkerState) -> None:
        """Look up the place of a worker again, and routes with it."""
        if self.available.has_moved(ws):
            self.estimates.routes.clear()
            self.estimates.shard_routes.clear()

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that Dask has removed."""
        self.available.discard(worker)
        self.estimates.on_worker_removed(worker)

    def on_graph(self, tasks: Iterable[SchedulerTask]) -> None:
        """Count tasks of a new graph whose inputs are all there on the workers with most of these.

        Dask places the tasks of a graph one by one. Without this a worker whose own tasks come last would
        look idle until then.
        """
        self.on_graph_placed()
        for ts in tasks:
            valid, demand = self._state.valid_workers(ts), self.estimates.demand(ts)
            holders = self._holders(demand.inputs)
            home = next((ws for ws in holders if valid is None or ws in valid), None)
            if home is not None:
                self.estimates.on_arriving(ts, demand, home.address)
                self._check(home.address)

    def on_placing(self, ts: SchedulerTask) -> None:
        """Stop counting a task that is about to be placed."""
        self._check(self.estimates.arrivals.remove(ts.key))

    def on_graph_placed(self) -> None:
        """Stop counting tasks of a graph: all that could be placed have been."""
        if self.estimates.arrivals:
            for address in self.estimates.arrivals.clear():
                self._check(address)

    def on_task_ended(self, key: Key) -> None:
        """Forget a task that is no longer on its worker."""
        self._check(self.estimates.on_task_ended(key))

    def _check(self, worker: str | None) -> None:
        ws = self._state.workers.get(worker) if worker is not None else None
        if ws is not None and ws in self._state.running:
            self.available.check(ws)

    # ---- tasks with inputs -------------------------------------------------------------

    def for_task(self, ts: SchedulerTask, valid: Collection[WorkerState] | None) -> list[Candidate]:
        """Return the costs of a task where its inputs are, and on a few workers near to them.

        Parameters
        ----------
        valid
            The running workers that it may run on; None for all that run.
        """
        allowed = self._state.running if valid is None else valid
        demand = self.estimates.demand(ts)
        estimate = partial(self.estimates.cost, demand)
        if len(allowed) == 1:
            return [estimate(ws) for ws in allowed]
        holders = [ws for ws in self._holders(demand.inputs) if ws in allowed]
        found = {ws.address: estimate(ws) for ws in holders}
        if found and is_alias(ts):  # its data are there already, whichever worker has free memory
            return list(found.values())
        if found:
            if len(found) > 1:
                most = _with_most_inputs(found.values())
                found = {worker: each for worker, each in found.items() if self._is_no_worse(each, most)}
            first = cost.best(found.values())
            forced = not first.terms.fits or _waits_for_inputs(first)
            if forced or (_is_late(first) and self._may_move(ts)):
                near = [estimate(ws) for ws in self._near(holders[0], first) if ws in allowed]
                found.update((each.worker, each) for each in near if forced or self._pays(each, first))
        if not any(candidate.terms.fits for candidate in found.values()):
            found.update((ws.address, estimate(ws)) for ws in self._far(allowed))
        return list(found.values())

    def _holders(self, inputs: Collection[InputRef]) -> list[WorkerState]:
        """Return the workers with the most bytes of inputs; of equal ones those with the least work first."""
        held: defaultdict[str, int] = defaultdict(int)
        for _, nbytes, tiers in inputs:
            for address in tiers:
                held[address] += nbytes
        found = [self._state.workers[address] for address in held]
        if len(found) > 1:
            found.sort(key=lambda ws: (held[ws.address], -ws.occupancy, ws.address), reverse=True)
        return found[:MAX_HOLDERS]

    def _may_move(self, ts: SchedulerTask) -> bool:
        """Return whether inputs may be moved only to run a task earlier.

        Not while the duration of such tasks is unknown: stealing corrects that. And not while root tasks are
        queued, since then no worker is idle for long.
        """
        return ts.prefix.duration_average >= 0 and not self._state.queued

    def _is_no_worse(self, holder: Candidate, most: Candidate) -> bool:
        """Return whether a holder moves no more bytes than the one with the most inputs, or the move pays."""
        return holder.missing <= most.missing or self._pays(holder, most)

    def _pays(self, candidate: Candidate, holder: Candidate) -> bool:
        """Return whether moving inputs takes no longer than it gains over running where they are.

        Bytes that are on their way before these arrive while other tasks run, and connecting two workers pays
        for all later transfers, too: neither counts. Durations are uncertain, so the gain has to be
        at least ``MIN_GAIN_S``, and a share of the wait that remains: which worker will be idle first is not
        known, and that one may still steal the task. For a short task half of its duration will do, where the
        inputs move in no time.
        """
        before = self.estimates.seconds_inbound(self._state.workers[candidate.worker])
        alone = candidate.terms.moving - (before if candidate.missing else 0.0)
        connecting = self.estimates.routes.connection_setup(holder.worker, candidate.worker)
        running = holder.terms.running
        gain = holder.terms.seconds - candidate.terms.seconds
        least = min(running / 2, MIN_GAIN_S) if alone <= NEGLIGIBLE_MOVE_S else MIN_GAIN_S
        enough = max(least, WAIT_ERROR * candidate.terms.waiting)
        return alone - connecting - holder.terms.moving <= running + holder.terms.room and gain >= enough

    def _near(self, holder: WorkerState, first: Candidate) -> Iterator[WorkerState]:
        """Yield workers around a holder with less to do than the best one so far, and than any nearer one."""
        least = first.load if first.terms.fits else math.inf
        for name in self.available.neighbourhoods(holder):
            lowest = self.available.lowest_load(name)
            if lowest is not None and lowest < least:
                least = lowest
                yield from self.available.least_loaded(name, MAX_NEAR_WORKERS)

    def _far(self, allowed: Collection[WorkerState]) -> Collection[WorkerState]:
        """Return a few workers for a task without inputs, or with inputs around which it fits nowhere."""
        if len(allowed) <= MAX_FAR_WORKERS:
            return allowed
        found = [ws for ws in self.available.least_loaded(EVERYWHERE, MAX_FAR_WORKERS) if ws in allowed]
        return found or nsmallest(
            MAX_FAR_WORKERS, allowed, key=lambda ws: (len(ws.processing) / ws.nthreads, ws.address)
        )

    # ---- root tasks ----------------------------------------------------------------------

    def for_root(
        self, ts: SchedulerTask, open_to: Collection[WorkerState], slot: WorkerState | None = None
    ) -> list[Candidate]:
        """Return the costs of a root task, which should run near the tasks that it will be needed with.

        Parameters
        ----------
        open_to
            The workers that take root tasks now.
        slot
            The one of these with the least to do, if it is known.
        """
        slot = slot or self.available.least_loaded_of(open_to)
        demand = self.estimates.demand(ts)
        if len(open_to) == 1 and slot is not None:
            return [self.estimates.cost(demand, slot)]
        anchor = next((ws for sibling in siblings(ts) if (ws := worker_of(sibling))), None)
        nbytes = int(demand.nbytes) or UNKNOWN_RESULT_BYTES
        found = [self.estimates.cost(demand, ws) for ws in self._open_near(anchor, open_to, slot)]
        waits = anchor is not None and any([each.terms.waiting for each in found])
        if waits and self._fills_all_slots(ts.group):
            found = [each.after(0.0) if each.terms.waiting else each for each in found]
        return [self._with_move_to(anchor, each, nbytes) for each in found]

    def _fills_all_slots(self, group: TaskGroup) -> bool:
        """Return whether root tasks of a group take all slots of Dask's queue.

        Then one of them waits in each slot, and to wait near a sibling costs nothing.
        """
        saturation, states = self._state.WORKER_SATURATION, group.states
        if math.isinf(saturation):  # there is no queue
            return False
        over = states["memory"] + states["erred"] + states["forgotten"]
        if group.stop:  # until the first task has ended, released tasks have not begun
            over += states["released"]
        slots = math.ceil(saturation) * self._state.total_nthreads
        return bool(len(group) - over >= slots)

    def _open_near(
        self, anchor: WorkerState | None, open_to: Collection[WorkerState], slot: WorkerState | None
    ) -> Collection[WorkerState]:
        """Return, of the open workers, the anchor, the least loaded ones around it, and that of all."""
        found: dict[WorkerState, None] = {}
        if anchor is not None:
            if anchor in open_to and anchor in self.available:
                found[anchor] = None
            near = (
                [ws for ws in self.available.least_loaded(name, MAX_NEAR_WORKERS) if ws in open_to]
                for name in self.available.neighbourhoods(anchor)
            )
            found.update(dict.fromkeys(next(filter(None, near), ())))
        if slot is not None:
            found[slot] = None
        return found

    def _with_move_to(self, anchor: WorkerState | None, candidate: Candidate, nbytes: int) -> Candidate:
        """Add the time that the result will take to the worker of a sibling."""
        if anchor is None or anchor.address == candidate.worker:
            return candidate
        seconds = self._topology.seconds(candidate.worker, anchor.address, nbytes, by_comms=True)
        return candidate._replace(terms=candidate.terms._replace(moving=candidate.terms.moving + seconds))


def _with_most_inputs(holders: Iterable[Candidate]) -> Candidate:
    """Return the holder for which the fewest bytes move, of those that the task fits on if there are any."""
    return min(holders, key=lambda each: (not each.terms.fits, each.missing, cost.rank(each)))


def _is_late(candidate: Candidate) -> bool:
    """Return whether another worker could run a task earlier, wherever its inputs are."""
    waiting, _, moving, room, _ = candidate.terms
    return waiting > 0 or moving > 0 or room > 0


def _waits_for_inputs(candidate: Candidate) -> bool:
    """Return whether inputs have to come, and that takes longer than the work before the task."""
    return candidate.missing > 0 and candidate.terms.moving > candidate.terms.waiting
