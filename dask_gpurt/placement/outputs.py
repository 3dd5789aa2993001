"""Choose the owner of each output of a shuffle, by free memory and by the speed at which inputs reach it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from dask_gpurt.dask_hooks.scheduler import network_occupancy
from dask_gpurt.dask_hooks.types import SchedulerTask, WorkerState
from dask_gpurt.memory.ledger import FreeMemory
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement.estimates import Estimates

#: Compute time of a thread per byte of an output, in seconds: pandas joins and groups about 1 GB/s.
WORK_SECONDS_PER_BYTE = 1e-9
#: How many holders of inputs have their links looked up, those with the most bytes; others use the mean.
MAX_HOLDERS = 16


class Owner(NamedTuple):
    """Describe a worker that may own outputs.

    Parameters
    ----------
    worker
        Its address.
    seconds_per_byte
        Time to transfer and process a byte of an output, in seconds; greater than 0.
    memory
        Its free memory.
    """

    worker: str
    seconds_per_byte: float
    memory: FreeMemory


# ---- shares --------------------------------------------------------------------------------------------


def assign(outputs: Collection[int], owners: Sequence[Owner], nbytes: float) -> dict[int, str]:
    """Return the owner of each output. Each owner gets consecutive outputs.

    Parameters
    ----------
    outputs
        Output partitions, assumed to be equally large.
    owners
        At least one owner.
    nbytes
        The total size of all outputs; 0 if unknown.
    """
    takers = [
        (owner.worker, share)
        for owner, share in zip(owners, shares(owners, nbytes), strict=True)
        if share > 0
    ]
    ends = list(accumulate(share for _, share in takers))
    ends[-1] = math.inf
    number = len(outputs)
    return {
        output: takers[bisect_right(ends, (position + 0.5) / number)][0]
        for position, output in enumerate(sorted(outputs))
    }


def shares(owners: Sequence[Owner], nbytes: float) -> list[float]:
    """Return each owner's share of the bytes, such that all finish at the same time and none is overfull.

    An owner whose share exceeds its free memory gets as much as fits; the others share the rest.
    """
    nbytes = max(nbytes, 1.0)
    rooms = _rooms(owners, nbytes)
    found, rest, open_to = [0.0] * len(owners), nbytes, set(range(len(owners)))
    while open_to:
        seconds = rest / sum([1 / owners[i].seconds_per_byte for i in sorted(open_to)])
        full = {i for i in open_to if rooms[i] < seconds / owners[i].seconds_per_byte}
        for i in sorted(full):
            found[i] = rooms[i] / nbytes
            rest = max(0.0, rest - rooms[i])
        if not full:
            for i in open_to:
                found[i] = seconds / owners[i].seconds_per_byte / nbytes
            break
        open_to -= full
    return found


def _rooms(owners: Sequence[Owner], nbytes: float) -> list[float]:
    """Return the most bytes for each owner: its free live memory if that suffices in total, else all tiers'.

    If even all tiers are too small, all owners are overfull by the same factor.
    """
    live = [max(0.0, owner.memory.free) for owner in owners]
    if sum(live) >= nbytes:
        return live
    rooms = [max(0.0, owner.memory.free + owner.memory.below) for owner in owners]
    if not (total := sum(rooms)):
        return [math.inf] * len(owners)
    return [room * max(1.0, nbytes / total) for room in rooms]


# ---- the state of Dask's scheduler ---------------------------------------------------------------------


class ShuffleInputs:
    """Describe the inputs of a shuffle.

    Parameters
    ----------
    barrier
        The barrier task of the shuffle.

    Attributes
    ----------
    held
        The bytes of inputs by the worker that will send them.
    released
        The bytes by worker that are released once they are sent, since no other task needs them.
    nbytes
        The total size of all inputs. Inputs that do not exist yet count as the mean of the others.
    """

    def __init__(self, barrier: SchedulerTask):
        self.held: defaultdict[str, float] = defaultdict(float)
        self.released: defaultdict[str, float] = defaultdict(float)
        seen = sum([self._count(transfer) for transfer in barrier.dependencies])
        self.nbytes = sum(self.held.values()) * len(barrier.dependencies) / max(seen, 1)

    def _count(self, transfer: SchedulerTask) -> bool:
        """Count the inputs of a transfer; return whether any exist already."""
        found = False
        for dts in transfer.dependencies:
            if not dts.who_has:
                continue
            found, holder = True, transfer.processing_on
            if holder is None or holder not in dts.who_has:
                holder = min(dts.who_has, key=lambda ws: ws.address)
            self.held[holder.address] += dts.get_nbytes()
            if not dts.who_wants and len(dts.dependents) == 1:
                self.released[holder.address] += dts.get_nbytes()
        return found


def possible_owners(
    inputs: ShuffleInputs, workers: Sequence[WorkerState], estimates: Estimates
) -> list[Owner]:
    """Return workers as possible owners of outputs, in the given order."""
    moving = _seconds_per_byte_to([ws.address for ws in workers], inputs, estimates)
    return [_owner(ws, moving[ws.address], inputs, estimates) for ws in workers]


def _owner(ws: WorkerState, moving: float, inputs: ShuffleInputs, estimates: Estimates) -> Owner:
    working = WORK_SECONDS_PER_BYTE * estimates.slowdown.of(ws.address) / ws.nthreads
    memory = estimates.free_memory(ws)
    free = memory.free + inputs.released[ws.address] - network_occupancy(ws)
    return Owner(ws.address, moving + working, memory._replace(free=free))


def _seconds_per_byte_to(
    workers: Sequence[str], inputs: ShuffleInputs, estimates: Estimates
) -> Mapping[str, float]:
    """Return the mean transfer time of a byte from the holders of inputs to each worker, in seconds."""
    most = nlargest(MAX_HOLDERS, inputs.held.items(), key=lambda item: (item[1], item[0]))
    between, nbytes = estimates.shard_routes.between, max(inputs.nbytes, 1.0)
    known = {
        worker: sum(held * between(holder, Tier.DEVICE, worker).seconds_per_byte for holder, held in most)
        / nbytes
        for worker in workers
    }
    looked_up = sum(held for _, held in most) / nbytes
    elsewhere = fmean(known.values()) * (1 - looked_up) / looked_up if looked_up else 0.0
    return {worker: seconds + elsewhere for worker, seconds in known.items()}
