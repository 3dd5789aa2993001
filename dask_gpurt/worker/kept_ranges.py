"""Keep what a worker's tasks have read of Parquet files on remote file systems.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from distributed import get_worker

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.parquet_files import read_through
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.reads.ranges import RangeCache
from dask_gpurt.worker import Layer


class KeptRanges:
    """Have the tasks of a worker read Parquet files through its cache.

    ``worker``: the Dask worker. The readers are wrapped for the whole process; calls from elsewhere pass
    through.
    """

    def __init__(self, worker: WorkerServer, cache: RangeCache, metrics: Metrics):
        self._worker = worker
        self._cache = cache
        self._metrics = metrics
        self._patches = PatchSet(Layer.READS)

    def install(self) -> None:
        """Apply to all reads from now on."""
        try:
            read_through(self._patches, self._fsspec, self._arrow)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.READS_NOT_KEPT, str(error))

    def uninstall(self) -> None:
        """Read as Dask does from now on, and forget everything."""
        self._patches.restore()
        self._cache.close()

    def _reading(self) -> Any:
        """Return a new call of a reader; None if none of this worker's tasks calls it."""
        try:
            mine = get_worker() is self._worker
        except ValueError:  # not a task
            return None
        return remote().Reading(self._cache, self._metrics) if mine else None

    def _fsspec(self, files: Any, read: Callable[[Any], Any]) -> Any:
        if (reading := self._reading()) is None:
            return read(files)
        return reading.run(partial(read, remote().CachedFiles(files, reading)), partial(read, files))

    def _arrow(
        self, wrapper: Any, filters: Any, columns: Any, schema: Any, read: Callable[[Any], Any]
    ) -> Any:
        if (reading := self._reading()) is None:
            return read(wrapper)

        def through() -> Any:
            return read(reading.fragment(wrapper.fragment, filters, columns, schema))

        return reading.run(through, partial(read, wrapper))


def remote() -> ModuleType:
    """Import how files are read through the cache, by the first such read: most clusters have none."""
    return import_module("dask_gpurt.reads.remote")
