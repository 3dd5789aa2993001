"""Report the progress of a worker's runs, its spilling and its overlap settings with each heartbeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.progress import RecentRuns

#: The reported counters; all of them have no labels.
REPORTED = (
    "memory.waits",
    "memory.retries",
    "overlap.confined",
    "overlap.decisions",
    "reads.seconds.reading",
    "reads.seconds.beside",
)


class ProgressReporter:
    """Summarise the progress of one worker for its heartbeats.

    Parameters
    ----------
    runs
        The progress of its latest runs.
    overlap
        Returns a summary of its overlap, as plain values.
    """

    def __init__(
        self,
        runs: RecentRuns,
        overlap: Callable[[], Mapping[str, Any]],
        metrics: Metrics,
    ):
        self._runs = runs
        self._overlap = overlap
        self._metrics = metrics

    def report(self, _worker: WorkerServer) -> dict[str, Any]:
        """Return the progress of the latest runs, bytes moved between tiers, and some counters."""
        moves = self._metrics.total("memory.spill.bytes.{from}.{to}")
        counters = {name: self._metrics.total(name).get((), 0) for name in REPORTED}
        return {
            "runs": self._runs.snapshot(),
            "moved": [[source, target, nbytes] for (source, target), nbytes in moves.items()],
            "counters": {name: value for name, value in counters.items() if value},
            "overlap": dict(self._overlap()),
        }
