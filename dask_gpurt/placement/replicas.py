"""Choose the workers that receive and drop replicas, for Dask's active memory manager."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from heapq import nsmallest
from itertools import chain, islice
from statistics import fmean
from typing import NamedTuple

from dask.typing import Key
from distributed.core import Status

from dask_gpurt.dask_hooks.scheduler import Overrides, Unsuitable, network_occupancy
from dask_gpurt.dask_hooks.types import MemoryBalancer, SchedulerState, SchedulerTask, WorkerState
from dask_gpurt.memory.ledger import FreeMemory
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import LOCAL_ROUTE, Route
from dask_gpurt.placement.estimates import MAX_REPLICAS
from dask_gpurt.placement.free_memory import FreeMemoryIndex, Headroom
from dask_gpurt.placement.routes import Routes
from dask_gpurt.topology import Topology

#: Times within this factor of each other count as equal, and free memory decides. Learned speeds within a
#: class of link differ by less; reading from a tier, and spilling to it and reading back, differ by 2.
ALIKE_FACTOR = 1.5
#: Up to this many workers are all compared. Among more recipients, only those on hosts of holders are, and
#: this many with the most free memory, of the live tier and of all tiers.
MAX_ALL_COMPARED, MAX_MOST_FREE = 64, 16


#: A method of the manager; takes a task, the allowed workers, and the workers with pending requests.
Choice = Callable[[SchedulerTask, set[WorkerState] | None, set[WorkerState]], WorkerState | None]


# ---- rules ---------------------------------------------------------------------------------------------


class Recipient(NamedTuple):
    """Describe a worker that could take a replica.

    Parameters
    ----------
    worker
        Its address.
    moving
        Transfer time from the holder with the fastest route, in seconds.
    memory
        Its free memory, minus bytes in flight to it.
    held
        The bytes that it holds; breaks ties of free memory.
    asked
        Whether it was asked to fetch this replica already and does not have it yet.
    """

    worker: str
    moving: float
    memory: FreeMemory
    held: float = 0
    asked: bool = False


class Replica(NamedTuple):
    """Describe a replica of data on a worker.

    Parameters
    ----------
    worker
        The address of the worker.
    reach
        Time to move the data from there to where they are needed, in seconds.
    memory
        The worker's free memory.
    spill
        The route of data that the worker spills.
    live
        Whether the replica is in the live tier.
    leaving
        Whether the worker is retiring or paused.
    kept
        Whether the replica must stay, because a task there reads it or Dask does not allow its drop.
    held
        The bytes that the worker holds; breaks ties of free memory.
    """

    worker: str
    reach: float
    memory: FreeMemory
    spill: Route = LOCAL_ROUTE
    live: bool = True
    leaving: bool = False
    kept: bool = False
    held: float = 0


def choose_recipient(candidates: Iterable[Recipient], nbytes: float) -> Recipient | None:
    """Return the worker that should receive a replica of ``nbytes``; None if it fits nowhere.

    A worker that was asked already is chosen again, so that data in flight are not sent to another worker
    too. Otherwise workers with free live memory come before workers that would have to spill, since no task
    waits for such a replica. Then links decide, and free memory if links are equal.
    """
    able = [each for each in candidates if cost.room(nbytes, each.memory, LOCAL_ROUTE)[1]]
    chosen = [each for each in able if each.asked]
    chosen = chosen or [each for each in able if nbytes <= each.memory.free] or able
    least = min((each.moving for each in chosen), default=0.0)
    near = (each for each in chosen if each.moving <= ALIKE_FACTOR * least)
    return min(near, key=lambda each: (-each.memory.free, each.held, each.worker), default=None)


def choose_dropped(replicas: Collection[Replica], nbytes: float) -> Replica | None:
    """Return the replica of ``nbytes`` to drop; None if all must stay.

    Replicas on leaving workers go first. Otherwise the remaining replica should be the cheapest to reach. A
    live replica on a worker that is short of memory counts as about to be spilled, so it goes before one that
    is already spilled. If costs are equal, free memory decides.
    """
    candidates = [each for each in replicas if not each.kept]
    if len(replicas) < 2 or not candidates:
        return None
    candidates = [each for each in candidates if each.leaving] or candidates
    most = max(burden(each, nbytes) for each in candidates)
    dear = (each for each in candidates if ALIKE_FACTOR * burden(each, nbytes) >= most)
    return max(dear, key=lambda each: (-each.memory.free, each.held, each.worker))


def burden(replica: Replica, nbytes: float) -> float:
    """Return the time to reach a replica, plus the time to spill it and read it back if memory is short.

    In seconds. Memory is short if the replica would not fit a second time.
    """
    memory, spill = replica.memory, replica.spill
    if not replica.live or nbytes <= memory.free:
        return replica.reach
    if nbytes > memory.free + memory.below:
        return math.inf
    return replica.reach + 2 * (spill.latency + nbytes * spill.seconds_per_byte)


# ---- the active memory manager -------------------------------------------------------------------------


class ReplicaPlacement:
    """Choose workers for Dask's active memory manager; its policies decide which keys gain or lose replicas.

    Each choice is passed to Dask's own method as the only candidate, so that Dask's conditions hold too.

    Parameters
    ----------
    manager
        Dask's ``ActiveMemoryManagerExtension``.
    state
        Dask's ``SchedulerState``.
    topology
        The places of workers.
    headroom
        Free memory of the workers, and tiers of data.
    metrics
        Counts replicas.
    """

    def __init__(
        self,
        manager: MemoryBalancer,
        state: SchedulerState,
        topology: Topology,
        headroom: Headroom,
        metrics: Metrics,
    ):
        self._manager = manager
        self._state = state
        self._topology = topology
        self._headroom = headroom
        self._metrics = metrics
        self._routes = Routes(topology)
        self._originals: Mapping[str, Choice] = {}
        #: Bytes on workers by Dask's count, and free memory; both looked up once in each run of the manager.
        self._held: Mapping[WorkerState, int] = {}
        self._memory = FreeMemoryIndex(self._free_memory)
        #: Keys with the workers that were asked to fetch them, in this run and in the previous one.
        self._asked: set[tuple[Key, str]] = set()
        self._asked_before: set[tuple[Key, str]] = set()

    def bind(self, overrides: Overrides) -> None:
        """Replace the manager's choices."""
        self._originals = overrides.originals
        overrides.replicas(self._manager, lambda name: getattr(self, name))

    def _on_choice(self) -> None:
        """Refresh the cluster's state if a new run of the manager has begun, which creates a new dict."""
        if self._held is self._manager.workers_memory:
            return
        self._held = self._manager.workers_memory
        self._memory = FreeMemoryIndex(self._free_memory)
        self._routes.clear()
        self._asked, self._asked_before = set(), self._asked

    def _free_memory(self, worker: str) -> FreeMemory:
        """Return the free memory of a worker, minus bytes that its tasks will fetch."""
        memory = self._headroom.free_memory(worker)
        # A worker that has not reported spills as Dask does, to a capacity that is unknown here.
        below = memory.below if self._headroom.has_reported(worker) else math.inf
        promised = network_occupancy(self._state.workers[worker])
        return memory._replace(free=memory.free - promised, below=below)

    # ---- recipients ----------------------------------------------------------------------

    def _find_recipient(
        self, ts: SchedulerTask, candidates: set[WorkerState] | None, pending_repl: set[WorkerState]
    ) -> WorkerState | None:
        original: Choice = self._originals["_find_recipient"]
        if ts.state != "memory" or ts.actor:
            return original(ts, candidates, pending_repl)
        self._on_choice()
        allowed = self._state.running if candidates is None else candidates & self._state.running
        allowed = allowed - (ts.who_has or set()) - pending_repl
        found = [self._recipient(ts, ws) for ws in self._compared(ts, allowed)]
        chosen = choose_recipient(found, ts.get_nbytes())
        if chosen is None:
            if allowed:
                self._metrics.add("placement.replicas.refused")
            return original(ts, set(), pending_repl)
        ws = original(ts, {self._state.workers[chosen.worker]}, pending_repl)
        if ws is not None:
            self._memory.take(chosen.worker, ts.get_nbytes())
            self._asked.add((ts.key, chosen.worker))
            self._metrics.add("placement.replicas.made")
        return ws

    def _compared(self, ts: SchedulerTask, allowed: Collection[WorkerState]) -> Collection[WorkerState]:
        """Return the allowed workers to compare."""
        if len(allowed) <= MAX_ALL_COMPARED:
            return allowed
        workers = self._state.workers
        places = (self._topology.place(ws.address) for ws in islice(ts.who_has or (), MAX_REPLICAS))
        near = [address for place in places if place for address in self._topology.on_host(place.host)]
        most_free = (
            islice((address for address in order if workers[address] in allowed), MAX_MOST_FREE)
            for order in self._memory.most_free(workers)
        )
        found = dict.fromkeys(chain(near, *most_free))
        return [workers[address] for address in found if workers.get(address) in allowed]

    def _recipient(self, ts: SchedulerTask, ws: WorkerState) -> Recipient:
        holders = [holder.address for holder in islice(ts.who_has or (), MAX_REPLICAS)]
        return Recipient(
            ws.address,
            min(self._seconds(ts, holder, ws.address) for holder in holders),
            self._memory[ws.address],
            self._held[ws],
            (ts.key, ws.address) in self._asked_before,
        )

    def _seconds(self, ts: SchedulerTask, holder: str, target: str) -> float:
        """Return the transfer time of a task's result from a holder, in seconds."""
        route = self._routes.between(holder, self._headroom.tier(holder, ts.key), target)
        return cost.moving(ts.get_nbytes(), [route])

    # ---- droppers ------------------------------------------------------------------------

    def _find_dropper(
        self, ts: SchedulerTask, candidates: set[WorkerState] | None, pending_drop: set[WorkerState]
    ) -> WorkerState | None:
        original: Choice = self._originals["_find_dropper"]
        ws = original(ts, candidates, pending_drop)
        if ws is None:
            return None
        self._on_choice()
        holders = (ts.who_has or set()) - pending_drop
        if len(holders) <= MAX_ALL_COMPARED:
            ws = self._dropper(ts, holders, holders if candidates is None else candidates & holders)
        if self._is_live(ts, ws):
            self._memory.take(ws.address, -ts.get_nbytes())
        self._metrics.add("placement.replicas.dropped")
        return ws

    def _dropper(
        self, ts: SchedulerTask, holders: AbstractSet[WorkerState], candidates: AbstractSet[WorkerState]
    ) -> WorkerState:
        """Return the candidate that should drop its replica. Dask has found that at least one may."""
        readers = {ws for waiter in ts.waiters or () if (ws := waiter.processing_on) is not None}
        wanted = [ws.address for ws in nsmallest(MAX_REPLICAS, readers, key=lambda ws: ws.address)]
        droppable = candidates - readers
        found = [self._replica(ts, ws, wanted, ws not in droppable) for ws in holders]
        chosen = choose_dropped(found, ts.get_nbytes())
        if chosen is None:
            raise Unsuitable(f"found no worker that may drop {ts.key!r}, although Dask did")
        dropper: WorkerState = self._state.workers[chosen.worker]
        return dropper

    def _replica(self, ts: SchedulerTask, ws: WorkerState, wanted: Collection[str], kept: bool) -> Replica:
        memory = self._memory[ws.address]
        return Replica(
            ws.address,
            fmean(self._seconds(ts, ws.address, target) for target in wanted or [ws.address]),
            memory,
            LOCAL_ROUTE if memory.tier is None else self._routes.out_of(memory.tier, ws.address),
            self._is_live(ts, ws),
            ws.status is not Status.running,
            kept,
            self._held[ws],
        )

    def _is_live(self, ts: SchedulerTask, ws: WorkerState) -> bool:
        return self._headroom.tier(ws.address, ts.key) is Tier.DEVICE
