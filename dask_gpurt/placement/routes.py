"""Compute and cache routes of bytes between workers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import NamedTuple

from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement.cost import LOCAL_ROUTE, Hop, Route
from dask_gpurt.topology import Link, Topology
from dask_gpurt.topology.links import BETWEEN_HOSTS

#: The link between a tier and the live tier of the same worker.
LINK_OF_TIER = {Tier.PINNED: Link.PINNED, Tier.HOST: Link.PAGEABLE, Tier.DISK: Link.DISK}
#: Links that end in host memory, even between GPU workers.
THROUGH_HOST = (Link.SHARED_MEMORY, Link.LOOPBACK, Link.TCP)
#: The cache is cleared, to use current speeds, after this many lookups per cached route, which keeps the
#: overhead small, and after at most this many lookups in total.
LOOKUPS_PER_ROUTE, MAX_LOOKUPS = 50, 50_000


class _End(NamedTuple):
    """Describe one end of a route.

    Parameters
    ----------
    host, nvlink
        The worker's host, and its NVLink domain; None if it has none.
    kind
        A number that all workers share whose routes to other hosts are the same.
    """

    host: str
    nvlink: str | None
    kind: int


class Routes:
    """Cache routes between workers: by pair of workers where these are near, else by kind of worker.

    A large cluster has far more pairs of workers than tasks, or than room in a cache. But between hosts, only
    a link that is known to differ from the others of its class makes a route special.

    Parameters
    ----------
    topology
        The source of speeds. It learns continuously, so routes expire after some lookups.
    by_comms
        Whether bytes go over Dask's comms, like dependencies, or over the exchange, like shards.
    """

    def __init__(self, topology: Topology, by_comms: bool = True):
        self._topology = topology
        self._by_comms = by_comms
        self._known: dict[tuple[Hashable, Hashable], Route] = {}
        self._ends: dict[str, _End | None] = {}
        self._kinds: dict[tuple[Hashable, ...], int] = {}
        #: Pairs of hosts whose link has its own speed.
        self._special: Collection[tuple[str, str]] = ()
        self._lookups = self._max_lookups = 0

    def between(self, source: str, tier: Tier, target: str) -> Route:
        """Return the route from a tier of one worker to the live tier of another."""
        if source == target:
            return LOCAL_ROUTE if tier is Tier.DEVICE else self.out_of(tier, source)
        self._lookups += 1
        if self._lookups > self._max_lookups:
            self.clear()
        pair = self._pair(source, target)
        route = self._known.get(pair)
        if route is None:
            route = self._known[pair] = self._work_out(source, target)
            self._max_lookups = min(MAX_LOOKUPS, LOOKUPS_PER_ROUTE * len(self._known))
        return route if tier is Tier.DEVICE else self.out_of(tier, source).then(route)

    def connection_setup(self, source: str, target: str) -> float:
        """Return the extra time of the first transfer between two workers, in seconds."""
        link = self._topology.link(source, target, by_comms=True)
        return self._topology.connection_setup(link, source, target) if self._by_comms else 0.0

    def out_of(self, tier: Tier, worker: str) -> Route:
        """Return the route between a lower tier and the live tier of a worker."""
        return Route.over(self._topology.tier_speed(LINK_OF_TIER[tier], worker))

    def clear(self) -> None:
        """Clear the cache, so that routes use the topology's current speeds."""
        self._known.clear()
        self._ends.clear()
        self._kinds.clear()
        self._special = self._topology.special_hosts()
        self._lookups = 0

    # ---- what the cache is by ----------------------------------------------------------

    def _pair(self, source: str, target: str) -> tuple[Hashable, Hashable]:
        """Return the key of a route in the cache."""
        ends = self._ends
        here = ends[source] if source in ends else self._end(source)
        there = ends[target] if target in ends else self._end(target)
        if here is None or there is None or here.host == there.host:
            return source, target
        if here.nvlink is not None and here.nvlink == there.nvlink:
            return source, target
        if self._special and (here.host, there.host) in self._special:
            return (here.host, here.kind), (there.host, there.kind)
        return here.kind, there.kind

    def _end(self, worker: str) -> _End | None:
        """Return the end of routes at a worker; None if its place is unknown."""
        place, found = self._topology.place(worker), None
        if place is not None:
            copies = tuple(self._host_copies(worker))
            alike = place.rdma, place.by_tcp, self._workers_on_host_of(worker), copies
            found = _End(place.host, place.nvlink, self._kinds.setdefault(alike, len(self._kinds)))
        self._ends[worker] = found
        return found

    # ---- routes ------------------------------------------------------------------------

    def _work_out(self, source: str, target: str) -> Route:
        link, speed = self._topology.way(source, target, self._by_comms)
        route = Route.over(speed)
        if self._by_comms:
            route = route.then(Route(self._topology.connection_setup(link, source, target)))
        if link in BETWEEN_HOSTS:
            # Workers of a host share its link, and mostly send to other hosts at the same time.
            route = Route(route.latency, route.seconds_per_byte * self._workers_on_host_of(source))
        if link in THROUGH_HOST:
            route = route.then(Route.over(*self._host_copies(source, target)))
        return route

    def _workers_on_host_of(self, worker: str) -> int:
        place = self._topology.place(worker)
        return 1 if place is None else len(self._topology.on_host(place.host))

    def _host_copies(self, *workers: str) -> Iterator[Hop]:
        """Yield the links between the devices of workers and the memory of their hosts."""
        for worker in workers:
            place = self._topology.place(worker)
            if place is not None and place.device is not None:
                yield self._topology.tier_speed(Link.PAGEABLE, worker)
