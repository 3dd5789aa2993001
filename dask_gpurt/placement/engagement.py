"""Decide whether workers differ enough in links, data or memory for placement to matter. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

#: Two links differ if the result of a mean task takes this many times as long over one as over the other:
#: speeds are learnt from few transfers, so that a smaller ratio may be chance ...
LINK_FACTOR = 2.0
#: ... and if the difference is at least this fraction of the duration of that task, since a choice of links
#: gains no more than the difference.
LINK_SHARE = 0.05
#: Data lie unevenly if this fraction of them would have to move to give each thread the same amount: tasks
#: that run where their data are take longer by at least this fraction ...
UNEVEN_SHARE = 0.25
#: ... and if there are at least this many bytes per worker: less is moved in the time of a message.
MIN_RESIDENT_BYTES = 1 << 20
#: A worker is short of memory if a smaller fraction of its live tier is free.
SHORT_SHARE = 0.2


class Reason(StrEnum):
    """Name the difference between workers for which placement is on."""

    LINKS = "links"
    RESIDENCY = "residency"
    HEADROOM = "headroom"


class UsualTask(NamedTuple):
    """Describe the mean of the tasks at present.

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
        Transfer times of the usual task's result over links between workers.
    usual
        The usual task. If None, any difference of links counts.
    """
    if not seconds:
        return False
    fast, slow = min(seconds), max(seconds)
    if slow < LINK_FACTOR * fast or slow == fast:
        return False
    return usual is None or slow - fast >= LINK_SHARE * usual.seconds


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
