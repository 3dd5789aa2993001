"""Compute the cost of a task on a worker: the time until it would have run there, in seconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from dask_gpurt.memory.ledger import FreeMemory


class Hop(Protocol):
    """Describe a link that bytes cross; :class:`dask_gpurt.topology.Speed` is one."""

    @property
    def bandwidth(self) -> float:
        """Return the bandwidth in bytes per second."""

    @property
    def latency(self) -> float:
        """Return the time before the first byte, in seconds."""


class Route(NamedTuple):
    """Sum up the links that a replica crosses: out of its tier, to another worker, to its device.

    Parameters
    ----------
    latency
        Time before the first byte, in seconds.
    seconds_per_byte
        Time for each byte, in seconds.
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


#: The route of bytes that are at their target already.
LOCAL_ROUTE = Route()


class Terms(NamedTuple):
    """Hold the terms of the cost of a task on a worker, in seconds.

    Parameters
    ----------
    waiting
        Time until earlier tasks leave a thread free.
    running
        Time to run the task, including the worker's slowdown.
    moving
        Time to move its inputs to the worker.
    room
        Time to spill other data.
    fits
        Whether its inputs and its result fit into memory, at whatever cost.
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
        Its tasks per thread; breaks ties of the cost.
    held
        The bytes that it holds; breaks ties of cost and load.
    missing
        The bytes of inputs that it lacks.
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
    """Return a sort key; better candidates are smaller.

    Fitting into memory comes before time. The address comes last, so that decisions are deterministic.
    """
    worker, (waiting, running, moving, room, fits), load, held, _ = candidate
    return not fits, waiting + running + moving + room, load, held, worker


def best(candidates: Iterable[Candidate]) -> Candidate:
    """Return the best candidate.

    Raises
    ------
    ValueError
        If there is none.
    """
    return min(candidates, key=rank)


def waiting(work: float, tasks: int, threads: int, slowdown: float = 1) -> float:
    """Return the time until a thread is free, in seconds.

    Parameters
    ----------
    work
        The work of all tasks on the worker, in seconds at a slowdown of 1.
    tasks, threads
        The numbers of tasks and threads.
    slowdown
        The worker's durations relative to those of other workers.
    """
    if tasks < threads:
        return 0.0
    return work * slowdown * (tasks - threads + 1) / (tasks * threads)


def moving(nbytes: float, routes: Iterable[Route]) -> float:
    """Return the time to move an input from the replica with the fastest route, in seconds.

    Raises
    ------
    ValueError
        If there is no route.
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
    """Return the time to free ``need`` bytes in seconds, and whether that is possible.

    A task does not pay for a shortage of other tasks: it spills at most its own bytes.

    Parameters
    ----------
    need
        Bytes that must be live.
    memory
        The worker's free memory.
    spill
        The route of spilled data.
    """
    free, below, _, _ = memory
    if need <= free:
        return 0.0, True
    return spill.latency + min(need, need - free) * spill.seconds_per_byte, need <= free + below
