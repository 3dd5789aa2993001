"""Send values of the runtime with a worker's heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask_gpurt.dask_hooks.types import WorkerServer


def add_metric(worker: WorkerServer, name: str, read: Callable[[Any], dict[str, Any]]) -> Callable[[], None]:
    """Send a value with each heartbeat of a worker.

    Parameters
    ----------
    worker
        The Dask worker.
    name
        The name of the value, as of one of Dask's metrics.
    read
        Called with the worker; returns the value.

    Returns
    -------
    callable
        Ends that, and restores an earlier metric of the same name.
    """
    before = {name: worker.metrics[name]} if name in worker.metrics else {}
    # Copies: a heartbeat may be iterating over the old dict.
    worker.metrics = {**worker.metrics, name: read}

    def remove() -> None:
        if worker.metrics.get(name) == read:  # and not the metric of a later plugin
            worker.metrics = {each: m for each, m in worker.metrics.items() if each != name} | before

    return remove
