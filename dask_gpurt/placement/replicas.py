"""Which worker takes a replica of data, and which lets one go: by room first, then by links. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import Space

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
