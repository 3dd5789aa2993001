"""Our choices in Dask's active memory manager: who gets a replica, and who drops one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from heapq import nsmallest
from itertools import chain, islice
from statistics import fmean
from typing import Any

from dask.typing import Key
from distributed.core import Status

from dask_gpurt.dask_hooks.scheduler import Overrides, Unsuitable, network_occupancy
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import cost, replicas
from dask_gpurt.placement.cost import NO_WAY, Space
from dask_gpurt.placement.estimates import MOST_REPLICAS
from dask_gpurt.placement.headroom import Headroom
from dask_gpurt.placement.replicas import Recipient, Replica
from dask_gpurt.placement.routes import Routes
from dask_gpurt.placement.spaces import Spaces
from dask_gpurt.topology import Topology

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
        overrides.replicas(self._manager, lambda name: getattr(self, name))

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
        promised = network_occupancy(self._state.workers[worker])
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
        chosen = replicas.recipient(able, ts.get_nbytes())
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
        places = (self._topology.place(ws.address) for ws in islice(ts.who_has, MOST_REPLICAS))
        near = [address for place in places if place for address in self._topology.on_host(place.host)]
        roomy = (
            islice((address for address in order if workers[address] in allowed), ROOMIEST)
            for order in self._spaces.roomiest(workers)
        )
        found = dict.fromkeys(chain(near, *roomy))
        return [ws for address in found if (ws := workers.get(address)) in allowed]

    def _recipient(self, ts: Any, ws: Any) -> Recipient:
        holders = [holder.address for holder in islice(ts.who_has, MOST_REPLICAS)]
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
        wanted = [ws.address for ws in nsmallest(MOST_REPLICAS, readers, key=lambda ws: ws.address)]
        droppable = candidates - readers
        found = [self._replica(ts, ws, wanted, ws not in droppable) for ws in holders]
        chosen = replicas.dropped(found, ts.get_nbytes())
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
