"""Judge whether placement can matter: where links, speeds, residency or free memory differ. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

#: Two links differ where one takes so many times as long for the result of a mean task ...
LINK_FACTOR = 2.0
#: ... and matter where it comes so much later, as a share of the duration of that task.
LINK_SHARE = 0.05
#: The result that is sent while no task has run.
UNKNOWN_RESULT_BYTES = 1 << 20
#: Two workers differ in speed where one takes so many times as long; those that share cores seem to, by 1.3.
SPEED_FACTOR = 1.5
#: Data lie unevenly where so large a share of them would have to move for all threads to have as much ...
UNEVEN_SHARE = 0.25
#: ... and there are so many bytes of them for each worker.
MIN_RESIDENT_BYTES = 1 << 20
#: A worker is short of memory with a smaller share of its live tier free.
SHORT_SHARE = 0.2


class Reason(StrEnum):
    """Name what differs between workers."""

    LINKS = "links"
    SPEEDS = "speeds"
    RESIDENCY = "residency"
    HEADROOM = "headroom"


class UsualTask(NamedTuple):
    """Describe the mean task that has run.

    Parameters
    ----------
    seconds
        Its duration.
    nbytes
        Bytes of its result.
    """

    seconds: float
    nbytes: float


class Holding(NamedTuple):
    """Describe the data of a worker.

    Parameters
    ----------
    nbytes
        Bytes that it holds.
    threads
        Its threads.
    """

    nbytes: float
    threads: int


def links_differ(seconds: Sequence[float], usual: UsualTask | None) -> bool:
    """Return whether some links are slower than others by enough to matter for tasks as they are.

    Parameters
    ----------
    seconds
        That the result of the mean task takes over links between workers, of all classes that join them.
    usual
        That task. Without one, links that differ are taken to matter.
    """
    if not seconds:
        return False
    fast, slow = min(seconds), max(seconds)
    if slow < LINK_FACTOR * fast or slow == fast:
        return False
    return usual is None or slow - fast >= LINK_SHARE * usual.seconds


def speeds_differ(slowdowns: Iterable[float]) -> bool:
    """Return whether some workers take longer for their tasks than others.

    Parameters
    ----------
    slowdowns
        See :class:`~dask_gpurt.placement.durations.WorkerSlowdown`. Workers without one count as usual.
    """
    known = [*slowdowns, 1.0]
    return max(known) >= SPEED_FACTOR * min(known)


def lie_unevenly(holdings: Sequence[Holding]) -> bool:
    """Return whether some workers hold far more data for each of their threads than others."""
    total, threads = sum(each.nbytes for each in holdings), sum(each.threads for each in holdings)
    if total < MIN_RESIDENT_BYTES * len(holdings) or not threads:
        return False
    fair = total / threads
    surplus = sum(max(0.0, each.nbytes - fair * each.threads) for each in holdings)
    return surplus >= UNEVEN_SHARE * total


def is_short(free: float, live: float) -> bool:
    """Return whether a worker is short of memory.

    Parameters
    ----------
    free, live
        Bytes of its live tier that are free, and its capacity, which may be infinite.
    """
    return free <= 0 or (math.isfinite(live) and free < SHORT_SHARE * live)


def headroom_differs(short: int, workers: int) -> bool:
    """Return whether some workers are short of memory while others are not: else no choice makes room."""
    return 0 < short < workers
