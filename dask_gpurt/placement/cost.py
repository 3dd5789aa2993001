"""What it costs to run a task on a worker: seconds until it could have run there. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Step(Protocol):
    """A link that bytes cross; :class:`dask_gpurt.topology.Speed` is one."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""

    @property
    def latency(self) -> float:
        """Seconds before the first byte."""


class Route(NamedTuple):
    """What the bytes of a replica cross one after the other: out of its tier, the link, to where they land.

    Parameters
    ----------
    latency
        Seconds before the first byte.
    pace
        Seconds for each byte.
    """

    latency: float = 0.0
    pace: float = 0.0

    @classmethod
    def over(cls, *steps: Step) -> Route:
        """A route over some links."""
        return cls(sum(step.latency for step in steps), sum(1 / step.bandwidth for step in steps))

    def then(self, other: Route) -> Route:
        """This route, and another behind it."""
        return Route(self.latency + other.latency, self.pace + other.pace)


#: To where the bytes are.
NO_WAY = Route()


class Space(NamedTuple):
    """The room on a worker, in bytes.

    Parameters
    ----------
    free
        What its live tier takes as it is. May be below 0.
    below
        What its lower tiers take, so that the live tier can spill.
    spill
        The way of what it spills.
    """

    free: float
    below: float = 0
    spill: Route = NO_WAY


class Terms(NamedTuple):
    """The cost of a task on a worker, term by term, in seconds.

    Parameters
    ----------
    waiting
        Until the work that is there before it leaves a thread.
    running
        Its own work, at the pace of that worker.
    moving
        Until its inputs have come.
    room
        To spill what is in its way.
    fits
        Whether there is room for its inputs and its output, at whatever cost.
    """

    waiting: float
    running: float
    moving: float
    room: float
    fits: bool

    @property
    def seconds(self) -> float:
        """All terms together."""
        return self.waiting + self.running + self.moving + self.room


class Candidate(NamedTuple):
    """A worker that may run a task.

    Parameters
    ----------
    worker
        Its address.
    terms
        The cost there.
    load
        Tasks per thread that it has, where the cost is equal.
    held
        Bytes that it holds, where that is equal too.
    missing
        Bytes of inputs that it lacks.
    """

    worker: str
    terms: Terms
    load: float = 0
    held: float = 0
    missing: int = 0


def rank(candidate: Candidate) -> tuple[bool, float, float, float, str]:
    """Smaller is better: room before time; the address decides at last, so that equal states agree."""
    worker, (waiting, running, moving, room, fits), load, held, _ = candidate
    return not fits, waiting + running + moving + room, load, held, worker


def best(candidates: Iterable[Candidate]) -> Candidate:
    """The candidate to take.

    Raises
    ------
    ValueError
        Without any.
    """
    return min(candidates, key=rank)


def waiting(work: float, tasks: int, threads: int, pace: float = 1) -> float:
    """Seconds until a thread is free.

    Parameters
    ----------
    work
        Seconds of work of all tasks that are there, on a worker of pace 1.
    tasks, threads
        How many there are.
    pace
        How many times longer than others the worker takes.
    """
    if tasks < threads:
        return 0.0
    return work * pace * (tasks - threads + 1) / (tasks * threads)


def moving(nbytes: float, routes: Iterable[Route]) -> float:
    """Seconds until an input has come, from the replica with the best route.

    Raises
    ------
    ValueError
        Without a route.
    """
    least = math.inf
    for latency, pace in routes:
        seconds = latency + nbytes * pace
        if seconds < least:
            least = seconds
    if least == math.inf:
        raise ValueError("no replica to get an input from")
    return least


def room(need: float, space: Space) -> tuple[float, bool]:
    """Seconds to make room for so many bytes, and whether there is any.

    What others are short of is not for this task to pay.
    """
    free, below, (latency, pace) = space
    if need <= free:
        return 0.0, True
    return latency + min(need, need - free) * pace, need <= free + below
