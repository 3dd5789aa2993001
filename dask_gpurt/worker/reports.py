"""Report a worker to the scheduler with each heartbeat: the progress of its runs, and moves between tiers.

Decisions and their figures: ``docs/decisions/scheduler.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.memory.ledger import KINDS, Ledger
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.progress import RecentRuns


def add_metric(
    worker: WorkerServer, name: str, read: Callable[[Any], Mapping[str, Any]]
) -> Callable[[], None]:
    """Send a value with each heartbeat of a worker.

    ``read``: called with the worker; returns the value.
    Returns a function that ends that.
    """
    # Copies: a heartbeat may be iterating over the old dict.
    worker.metrics = {**worker.metrics, name: read}

    def remove() -> None:
        if worker.metrics.get(name) == read:  # and not the metric of a later plugin
            worker.metrics = {each: m for each, m in worker.metrics.items() if each != name}

    return remove


def amounts(ledger: Ledger) -> list[tuple[str, str, int]]:
    """Return tier, kind and bytes for each cell of a ledger; ``capacity`` counts as a kind."""
    return [
        (str(tier), kind, capacity if kind == "capacity" else ledger.cell(tier, kind))
        for tier, capacity in ledger.capacity.items()
        for kind in ("capacity", *KINDS)
    ]


class Progress:
    """Tell heartbeats the progress of the latest runs, and the bytes moved between tiers."""

    def __init__(self, runs: RecentRuns, metrics: Metrics):
        self._runs = runs
        self._metrics = metrics

    def __call__(self, worker: WorkerServer) -> dict[str, Any]:
        moves = self._metrics.total("memory.spill.bytes.{from}.{to}")
        return {
            "runs": self._runs.snapshot(),
            "moved": [[source, target, nbytes] for (source, target), nbytes in moves.items()],
        }
