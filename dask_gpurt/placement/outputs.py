"""What the owners of a shuffle's outputs are chosen by, as the state of Dask's scheduler has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import nlargest
from statistics import fmean
from typing import Any

from dask_gpurt.dask_hooks.scheduler import network_occupancy
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement.estimates import Estimates
from dask_gpurt.placement.owners import Site

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
    pace = moving + WORK * estimates.paces.of(ws.address) / ws.nthreads
    return Site(ws.address, pace, free + inputs.going[ws.address] - network_occupancy(ws), below)


def _moving(inputs: Inputs, workers: Sequence[str], estimates: Estimates) -> Mapping[str, float]:
    """Seconds that a byte of the inputs takes to each worker, from wherever it may be."""
    most = nlargest(MOST_HOLDERS, inputs.held.items(), key=lambda item: (item[1], item[0]))
    between, nbytes = estimates.routes_of_shards.between, max(inputs.nbytes, 1.0)
    known = {
        worker: sum(held * between(holder, Tier.DEVICE, worker).pace for holder, held in most) / nbytes
        for worker in workers
    }
    looked_at = sum(held for _, held in most) / nbytes
    elsewhere = fmean(known.values()) * (1 - looked_at) / looked_at if looked_at else 0.0
    return {worker: pace + elsewhere for worker, pace in known.items()}
