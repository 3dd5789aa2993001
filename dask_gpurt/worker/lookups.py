"""Look up the run of a task on the task's thread. Dask does so on the event loop, which may be busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.shuffle import ShuffleId, active_runs, replace_run_lookup
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.shuffle.run import ShuffleRun


class RunLookup:
    """Look up runs for the tasks of a worker.

    ``worker``: the Dask worker. Two methods of its shuffle plugin are replaced on the instance, and fall back
    to the originals for unknown runs.
    """

    def __init__(self, worker: WorkerServer, metrics: Metrics):
        self._worker = worker
        self._metrics = metrics
        self._patches = PatchSet()

    def install(self) -> None:
        """Replace Dask's lookup, if this version of Dask is supported."""
        if (plugin := self._worker.plugins.get("shuffle")) is None:
            self._metrics.fallback(Fallback.SHUFFLE_RUN_LOOKUP, "the worker has no plugin 'shuffle'")
            return
        self._runs = active_runs(plugin)
        try:
            replace_run_lookup(self._patches, plugin, self._or)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.SHUFFLE_RUN_LOOKUP, str(error))

    def uninstall(self) -> None:
        """Restore Dask's lookup."""
        self._patches.restore()

    def _or(self, dasks: Callable[..., Any]) -> Callable[..., Any]:
        def find(shuffle_id: ShuffleId, run_id: int | None = None) -> Any:
            run = self._runs.get(shuffle_id)
            if isinstance(run, ShuffleRun) and run.is_open and run_id in (None, run.run_id):
                return run
            return dasks(shuffle_id) if run_id is None else dasks(shuffle_id, run_id)

        return find
