"""Select the candidates for a task: workers that hold its inputs, and a bounded number near them."""

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

#: How many holders of inputs are compared, those with the most bytes.
MAX_HOLDERS = 4
#: How many of the least loaded workers of each neighbourhood are compared.
MAX_NEAR_WORKERS = 2
#: The assumed size of an unknown result: enough to keep siblings together, too small to outweigh a task.
UNKNOWN_RESULT_BYTES = 1 << 20
#: The smallest gain for which inputs move, in seconds.
MIN_GAIN_S = 0.05
#: Shorter moves count as free, in seconds: the scheduler's overhead for a task is of this order.
NEGLIGIBLE_MOVE_S = 0.001
#: The assumed relative error of a predicted wait.
WAIT_ERROR = 1 / 3


class CandidateSelector:
    """Select the candidates for a task, and estimate its cost on each.

    Parameters
    ----------
    state
        Dask's ``SchedulerState``.
    topology
        The places of workers and the speeds of links.
    headroom
        Free memory of the workers.

    Attributes
    ----------
    estimates
        Estimates the costs.
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
        """Drop the cached routes if the neighbourhoods of a worker have changed."""
        if self.available.has_moved(ws):
            self.estimates.routes.clear()

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that Dask has removed."""
        self.available.discard(worker)
        self.estimates.on_worker_removed(worker)

    def on_graph(self, tasks: Iterable[SchedulerTask]) -> None:
        """Count the ready tasks of a new graph as arriving at the workers that hold most of their inputs.

        Dask places the tasks of a graph one by one. Without these arrivals a worker would look idle until its
        own tasks are placed.
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
        """Stop counting arrivals: every task of the graph that could be placed has been placed."""
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
        """Return the costs of a task on holders of its inputs and, if it may pay, on a few workers near them.

        Parameters
        ----------
        valid
            The running workers that the task may run on; None for all running workers.
        """
        allowed = self._state.running if valid is None else valid
        demand = self.estimates.demand(ts)
        estimate = partial(self.estimates.cost, demand)
        if len(allowed) == 1:
            return [estimate(ws) for ws in allowed]
        holders = [ws for ws in self._holders(demand.inputs) if ws in allowed]
        found = {ws.address: estimate(ws) for ws in holders}
        if found and is_alias(ts):  # an alias needs no additional memory where its data are
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
        """Return the workers with the most bytes of inputs; ties are broken by the least work."""
        held: defaultdict[str, int] = defaultdict(int)
        for _, nbytes, tiers in inputs:
            for address in tiers:
                held[address] += nbytes
        found = [self._state.workers[address] for address in held]
        if len(found) > 1:
            found.sort(key=lambda ws: (held[ws.address], -ws.occupancy, ws.address), reverse=True)
        return found[:MAX_HOLDERS]

    def _may_move(self, ts: SchedulerTask) -> bool:
        """Return whether inputs may be moved just to run a task earlier.

        Not while the duration of such tasks is unknown: work stealing can correct the choice later. Not while
        root tasks are queued either, since then no worker is idle for long.
        """
        return ts.prefix.duration_average >= 0 and not self._state.queued

    def _is_no_worse(self, holder: Candidate, most: Candidate) -> bool:
        """Return whether a holder lacks no more bytes than the one with most inputs, or moving them pays."""
        return holder.missing <= most.missing or self._pays(holder, most)

    def _pays(self, candidate: Candidate, holder: Candidate) -> bool:
        """Return whether moving inputs to a candidate pays, compared with running on their holder.

        Neither bytes already in flight count, which arrive while other tasks run, nor connection setup, which
        benefits later transfers too. Durations are uncertain, so the gain must be at least ``MIN_GAIN_S`` and
        a share of the remaining wait: which worker will be idle first is unknown, and that worker may still
        steal the task. If moving is almost free, half of the duration of a short task suffices.
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
        """Yield workers around a holder with less load than the best candidate and all nearer workers."""
        least = first.load if first.terms.fits else math.inf
        for name in self.available.neighbourhoods(holder):
            lowest = self.available.lowest_load(name)
            if lowest is not None and lowest < least:
                least = lowest
                yield from self.available.least_loaded(name, MAX_NEAR_WORKERS)

    def _far(self, allowed: Collection[WorkerState]) -> Collection[WorkerState]:
        """Return a few workers anywhere, for a task without inputs or without memory near its inputs."""
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
        """Return the costs of a root task, which should run near its siblings.

        Parameters
        ----------
        open_to
            The workers that accept root tasks now.
        slot
            The least loaded of these workers, if known.
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
        """Return whether root tasks of a group fill all slots of Dask's queue.

        If so, every slot has a waiting task, and waiting near a sibling costs nothing extra.
        """
        saturation, states = self._state.WORKER_SATURATION, group.states
        if math.isinf(saturation):  # there is no queue
            return False
        over = states["memory"] + states["erred"] + states["forgotten"]
        if group.stop:  # before the first task has ended, released tasks are those that have not started
            over += states["released"]
        slots = math.ceil(saturation) * self._state.total_nthreads
        return bool(len(group) - over >= slots)

    def _open_near(
        self, anchor: WorkerState | None, open_to: Collection[WorkerState], slot: WorkerState | None
    ) -> Collection[WorkerState]:
        """Return the anchor, the least loaded workers around it, and the slot, as far as they are open."""
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
        """Add the time to move the result to the worker of a sibling."""
        if anchor is None or anchor.address == candidate.worker:
            return candidate
        seconds = self._topology.seconds(candidate.worker, anchor.address, nbytes, by_comms=True)
        return candidate._replace(terms=candidate.terms._replace(moving=candidate.terms.moving + seconds))


def _with_most_inputs(holders: Iterable[Candidate]) -> Candidate:
    """Return the holder that lacks the fewest bytes, preferring holders with enough memory."""
    return min(holders, key=lambda each: (not each.terms.fits, each.missing, cost.rank(each)))


def _is_late(candidate: Candidate) -> bool:
    """Return whether a task could start earlier on another worker."""
    waiting, _, moving, room, _ = candidate.terms
    return waiting > 0 or moving > 0 or room > 0


def _waits_for_inputs(candidate: Candidate) -> bool:
    """Return whether a task would wait for missing inputs longer than for the tasks before it."""
    return candidate.missing > 0 and candidate.terms.moving > candidate.terms.waiting
