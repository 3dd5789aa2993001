"""Compare workers for a task by the time until it would have run there, in seconds. Pure.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: The terms of the cost, in the order in which a task goes through them.
TERMS = ("waiting", "moving", "running")


class Candidate(NamedTuple):
    """Describe a worker that may run a task, and the cost there.

    Parameters
    ----------
    worker
        Its address.
    waiting
        Seconds until earlier tasks leave a thread free.
    moving
        Seconds to move the task's inputs to the worker.
    running
        Seconds to run the task.
    fits
        Whether its inputs and its result fit into memory.
    load
        The worker's tasks per thread; breaks ties of the cost.
    held
        The bytes that it holds; breaks ties of cost and load.
    missing
        The bytes of inputs that it lacks.
    """

    worker: str
    waiting: float
    moving: float
    running: float
    fits: bool
    load: float = 0
    held: float = 0
    missing: int = 0

    @property
    def seconds(self) -> float:
        """Return the sum of all terms."""
        return self.waiting + self.moving + self.running


def rank(candidate: Candidate) -> tuple[bool, float, float, float, str]:
    """Return a sort key; better candidates are smaller.

    Fitting into memory comes before time. The address comes last, so that decisions are deterministic.
    """
    worker, waiting, moving, running, fits, load, held, _ = candidate
    return not fits, waiting + moving + running, load, held, worker


def best(candidates: Iterable[Candidate]) -> Candidate:
    """Return the best candidate.

    Raises
    ------
    ValueError
        If there is none.
    """
    return min(candidates, key=rank)


def waiting(work: float, tasks: int, threads: int) -> float:
    """Return the time until a thread is free, in seconds.

    Parameters
    ----------
    work
        The work of all tasks on the worker, in seconds.
    tasks, threads
        The numbers of tasks and threads.
    """
    if tasks < threads:
        return 0.0
    return work * (tasks - threads + 1) / (tasks * threads)
