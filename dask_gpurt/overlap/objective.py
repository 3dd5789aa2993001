"""How long compute and communication take side by side. Pure.

What counts is the time until both are done, not that of the kernel: a setting that slows the kernel and
speeds the communication pays only where communication is what the step waits for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What is to be done in a step, in seconds that each would take alone."""

    compute: float
    communication: float


@dataclass(frozen=True)
class Speeds:
    """How fast both progress together, each as a share of its speed alone, above 0 and at most 1."""

    compute: float
    communication: float


@dataclass(frozen=True)
class Course:
    """How long a step takes at some speeds, and for how much of it both run, in seconds."""

    speeds: Speeds
    total: float
    together: float


def side_by_side(work: Work, speeds: Speeds) -> Course:
    """Do a step: both run until the first one is done, and the other goes on alone.

    For speeds that add up to more than 1 the total is the larger of
    ``K + C (1 - c) / m`` and ``C + K (1 - m) / c``, with K, C the work and c, m the speeds: in the first case
    compute is waited for, and pays for the communication beside it; in the second it is the other way round.
    """
    together = min(work.compute / speeds.compute, work.communication / speeds.communication)
    left = work.compute + work.communication - together * (speeds.compute + speeds.communication)
    return Course(speeds, together + left, together)
