"""Choose objects to evict by their next use. Pure."""

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
        Bytes that spilling it frees.
    needed
        The soonest scheduler priority among the tasks of this worker that need it (in Dask, smaller tuples
        run sooner); None if no task does.
    used
        Time of its last use, on a monotonic clock.
    """

    key: Key
    nbytes: int
    needed: tuple[Any, ...] | None
    used: int


#: States of a task that no longer reads its inputs.
_DONE = frozenset({"memory", "released", "forgotten", "error", "cancelled"})


def next_use(task: Any) -> tuple[Any, ...] | None:
    """Return the soonest priority among the tasks of this worker that still need a result.

    Parameters
    ----------
    task
        The ``TaskState`` of the result in the worker's state machine; None if there is none.

    Returns
    -------
    tuple or None
        A priority of Dask's; None if no task needs the result.
    """
    if task is None:
        return None
    # The event loop may change the set while this thread reads it; tuple() copies it atomically.
    waiting = [each.priority for each in tuple(task.dependents) if each.state not in _DONE and each.priority]
    return min(waiting, default=None)


def order(candidates: Iterable[EvictionCandidate]) -> list[EvictionCandidate]:
    """Sort candidates for eviction: no next use first, then the latest; ties by size, then by age."""
    ranked = sorted(candidates, key=lambda c: (-c.nbytes, c.used, repr(c.key)))
    unneeded = [c for c in ranked if c.needed is None]
    needed = sorted((c for c in ranked if c.needed is not None), key=lambda c: c.needed or (), reverse=True)
    return unneeded + needed


def choose(candidates: Iterable[EvictionCandidate], nbytes: int) -> list[EvictionCandidate]:
    """Return the first candidates in :func:`order` that free ``nbytes`` in total; all if that is too much."""
    chosen: list[EvictionCandidate] = []
    for candidate in order(c for c in candidates if c.nbytes):
        if nbytes <= 0:
            break
        chosen.append(candidate)
        nbytes -= candidate.nbytes
    return chosen
