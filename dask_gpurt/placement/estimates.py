"""Estimate the cost of a task on a worker, from the state of Dask's scheduler and reports of free memory.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from dask_gpurt.dask_hooks.scheduler import network_occupancy, prefix_duration
from dask_gpurt.dask_hooks.types import Alias, SchedulerState, SchedulerTask, TaskPrefix, WorkerState
from dask_gpurt.memory.ledger import ClusterMemory, FreeMemory
from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import Candidate, End, Routes
from dask_gpurt.topology import Topology

# ---- free memory ---------------------------------------------------------------------------------------


class Headroom(Protocol):
    """Look up the reported free memory of all workers.

    Each decision calls this several times, so implementations only use state on the scheduler.
    """

    def free_memory(self, worker: str) -> FreeMemory:
        """Return the free memory of a worker."""


class LedgerHeadroom:
    """Look up free memory in the workers' ledgers, or in Dask's counts for a worker without a ledger."""

    def __init__(self, ledgers: ClusterMemory, workers: Mapping[str, WorkerState]):
        self._ledgers = ledgers
        self._workers = workers

    def free_memory(self, worker: str) -> FreeMemory:
        """Return the free memory of a worker; infinite if it has left or has no memory limit."""
        return self._ledgers.room(worker) or self._known_to_dask(worker)

    def _known_to_dask(self, worker: str) -> FreeMemory:
        state = self._workers.get(worker)
        if not state or not state.memory_limit:
            return FreeMemory(math.inf)
        return FreeMemory(state.memory_limit - state.nbytes, live=state.memory_limit)


# ---- costs ---------------------------------------------------------------------------------------------


class InputRef(NamedTuple):
    """Refer to an input of a task.

    ``source``: the one of them that is assumed to send it.
    """

    ts: SchedulerTask
    nbytes: int
    holders: AbstractSet[WorkerState]
    source: End


class Demand(NamedTuple):
    """Describe what a task needs on any worker. Computed once for all candidates.

    ``working_set``: the bytes of its inputs and its result, which must be live on its worker at the same
    time.
    """

    inputs: Sequence[InputRef]
    seconds: float
    nbytes: float
    working_set: float


class Estimates:
    """Estimate the costs of tasks on workers."""

    def __init__(self, state: SchedulerState, topology: Topology, headroom: Headroom):
        self._state = state
        self._headroom = headroom
        self.routes = Routes(topology)
        #: Expected seconds per byte in flight to each worker, from the costs of the latest decisions.
        self._inbound_seconds_per_byte: dict[str, float] = {}
        #: The capacities of live tiers, and the largest one, which takes working sets that fit nowhere.
        self._live_capacity: dict[str, float] = {}
        self._largest_live = 0.0

    # ---- the cost of a task ------------------------------------------------------------

    def demand(self, ts: SchedulerTask) -> Demand:
        """Return what a task needs on any worker."""
        end = self.routes.end
        inputs = [
            InputRef(dts, dts.get_nbytes(), dts.who_has, end(next(iter(dts.who_has)).address))
            for dts in ts.dependencies
            if dts.who_has
        ]
        input_bytes = sum([each.nbytes for each in inputs])
        if inputs and is_alias(ts):
            return Demand(inputs, 0.0, 0.0, input_bytes)
        nbytes = mean_result_bytes(ts.prefix)
        return Demand(inputs, prefix_duration(self._state, ts.prefix), nbytes, input_bytes + nbytes)

    def cost(self, demand: Demand, ws: WorkerState) -> Candidate:
        """Return the cost of a task on a worker."""
        inputs, seconds, nbytes, working_set = demand
        address, tasks, threads = ws.address, len(ws.processing), ws.nthreads
        missing, moving = self._fetch(inputs, ws) if inputs else (0, 0.0)
        waiting = cost.waiting(self._work(ws), tasks, threads) if tasks >= threads else 0.0
        free, below, live = self._headroom.free_memory(address)
        # Running tasks leave results too, about as large as that of this task.
        need = missing + nbytes * (1 + min(tasks, threads)) + network_occupancy(ws)
        fits = need <= free + below and (working_set <= live or live >= self._largest_live)
        return Candidate(address, waiting, moving, seconds, fits, tasks / threads, ws.nbytes, missing)

    def _fetch(self, inputs: Collection[InputRef], ws: WorkerState) -> tuple[int, float]:
        """Return the bytes that a worker has to fetch for a task, and the seconds until all inputs are there.

        Bytes already in flight are charged to the task that they are fetched for.
        """
        missing, seconds, shares = 0, 0.0, False
        target, coming, between = self.routes.end(ws.address), ws.needs_what, self.routes.between
        for dts, nbytes, holders, source in inputs:
            if ws in holders:
                continue
            if coming and dts in coming:
                shares = True
            else:
                missing += nbytes
                latency, seconds_per_byte = between(source, target)
                seconds += latency + nbytes * seconds_per_byte
        if missing or shares:
            seconds += self.seconds_inbound(ws)
        return missing, seconds

    def seconds_inbound(self, ws: WorkerState) -> float:
        """Return the time until all bytes in flight to a worker have arrived, in seconds."""
        nbytes = network_occupancy(ws)
        if not nbytes:
            return 0.0
        usual = 1 / self._state.bandwidth
        return float(nbytes * self._inbound_seconds_per_byte.get(ws.address, usual))

    def _work(self, ws: WorkerState) -> float:
        """Return the work of a worker's tasks, in seconds."""
        state, prefixes, work = self._state, self._state.task_prefixes, 0.0
        for name, count in ws.task_prefix_count.items():
            work += prefix_duration(state, prefixes[name]) * count
        return work

    # ---- free memory -------------------------------------------------------------------

    def has_room(self, ws: WorkerState) -> bool:
        """Return whether a worker has memory for inputs in flight, and for results of its tasks and one more.

        Results count only while root tasks are queued; each is assumed to be as large as that of the first
        queued task's prefix.
        """
        need: float = network_occupancy(ws)
        queued = self._state.queued
        if queued:
            need += (len(ws.processing) + 1) * mean_result_bytes(queued.peek().prefix)
        free, below, _ = self._headroom.free_memory(ws.address)
        return free + below > need

    # ---- events ------------------------------------------------------------------------

    def on_memory_reported(self, ws: WorkerState) -> None:
        """Note that a worker has reported its memory."""
        self._live_capacity[ws.address] = live = self._headroom.free_memory(ws.address).live
        self._largest_live = max(live, self._largest_live)

    def on_decided(self, chosen: Candidate, ws: WorkerState) -> None:
        """Note how long the inputs that a placed task fetches are expected to take."""
        if chosen.missing:
            nbytes = network_occupancy(ws) + chosen.missing
            self._inbound_seconds_per_byte[chosen.worker] = chosen.moving / nbytes

    def on_worker_removed(self, worker: str) -> None:
        """Forget a worker that Dask has removed."""
        self.routes.clear()
        self._inbound_seconds_per_byte.pop(worker, None)
        if self._live_capacity.pop(worker, 0.0) == self._largest_live:
            self._largest_live = max(self._live_capacity.values(), default=0.0)


def mean_result_bytes(prefix: TaskPrefix) -> float:
    """Return the mean size of a prefix's results; 0 if there are none."""
    nbytes: float = prefix.nbytes_total
    if not nbytes:
        return 0.0
    states = prefix.states
    done: int = states["memory"] + states["released"] + states["forgotten"] + states["erred"]
    return nbytes / done if done > 1 else nbytes


def is_alias(ts: SchedulerTask) -> bool:
    """Return whether a task only names existing data, as for persisted collections.

    An alias has the prefix of the task that produced the data, but not its duration.
    """
    return isinstance(ts.run_spec, Alias)
