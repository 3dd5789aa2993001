"""Tasks find their run at once where it is known; Dask asks the event loop, and waits until it has time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask_gpurt.observe import Metrics
from dask_gpurt.shuffle.run import ShuffleRun

_REPLACED = ("get_or_create_shuffle", "get_shuffle_run")


class RunFinder:
    """Looks runs up for the tasks of a worker.

    Parameters
    ----------
    worker
        The Dask worker. Two methods of its shuffle plugin are replaced on that one instance, and end in the
        originals.
    """

    def __init__(self, worker: Any, metrics: Metrics):
        self._worker = worker
        self._metrics = metrics

    def install(self) -> None:
        """From now on."""
        if (plugin := self._worker.plugins.get("shuffle")) is None:
            self._metrics.fallback("tasks ask the event loop for their run", "Dask has no plugin 'shuffle'")
            return
        self._runs = plugin.shuffle_runs
        plugin.get_or_create_shuffle = self._or(plugin.get_or_create_shuffle)
        plugin.get_shuffle_run = self._or(plugin.get_shuffle_run)

    def uninstall(self) -> None:
        """Have Dask find them again."""
        if (plugin := self._worker.plugins.get("shuffle")) is not None:
            for name in _REPLACED:
                plugin.__dict__.pop(name, None)

    def _or(self, dasks: Callable[..., Any]) -> Callable[..., Any]:
        def find(shuffle_id: Any, run_id: int | None = None) -> Any:
            run = self._runs._active_runs.get(shuffle_id)
            if isinstance(run, ShuffleRun) and run.is_open and run_id in (None, run.run_id):
                return run
            return dasks(shuffle_id) if run_id is None else dasks(shuffle_id, run_id)

        return find
