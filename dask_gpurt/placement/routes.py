"""The route that bytes of a key take from a worker to another: out of its tier, over the link, to where they land."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement.cost import Route, Step
from dask_gpurt.placement.loads import Neighbourhood
from dask_gpurt.topology import Link, Topology

#: What bytes cross between a tier and the live one of the same worker.
LINK_OF_TIER = {Tier.PINNED: Link.PINNED, Tier.HOST: Link.PAGEABLE, Tier.DISK: Link.DISK}
#: Links that end in host memory, whatever the workers compute on.
THROUGH_HOST = (Link.SHARED_MEMORY, Link.TCP)


def route(topology: Topology, source: str, tier: Tier, target: str) -> Route:
    """The steps from a tier of one worker to the live tier of another; none to where the bytes are."""
    steps = [] if tier is Tier.DEVICE else [topology.tier_speed(LINK_OF_TIER[tier], source)]
    if source == target:
        return steps
    steps.append(topology.speed(source, target))
    if topology.link(source, target) in THROUGH_HOST:
        steps.extend(_copies(topology, source if tier is Tier.DEVICE else None, target))
    return steps


def _copies(topology: Topology, *workers: str | None) -> Iterator[Step]:
    for worker in workers:
        place = topology.place(worker) if worker is not None else None
        if worker is not None and place is not None and place.device is not None:
            yield topology.tier_speed(Link.PAGEABLE, worker)


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


#: The neighbourhood of all workers.
EVERYWHERE: Neighbourhood = ("everywhere",)
