"""Routes of bytes between workers, and what workers are near to."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement.cost import NO_WAY, Route, Step
from dask_gpurt.placement.loads import Neighbourhood
from dask_gpurt.topology import Link, Topology
from dask_gpurt.topology.links import BETWEEN_HOSTS

#: The neighbourhood of all workers.
EVERYWHERE: Neighbourhood = ("everywhere",)
#: What bytes cross between a tier and the live one of the same worker.
LINK_OF_TIER = {Tier.PINNED: Link.PINNED, Tier.HOST: Link.PAGEABLE, Tier.DISK: Link.DISK}
#: Links that end in host memory, whatever the workers compute on.
THROUGH_HOST = (Link.SHARED_MEMORY, Link.LOOPBACK, Link.TCP)
#: For how many pairs speeds are remembered. How often they are looked up before they are taken from the
#: topology again: so many times for each pair, so that this costs little, but at most so many in all.
MOST_PAIRS, LOOKUPS_EACH, MOST_LOOKUPS = 20_000, 50, 50_000


class Routes:
    """Routes between workers, worked out once for many decisions.

    Parameters
    ----------
    topology
        It learns speeds all the time; they are asked for again after some look-ups.
    by_comms
        Whether the bytes go by Dask's comms, as dependencies do, or by the exchange, as shards do.
    """

    def __init__(self, topology: Topology, by_comms: bool = True):
        self._topology = topology
        self._by_comms = by_comms
        self._known: dict[tuple[str, str], Route] = {}
        self._lookups = self._enough = 0

    def between(self, source: str, tier: Tier, target: str) -> Route:
        """From a tier of one worker to the live tier of another."""
        if source == target:
            return NO_WAY if tier is Tier.DEVICE else self.out_of(tier, source)
        self._lookups += 1
        if self._lookups > self._enough:
            self.clear()
        route = self._known.get((source, target))
        if route is None:
            route = self._learn(source, target)
        return route if tier is Tier.DEVICE else self.out_of(tier, source).then(route)

    def contact(self, source: str, target: str) -> float:
        """Seconds of a route that only the first bytes between two workers take."""
        link = self._topology.link(source, target, by_comms=True)
        return self._topology.connection_setup(link, source, target) if self._by_comms else 0.0

    def out_of(self, tier: Tier, worker: str) -> Route:
        """Between a lower tier and the live tier of a worker."""
        return Route.over(self._topology.tier_speed(LINK_OF_TIER[tier], worker))

    def _learn(self, source: str, target: str) -> Route:
        if len(self._known) >= MOST_PAIRS:
            self.clear()
        link, speed = self._topology.way(source, target, self._by_comms)
        route = Route.over(speed)
        if self._by_comms:
            route = route.then(Route(self._topology.connection_setup(link, source, target)))
        if link in BETWEEN_HOSTS:
            route = Route(route.latency, route.pace * self._neighbours(source))
        if link in THROUGH_HOST:
            route = route.then(Route.over(*self._copies(source, target)))
        self._known[source, target] = route
        self._enough = min(MOST_LOOKUPS, LOOKUPS_EACH * len(self._known))
        return route

    def _neighbours(self, worker: str) -> int:
        """How many share the way out of a host. When one sends to spread load, so do the others."""
        place = self._topology.place(worker)
        return 1 if place is None else len(self._topology.on_host(place.host))

    def _copies(self, *workers: str) -> Iterator[Step]:
        """Between devices and the memory of their hosts."""
        for worker in workers:
            place = self._topology.place(worker)
            if place is not None and place.device is not None:
                yield self._topology.tier_speed(Link.PAGEABLE, worker)

    def clear(self) -> None:
        """Ask for all speeds again."""
        self._known.clear()
        self._lookups = 0


def neighbourhoods(topology: Topology, worker: str, host: str) -> tuple[Neighbourhood, ...]:
    """What a worker belongs to, from near to far.

    Parameters
    ----------
    host
        Where it is if nobody has told the topology.
    """
    place = topology.place(worker)
    names: list[Neighbourhood] = []
    if place is not None and place.device is not None:
        names.append(("device", place.host, place.device))
    if place is not None and place.nvlink is not None:
        names.append(("nvlink", place.nvlink))
    return *names, ("host", place.host if place is not None else host), EVERYWHERE
