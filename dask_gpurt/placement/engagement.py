"""Decide whether workers differ enough in links, speeds, data or memory for placement to matter. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

#: Two links differ if the result of a mean task takes this many times as long over one as over the other ...
LINK_FACTOR = 2.0
#: ... and if the difference is at least this fraction of the duration of that task.
LINK_SHARE = 0.05
#: The assumed size of a result before any task has run.
UNKNOWN_RESULT_BYTES = 1 << 20
#: Two workers differ in speed if one takes this many times as long. Workers that share cores show up to 1.3.
SPEED_FACTOR = 1.5
#: Data lie unevenly if this fraction of them would have to move to give each thread the same amount ...
UNEVEN_SHARE = 0.25
#: ... and if there are at least this many bytes per worker.
MIN_RESIDENT_BYTES = 1 << 20
#: A worker is short of memory if a smaller fraction of its live tier is free.
SHORT_SHARE = 0.2


class Reason(StrEnum):
    """Name the difference between workers for which placement is on."""

    LINKS = "links"
    SPEEDS = "speeds"
    RESIDENCY = "residency"
    HEADROOM = "headroom"


class UsualTask(NamedTuple):
    """Describe the mean of finished tasks.

    Parameters
    ----------
    seconds
        The duration.
    nbytes
        The size of the result.
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
    """Return whether links differ enough to matter for the usual task.

    Parameters
    ----------
    seconds
        Transfer times of the usual task's result over links between workers, for each class of link in use.
    usual
        The usual task. If None, any difference of links counts.
    """
    if not seconds:
        return False
    fast, slow = min(seconds), max(seconds)
    if slow < LINK_FACTOR * fast or slow == fast:
        return False
    return usual is None or slow - fast >= LINK_SHARE * usual.seconds


def speeds_differ(slowdowns: Iterable[float]) -> bool:
    """Return whether workers differ enough in speed to matter.

    Parameters
    ----------
    slowdowns
        See :class:`~dask_gpurt.placement.durations.WorkerSlowdown`. Workers without a slowdown count as 1.
    """
    known = [*slowdowns, 1.0]
    return max(known) >= SPEED_FACTOR * min(known)


def lie_unevenly(holdings: Sequence[Holding]) -> bool:
    """Return whether some workers hold far more data per thread than others."""
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
        Free bytes and capacity of its live tier; the capacity may be infinite.
    """
    return free <= 0 or (math.isfinite(live) and free < SHORT_SHARE * live)


def headroom_differs(short: int, workers: int) -> bool:
    """Return whether some workers are short of memory and others are not, so that a choice can help."""
    return 0 < short < workers
