"""Look the run of a task up where it is known; Dask asks the event loop, and waits until it has time.

The first task of a run on a worker has to ask the scheduler for it, while its thread waits. So the worker
asks as soon as it hears of that task: it is still fetching inputs then, or computes another task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dask.typing import Key
from distributed.core import Status

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.shuffle import active_runs, join_run, replace_run_lookup, transferred_shuffle
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import call_soon
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.shuffle.run import ShuffleRun

logger = logging.getLogger(__name__)


class RunLookup:
    """Look runs up for the tasks of a worker.

    Parameters
    ----------
    worker
        The Dask worker. Two methods of its shuffle plugin are replaced on that one instance, and end in the
        originals.
    """

    def __init__(self, worker: WorkerServer, metrics: Metrics):
        self._worker = worker
        self._metrics = metrics
        self._patches = PatchSet()
        #: The shuffles whose run the scheduler is being asked for.
        self._asked: set[Any] = set()

    def install(self) -> None:
        """Look runs up from now on."""
        if (plugin := self._worker.plugins.get("shuffle")) is None:
            self._metrics.fallback(Fallback.SHUFFLE_RUN_LOOKUP, "Dask has no plugin 'shuffle'")
            return
        self._runs = active_runs(plugin)
        try:
            replace_run_lookup(self._patches, plugin, self._or)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.SHUFFLE_RUN_LOOKUP, str(error))

    def uninstall(self) -> None:
        """Have Dask find them again."""
        self._patches.restore()

    def _or(self, dasks: Callable[..., Any]) -> Callable[..., Any]:
        def find(shuffle_id: Any, run_id: int | None = None) -> Any:
            run = self._runs.get(shuffle_id)
            if isinstance(run, ShuffleRun) and run.is_open and run_id in (None, run.run_id):
                return run
            return dasks(shuffle_id) if run_id is None else dasks(shuffle_id, run_id)

        return find

    def expect(self, key: Key) -> None:
        """Ask for the run of a task that is going to run here, if it is a transfer. On the event loop."""
        shuffle_id = transferred_shuffle(key)
        if shuffle_id is None or shuffle_id in self._asked or self._worker.status != Status.running:
            return
        plugin = self._worker.plugins.get("shuffle")
        if plugin is not None and shuffle_id not in active_runs(plugin):
            self._asked.add(shuffle_id)
            call_soon(self._worker, self._join, plugin, shuffle_id, key)

    async def _join(self, plugin: Any, shuffle_id: Any, key: Key) -> None:
        try:
            await join_run(plugin, shuffle_id, key)
        except Exception as error:  # the task asks once more, and has what becomes of that
            logger.debug("no run of %s for %r yet: %s", shuffle_id, key, error)
        finally:
            self._asked.discard(shuffle_id)
