"""Find the siblings of a root task: the tasks whose results will be needed together with its own."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpurt.dask_hooks.types import SchedulerTask, WorkerState

#: Tasks with more inputs have no siblings: these lie on many workers wherever each of them is.
MAX_SIBLINGS = 16
#: The longest chain of single inputs that is followed.
MAX_CHAIN = 4


def anchor(ts: SchedulerTask) -> WorkerState | None:
    """Return the worker of a sibling of a task; None if no sibling has a worker yet."""
    return next((ws for sibling in siblings(ts) if (ws := _worker_of(sibling)) is not None), None)


def siblings(ts: SchedulerTask) -> Iterator[SchedulerTask]:
    """Yield the tasks whose results will be needed together with a task's result; none if there are many."""
    dependent = next(iter(ts.dependents), None)
    for _ in range(MAX_CHAIN):
        if dependent is None or len(dependent.dependencies) > 1:
            break
        dependent = next(iter(dependent.dependents), None)
    if dependent is not None and 1 < len(dependent.dependencies) <= MAX_SIBLINGS:
        for sibling in dependent.dependencies:
            if (origin := _origin(sibling)) is not ts:
                yield origin


def _origin(ts: SchedulerTask) -> SchedulerTask:
    """Follow a chain of single inputs to its head, or to the first task that has a worker."""
    for _ in range(MAX_CHAIN):
        if len(ts.dependencies) != 1 or _worker_of(ts):
            break
        ts = next(iter(ts.dependencies))
    return ts


def _worker_of(ts: SchedulerTask) -> WorkerState | None:
    """Return a worker that has the result of a task, or will have it."""
    if ts.processing_on is not None:
        return ts.processing_on
    return next(iter(ts.who_has), None) if ts.who_has else None
