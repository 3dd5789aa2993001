"""Select the candidates for a task: workers that hold its inputs, those of its siblings, and few others.

The siblings of a root task are the tasks whose results will be needed together with its own.

Decisions and their figures: ``docs/decisions/placement.md`` and ``docs/decisions/scheduler.md``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import partial
from heapq import nsmallest
from itertools import islice

from dask_gpurt.dask_hooks.types import SchedulerState, SchedulerTask, WorkerState
from dask_gpurt.placement import cost
from dask_gpurt.placement.available import MAX_FAR_WORKERS, AvailableWorkers
from dask_gpurt.placement.cost import Candidate
from dask_gpurt.placement.estimates import Demand, Estimates, is_alias

#: How many holders of inputs are compared, those with the most bytes, and how many holders of one input.
MAX_HOLDERS, MAX_REPLICAS = 4, 4
#: The assumed size of an unknown result: enough to keep siblings together, too small to outweigh a task.
UNKNOWN_RESULT_BYTES = 1 << 20
#: Tasks with more inputs have no siblings: these lie on many workers wherever each of them is.
MAX_SIBLINGS = 16
#: The longest chain of single inputs that is followed.
MAX_CHAIN = 4


class CandidateSelector:
    """Select the candidates for a task, and estimate its cost on each."""

    def __init__(self, state: SchedulerState, estimates: Estimates, available: AvailableWorkers):
        self._state = state
        self._estimates = estimates
        self._available = available

    def for_task(self, ts: SchedulerTask, valid: Collection[WorkerState] | None) -> list[Candidate]:
        """Return the costs of a task on holders of its inputs and, if it would wait there, on an idler one.

        Parameters
        ----------
        valid
            The running workers that the task may run on; None for all running workers.
        """
        allowed = self._state.running if valid is None else valid
        demand = self._estimates.demand(ts)
        estimate = partial(self._estimates.cost, demand)
        if len(allowed) == 1:
            return [estimate(ws) for ws in allowed]
        found = [estimate(ws) for ws in self._holders(demand) if ws in allowed]
        if found and is_alias(ts):  # an alias needs no additional memory where its data are
            return found
        first = cost.best(found) if found else None
        if first is not None and first.waiting > 0:
            idler = self._idler(first, allowed)
            if idler is not None and self._pays(other := estimate(idler), first):
                found.append(other)
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

    def _idler(self, first: Candidate, allowed: Collection[WorkerState]) -> WorkerState | None:
        """Return the least loaded worker, if it has less load than the best holder."""
        ws = next(self._available.least_loaded(1), None)
        if ws is None or len(ws.processing) / ws.nthreads >= first.load or ws not in allowed:
            return None
        return ws

    def _pays(self, candidate: Candidate, holder: Candidate) -> bool:
        """Return whether it pays to move inputs away from their holder.

        Durations are uncertain, so moving may take no longer than the task itself: that is the most that can
        be gained where the estimate of the wait is wrong.
        """
        return candidate.moving - holder.moving <= holder.running and candidate.seconds < holder.seconds

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
        """Return the costs of a root task on the least loaded worker, and on that of one of its siblings.

        Empty if none of these has free memory. Results of siblings will be needed together, so away from its
        sibling the cost includes the time to move its result there.

        Parameters
        ----------
        open_to
            The workers that accept root tasks now.
        """
        ws = self._available.least_loaded_of(open_to)
        if ws is None:
            return []
        demand = self._estimates.demand(ts)
        idlest = self._estimates.cost(demand, ws)
        near = anchor(ts) if len(open_to) > 1 else None
        if near is None or near is ws or near not in open_to or near not in self._available:
            return [idlest]
        nbytes = demand.nbytes or UNKNOWN_RESULT_BYTES
        idlest = idlest._replace(moving=self._estimates.seconds_between(ws, near, nbytes))
        return [idlest, self._estimates.cost(demand, near)]


# ---- siblings ------------------------------------------------------------------------------------------


def anchor(ts: SchedulerTask) -> WorkerState | None:
    """Return the worker of a sibling of a task; None if no sibling has a worker yet."""
    return next((ws for sibling in siblings(ts) if (ws := _worker_of(sibling)) is not None), None)


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
        if len(ts.dependencies) != 1 or _worker_of(ts):
            break
        ts = next(iter(ts.dependencies))
    return ts


def _worker_of(ts: SchedulerTask) -> WorkerState | None:
    """Return a worker that has the result of a task, or will have it."""
    if ts.processing_on is not None:
        return ts.processing_on
    return next(iter(ts.who_has), None) if ts.who_has else None
