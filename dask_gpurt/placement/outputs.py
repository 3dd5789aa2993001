"""Which worker owns which output of a shuffle: by what it has room for, and how fast bytes come. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple

from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement.estimates import Estimates


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


#: Seconds that a thread is about to work on a byte of an output: pandas joins and groups some 1 GB/s.
WORK = 1e-9
#: The most holders of inputs whose links are looked at, those with the most bytes; others count as anywhere.
MOST_HOLDERS = 16


class Inputs:
    """The inputs of a shuffle.

    Parameters
    ----------
    barrier
        The task that waits for all its transfers.

    Attributes
    ----------
    held
        Bytes by the worker that will send them.
    going
        Bytes by worker that are let go once they are sent: nobody else needs them.
    nbytes
        Of all inputs; those that are not there yet count as large as the others on average.
    """

    def __init__(self, barrier: Any):
        self.held: defaultdict[str, float] = defaultdict(float)
        self.going: defaultdict[str, float] = defaultdict(float)
        seen = sum([self._see(transfer) for transfer in barrier.dependencies])
        self.nbytes = sum(self.held.values()) * len(barrier.dependencies) / max(seen, 1)

    def _see(self, transfer: Any) -> bool:
        """Count what a transfer sends; tell whether that is there."""
        found = [dts for dts in transfer.dependencies if dts.who_has]
        for dts in found:
            holder = transfer.processing_on
            if holder not in dts.who_has:
                holder = min(dts.who_has, key=lambda ws: ws.address)
            self.held[holder.address] += dts.get_nbytes()
            if not dts.who_wants and len(dts.dependents) == 1:
                self.going[holder.address] += dts.get_nbytes()
        return bool(found)


def sites(inputs: Inputs, workers: Sequence[Any], estimates: Estimates) -> list[Site]:
    """The workers that may own outputs, in the order in which they are given."""
    moving = _moving(inputs, [ws.address for ws in workers], estimates)
    return [_site(ws, moving[ws.address], inputs, estimates) for ws in workers]


def _site(ws: Any, moving: float, inputs: Inputs, estimates: Estimates) -> Site:
    free, below, _, _ = estimates.room(ws)
    pace = moving + WORK * estimates.slowdown.of(ws.address) / ws.nthreads
    return Site(ws.address, pace, free + inputs.going[ws.address] - ws._network_occ, below)


def _moving(inputs: Inputs, workers: Sequence[str], estimates: Estimates) -> Mapping[str, float]:
    """Seconds that a byte of the inputs takes to each worker, from wherever it may be."""
    most = nlargest(MOST_HOLDERS, inputs.held.items(), key=lambda item: (item[1], item[0]))
    between, nbytes = estimates.shard_routes.between, max(inputs.nbytes, 1.0)
    known = {
        worker: sum(held * between(holder, Tier.DEVICE, worker).pace for holder, held in most) / nbytes
        for worker in workers
    }
    looked_at = sum(held for _, held in most) / nbytes
    elsewhere = fmean(known.values()) * (1 - looked_at) / looked_at if looked_at else 0.0
    return {worker: pace + elsewhere for worker, pace in known.items()}
