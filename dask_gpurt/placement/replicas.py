"""Which worker takes a replica of data, and which lets one go: by room first, then by links. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import nsmallest
from itertools import chain, islice
from statistics import fmean
from typing import Any, NamedTuple

from dask.typing import Key
from distributed.core import Status

from dask_gpurt.memory.tiers import Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import NO_WAY, Space
from dask_gpurt.placement.estimates import MAX_REPLICAS
from dask_gpurt.placement.free_memory import Headroom, Spaces
from dask_gpurt.placement.overrides import Known, Overrides, Unsuitable
from dask_gpurt.placement.routes import Routes
from dask_gpurt.topology import Topology

#: Times that are no further apart than this factor are alike: room decides. Speeds that are learned differ by
#: less within a class of link; what is read from a tier and what has yet to be spilled there differ by 2.
ALIKE = 1.5


class Recipient(NamedTuple):
    """A worker that could take a replica.

    Parameters
    ----------
    worker
        Its address.
    moving
        Seconds until the replica has come, from the holder with the best route.
    space
        Its room, less what is on its way there.
    held
        Bytes that it holds, where the room is the same.
    asked
        Whether it was asked for this replica already, which has not come yet.
    """

    worker: str
    moving: float
    space: Space
    held: float = 0
    asked: bool = False


class Replica(NamedTuple):
    """A replica of data that lies on a worker.

    Parameters
    ----------
    worker
        The address of the worker.
    reach
        Seconds to get the data from where they lie to where they are needed.
    space
        The room beside it.
    live
        Whether it lies in the live tier.
    leaving
        Whether the worker is to go, or takes no work.
    kept
        Whether it must stay: a task there reads it, or nobody has asked for it to be dropped.
    held
        Bytes that the worker holds, where the room is the same.
    """

    worker: str
    reach: float
    space: Space
    live: bool = True
    leaving: bool = False
    kept: bool = False
    held: float = 0


def recipient(candidates: Iterable[Recipient], nbytes: float) -> Recipient | None:
    """The worker that takes a replica of so many bytes; None when nobody has room for it.

    Who was asked already is asked again: what is on its way is not sent to another too. Else live room comes
    before room that has to be made by spilling, for nobody waits for such a replica. Then the links decide,
    and where they are alike, room.
    """
    able = [each for each in candidates if cost.room(nbytes, each.space)[1]]
    chosen = [each for each in able if each.asked]
    chosen = chosen or [each for each in able if nbytes <= each.space.free] or able
    least = min((each.moving for each in chosen), default=0.0)
    near = (each for each in chosen if each.moving <= ALIKE * least)
    return min(near, key=lambda each: (-each.space.free, each.held, each.worker), default=None)


def dropped(replicas: Collection[Replica], nbytes: float) -> Replica | None:
    """The replica of so many bytes to drop, of all that there are; None when none may go.

    Those of workers that are to leave go first. Of the others the one that is left should be the one that is
    cheapest to reach: one that lies live where room is short counts as one that is about to be spilled, so it
    goes before one that is spilled already. Where they are alike, room decides.
    """
    candidates = [each for each in replicas if not each.kept]
    if len(replicas) < 2 or not candidates:
        return None
    candidates = [each for each in candidates if each.leaving] or candidates
    most = max(burden(each, nbytes) for each in candidates)
    dear = (each for each in candidates if ALIKE * burden(each, nbytes) >= most)
    return max(dear, key=lambda each: (-each.space.free, each.held, each.worker))


def burden(replica: Replica, nbytes: float) -> float:
    """Seconds that it costs to have this replica: to reach it, and where room is short to spill it before.

    Room is short where the replica would find none if it were not there already.
    """
    free, below, (latency, pace) = replica.space
    if not replica.live or nbytes <= free:
        return replica.reach
    if nbytes > free + below:
        return math.inf
    return replica.reach + 2 * (latency + nbytes * pace)


#: The methods that are replaced, with the parameters that they are known with.
MANAGER: Known = {
    "_find_recipient": ("ts", "candidates", "pending_repl"),
    "_find_dropper": ("ts", "candidates", "pending_drop"),
}
#: Up to so many workers all are compared; of more recipients the roomiest, and those on hosts of holders.
FEW, ROOMIEST = 64, 16


class MemoryManager:
    """Chooses for the active memory manager; which data gets or loses a replica is for Dask's policies.

    Dask's own conditions hold for whom we choose, since Dask is asked about that one.

    Parameters
    ----------
    manager
        Dask's ``ActiveMemoryManagerExtension``.
    state
        Dask's ``SchedulerState``.
    topology
        Where the workers are.
    headroom
        What room they have, and in which tiers data is.
    metrics
        Counts replicas.
    """

    def __init__(self, manager: Any, state: Any, topology: Topology, headroom: Headroom, metrics: Metrics):
        self._manager = manager
        self._state = state
        self._topology = topology
        self._headroom = headroom
        self._metrics = metrics
        self._routes = Routes(topology)
        self._originals: Mapping[str, Callable[..., Any]] = {}
        #: What workers hold by Dask's count, and what room they have: looked up once in a run of the manager.
        self._held: Any = None
        self._spaces = Spaces(self._space)
        #: Who was asked for which key, in this run and in the one before.
        self._asked: set[tuple[Key, str]] = set()
        self._asked_before: set[tuple[Key, str]] = set()

    def bind(self, overrides: Overrides) -> None:
        """Choose from now on."""
        self._originals = overrides.originals
        overrides.put(self._manager, MANAGER, {name: getattr(self, name) for name in MANAGER})

    def _begin(self) -> None:
        """Look at the cluster anew where a run of the manager has begun: each makes a dictionary."""
        if self._held is self._manager.workers_memory:
            return
        self._held = self._manager.workers_memory
        self._spaces = Spaces(self._space)
        self._routes.clear()
        self._asked, self._asked_before = set(), self._asked

    def _space(self, worker: str) -> Space:
        """The room on a worker, less what its tasks will fetch."""
        free, below, tier, _ = self._headroom.room(worker)
        if not self._headroom.told(worker):  # it spills Dask's way, and nobody knows how much it may
            below = math.inf
        promised = self._state.workers[worker]._network_occ
        return Space(free - promised, below, self._routes.out_of(tier, worker) if tier else NO_WAY)

    # ---- who gets a replica --------------------------------------------------------------

    def _find_recipient(self, ts: Any, candidates: set[Any] | None, pending_repl: set[Any]) -> Any:
        original = self._originals["_find_recipient"]
        if ts.state != "memory" or ts.actor:
            return original(ts, candidates, pending_repl)
        self._begin()
        allowed = self._state.running if candidates is None else candidates & self._state.running
        allowed = allowed - ts.who_has - pending_repl
        able = [self._recipient(ts, ws) for ws in self._compared(ts, allowed)]
        chosen = recipient(able, ts.get_nbytes())
        if chosen is None:
            if allowed:
                self._metrics.add("placement.replicas.refused")
            return original(ts, set(), pending_repl)
        ws = original(ts, {self._state.workers[chosen.worker]}, pending_repl)
        if ws is not None:
            self._spaces.take(chosen.worker, ts.get_nbytes())
            self._asked.add((ts.key, chosen.worker))
            self._metrics.add("placement.replicas.made")
        return ws

    def _compared(self, ts: Any, allowed: Collection[Any]) -> Collection[Any]:
        """Of the workers that may get a replica the ones that are looked at."""
        if len(allowed) <= FEW:
            return allowed
        workers = self._state.workers
        places = (self._topology.place(ws.address) for ws in islice(ts.who_has, MAX_REPLICAS))
        near = [address for place in places if place for address in self._topology.on_host(place.host)]
        roomy = (
            islice((address for address in order if workers[address] in allowed), ROOMIEST)
            for order in self._spaces.roomiest(workers)
        )
        found = dict.fromkeys(chain(near, *roomy))
        return [ws for address in found if (ws := workers.get(address)) in allowed]

    def _recipient(self, ts: Any, ws: Any) -> Recipient:
        holders = [holder.address for holder in islice(ts.who_has, MAX_REPLICAS)]
        return Recipient(
            ws.address,
            min(self._seconds(ts, holder, ws.address) for holder in holders),
            self._spaces[ws.address],
            self._held[ws],
            (ts.key, ws.address) in self._asked_before,
        )

    def _seconds(self, ts: Any, holder: str, target: str) -> float:
        """Until data have come from a worker that holds them."""
        route = self._routes.between(holder, self._headroom.tier(holder, ts.key), target)
        return cost.moving(ts.get_nbytes(), [route])

    # ---- who drops one -------------------------------------------------------------------

    def _find_dropper(self, ts: Any, candidates: set[Any] | None, pending_drop: set[Any]) -> Any:
        ws = self._originals["_find_dropper"](ts, candidates, pending_drop)
        if ws is None:
            return None
        self._begin()
        left = ts.who_has - pending_drop
        if len(left) <= FEW:
            ws = self._dropper(ts, left, left if candidates is None else candidates & left)
        if self._is_live(ts, ws):
            self._spaces.take(ws.address, -ts.get_nbytes())
        self._metrics.add("placement.replicas.dropped")
        return ws

    def _dropper(self, ts: Any, holders: set[Any], candidates: set[Any]) -> Any:
        """Of the candidates the one that drops its replica; Dask has found that one of them may."""
        readers = {waiter.processing_on for waiter in ts.waiters or ()} - {None}
        wanted = [ws.address for ws in nsmallest(MAX_REPLICAS, readers, key=lambda ws: ws.address)]
        droppable = candidates - readers
        found = [self._replica(ts, ws, wanted, ws not in droppable) for ws in holders]
        chosen = dropped(found, ts.get_nbytes())
        if chosen is None:
            raise Unsuitable(f"no worker may drop {ts.key!r}, but Dask knows one")
        return self._state.workers[chosen.worker]

    def _replica(self, ts: Any, ws: Any, wanted: Collection[str], kept: bool) -> Replica:
        return Replica(
            ws.address,
            fmean(self._seconds(ts, ws.address, target) for target in wanted or [ws.address]),
            self._spaces[ws.address],
            self._is_live(ts, ws),
            ws.status is not Status.running,
            kept,
            self._held[ws],
        )

    def _is_live(self, ts: Any, ws: Any) -> bool:
        return self._headroom.tier(ws.address, ts.key) is Tier.DEVICE
