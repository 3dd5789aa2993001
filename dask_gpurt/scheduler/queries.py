"""Sum up the last computations, which Dask keeps with the groups of their tasks."""

from __future__ import annotations

from typing import Any

from dask_gpurt.dask_hooks.types import SchedulerServer

#: The operations that are named of a computation, those that took longest first.
STEPS = 3


def queries(scheduler: SchedulerServer, since: float) -> list[dict[str, Any]]:
    """Return what is known of each computation that began after a time, as plain values, oldest first.

    Dask counts graphs as one computation that arrive while tasks of another one run.
    """
    return [_query(each) for each in scheduler.computations if each.start >= since and each.groups]


def _query(computation: Any) -> dict[str, Any]:
    groups = sorted(computation.groups, key=lambda group: -group.duration)
    return {
        "began": computation.start,
        "seconds": max(0.0, computation.stop - computation.start),
        "tasks": sum(map(len, groups)),
        "computing": sum(group.duration for group in groups),
        "bytes": sum(group.nbytes_total for group in groups),
        "steps": [group.prefix.name for group in groups[:STEPS]],
        "names": [group.name for group in groups],
    }
