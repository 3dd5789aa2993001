"""Choose what is evicted first, by its next use. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dask.typing import Key


@dataclass(frozen=True)
class EvictionCandidate:
    """Describe an object that could be spilled.

    Attributes
    ----------
    nbytes
        What spilling it frees.
    needed
        The soonest scheduler priority among the tasks of this worker that need it (Dask's: a
        smaller tuple runs sooner), None if no task does.
    used
        When it was last used, on a clock that only grows.
    """

    key: Key
    nbytes: int
    needed: tuple[Any, ...] | None
    used: int


#: States of a task of which the inputs are no longer read.
_DONE = frozenset({"memory", "released", "forgotten", "error", "cancelled"})


def next_use(task: Any) -> tuple[Any, ...] | None:
    """Return the soonest priority among the tasks of this worker that still need a result of Dask's.

    Parameters
    ----------
    task
        The ``TaskState`` of the worker's state machine that has the result, None without any.

    Returns
    -------
    tuple or None
        A priority of Dask's, None if no task needs the result.
    """
    if task is None:
        return None
    # The event loop may change the set while another thread reads it here; to copy it is one step.
    waiting = [each.priority for each in tuple(task.dependents) if each.state not in _DONE and each.priority]
    return min(waiting, default=None)


def order(candidates: Iterable[EvictionCandidate]) -> list[EvictionCandidate]:
    """Sort candidates, those that are evicted first in front: without a next use, used last, large, old."""
    ranked = sorted(candidates, key=lambda c: (-c.nbytes, c.used, repr(c.key)))
    unneeded = [c for c in ranked if c.needed is None]
    needed = sorted((c for c in ranked if c.needed is not None), key=lambda c: c.needed or (), reverse=True)
    return unneeded + needed


def choose(candidates: Iterable[EvictionCandidate], nbytes: int) -> list[EvictionCandidate]:
    """Return the first ones in :func:`order` that free ``nbytes`` between them; all if they cannot."""
    chosen: list[EvictionCandidate] = []
    for candidate in order(c for c in candidates if c.nbytes):
        if nbytes <= 0:
            break
        chosen.append(candidate)
        nbytes -= candidate.nbytes
    return chosen
