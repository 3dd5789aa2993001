"""Compute the cost of a task on a worker: seconds until it could have run there. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from dask_gpurt.memory.ledger import FreeMemory


class Hop(Protocol):
    """Describe a link that bytes cross; :class:`dask_gpurt.topology.Speed` is one."""

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second."""

    @property
    def latency(self) -> float:
        """Return the seconds before the first byte."""


class Route(NamedTuple):
    """List the links that bytes of a replica cross: out of its tier, to another worker, to its device.

    Parameters
    ----------
    latency
        Seconds before the first byte.
    seconds_per_byte
        Seconds for each byte.
    """

    latency: float = 0.0
    seconds_per_byte: float = 0.0

    @classmethod
    def over(cls, *hops: Hop) -> Route:
        """Return the route over some links."""
        return cls(sum(step.latency for step in hops), sum(1 / step.bandwidth for step in hops))

    def then(self, other: Route) -> Route:
        """Return this route followed by another."""
        return Route(self.latency + other.latency, self.seconds_per_byte + other.seconds_per_byte)


#: The route to where the bytes are already.
LOCAL_ROUTE = Route()


class Terms(NamedTuple):
    """Hold the cost of a task on a worker, term by term, in seconds.

    Parameters
    ----------
    waiting
        Until the work that is there before it leaves a thread.
    running
        Its own work, with the slowdown of that worker.
    moving
        Until its inputs are there.
    room
        To spill what is in its way.
    fits
        Whether there is room for its inputs and its result, at whatever cost.
    """

    waiting: float
    running: float
    moving: float
    room: float
    fits: bool

    @property
    def seconds(self) -> float:
        """Return the sum of all terms."""
        return self.waiting + self.running + self.moving + self.room


class Candidate(NamedTuple):
    """Describe a worker that may run a task.

    Parameters
    ----------
    worker
        Its address.
    terms
        The cost there.
    load
        Tasks per thread that it has; breaks ties of the cost.
    held
        Bytes that it holds; breaks ties of both.
    missing
        Bytes of inputs that it lacks.
    """

    worker: str
    terms: Terms
    load: float = 0
    held: float = 0
    missing: int = 0

    def after(self, waiting: float) -> Candidate:
        """Return the same candidate with another wait before the task, in seconds."""
        return self._replace(terms=self.terms._replace(waiting=waiting))


def rank(candidate: Candidate) -> tuple[bool, float, float, float, str]:
    """Return a key by which better candidates are smaller.

    Whether a task fits comes before time. The address comes last, so that equal states give equal decisions.
    """
    worker, (waiting, running, moving, room, fits), load, held, _ = candidate
    return not fits, waiting + running + moving + room, load, held, worker


def best(candidates: Iterable[Candidate]) -> Candidate:
    """Return the candidate to take.

    Raises
    ------
    ValueError
        Without any.
    """
    return min(candidates, key=rank)


def waiting(work: float, tasks: int, threads: int, slowdown: float = 1) -> float:
    """Return seconds until a thread is free.

    Parameters
    ----------
    work
        Seconds of work of all tasks that are there, on a worker with a slowdown of 1.
    tasks, threads
        How many there are.
    slowdown
        How many times as long as others the worker takes.
    """
    if tasks < threads:
        return 0.0
    return work * slowdown * (tasks - threads + 1) / (tasks * threads)


def moving(nbytes: float, routes: Iterable[Route]) -> float:
    """Return seconds until an input is there, from the replica with the best route.

    Raises
    ------
    ValueError
        Without a route.
    """
    least = math.inf
    for latency, seconds_per_byte in routes:
        seconds = latency + nbytes * seconds_per_byte
        if seconds < least:
            least = seconds
    if least == math.inf:
        raise ValueError("no replica to get an input from")
    return least


def room(need: float, memory: FreeMemory, spill: Route) -> tuple[float, bool]:
    """Return seconds to make room for ``need`` bytes, and whether there is room at all.

    A task does not pay for what others lack: it spills at most its own bytes.

    Parameters
    ----------
    need
        Bytes that are to be live.
    memory
        Free memory of the worker.
    spill
        The route of what it spills.
    """
    free, below, _, _ = memory
    if need <= free:
        return 0.0, True
    return spill.latency + min(need, need - free) * spill.seconds_per_byte, need <= free + below
