"""Which worker owns which output of a shuffle: by what it has room for, and how fast bytes come. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple


class Site(NamedTuple):
    """A worker that may own outputs.

    Parameters
    ----------
    worker
        Its address.
    pace
        Seconds until a byte of an output has come and is worked on, above 0.
    free, below
        Bytes that its live tier and its lower tiers take. May be below 0, or without end.
    """

    worker: str
    pace: float
    free: float = math.inf
    below: float = 0


def assign(outputs: Collection[int], sites: Sequence[Site], nbytes: float) -> dict[int, str]:
    """The owner of each output: neighbouring outputs share one, as many as it can take of the bytes.

    Parameters
    ----------
    outputs
        Output partitions; they count as equally large.
    sites
        At least one.
    nbytes
        Of all outputs together; 0 if nobody knows.
    """
    takers = [
        (site.worker, part) for site, part in zip(sites, shares(sites, nbytes), strict=True) if part > 0
    ]
    ends = list(accumulate(part for _, part in takers))
    ends[-1] = math.inf
    number = len(outputs)
    return {
        output: takers[bisect_right(ends, (position + 0.5) / number)][0]
        for position, output in enumerate(sorted(outputs))
    }


def shares(sites: Sequence[Site], nbytes: float) -> list[float]:
    """The part of the bytes for each site, such that all are done at the same time and nobody is overfull.

    Who would get more than it has room for gets what it has room for, and the others share the rest.
    """
    nbytes = max(nbytes, 1.0)
    rooms = _rooms(sites, nbytes)
    parts, left, takers = [0.0] * len(sites), nbytes, set(range(len(sites)))
    while takers:
        rate = left / sum([1 / sites[i].pace for i in sorted(takers)])
        full = {i for i in takers if rooms[i] < rate / sites[i].pace}
        for i in sorted(full):
            parts[i] = rooms[i] / nbytes
            left = max(0.0, left - rooms[i])
        if not full:
            for i in takers:
                parts[i] = rate / sites[i].pace / nbytes
            break
        takers -= full
    return parts


def _rooms(sites: Sequence[Site], nbytes: float) -> list[float]:
    """The most bytes for each site: live if that is enough in all, else with what can be spilled.

    Where even that is too little, everyone is overfull by the same factor.
    """
    live = [max(0.0, site.free) for site in sites]
    if sum(live) >= nbytes:
        return live
    rooms = [max(0.0, site.free + site.below) for site in sites]
    if not (total := sum(rooms)):
        return [math.inf] * len(sites)
    return [room * max(1.0, nbytes / total) for room in rooms]
