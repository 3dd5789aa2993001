"""Keep what tasks read of Parquet files: decoded columns on a GPU, ranges of remote files on hosts.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from distributed import get_worker

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.parquet_files import read_through
from dask_gpurt.dask_hooks.readers import PATH_ENGINE
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.device.base import Beside
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.reads.caches import RangeCache
from dask_gpurt.reads.columns import Asked, ColumnCache, ColumnRead
from dask_gpurt.worker import Layer

#: The most calls whose frames can be made again.
MAX_CALLS = 1024


class Table(NamedTuple):
    """Hold a table that was read, what was asked for, and the versions of the files that it is of."""

    asked: Asked
    versions: tuple[Hashable, ...]
    table: Any


class KeptColumns:
    """Read Parquet files through a cache of their columns.

    ``tables``: returns the module for what the readers of the device return.
    ``spare``: a context in which allocations fail rather than have data spilled for them.
    """

    def __init__(
        self,
        cache: ColumnCache,
        tables: Callable[[], Any],
        spare: Callable[[], AbstractContextManager[None]],
        metrics: Metrics,
    ) -> None:
        self._cache = cache
        self._tables = tables
        self._spare = spare
        self._metrics = metrics
        #: How the frames of calls of Dask's reader are made of columns, and of which.
        self._lock = threading.Lock()
        self._frames: dict[Hashable, tuple[Asked, tuple[Hashable, ...], Any]] = {}

    def read(
        self,
        asked: Asked,
        options: Any,
        plainly: Callable[[], Any],
        beside: Beside,
        found: Callable[[Table], object] = lambda table: None,
    ) -> Any:
        """Return what a call of libcudf's reader would; None if it has to be made.

        ``asked``, ``options``: what it asks for, and libcudf's options.
        ``plainly``: makes the call, on the stream of ``beside``.
        ``found``: called with the table if that follows from the versions of its files.
        """

        def read(names: Sequence[str] | None) -> Any:
            if names is None:
                return plainly()
            options.set_column_names(list(names))
            try:
                return plainly()
            finally:
                options.set_column_names(list(asked.columns or ()))

        reading = self._reading(asked, read)
        if (table := self._of(reading, lambda: beside)) is not None and reading.versions is not None:
            found(Table(asked, reading.versions, table))
        return table

    def frame(self, call: Hashable, beside: Callable[[], Beside]) -> Any:
        """Return the frame of a call of Dask's reader that was made before; None if it has to be made again.

        It is if a file has been replaced, or a column is not kept.
        """
        asked, versions, made = self._frames.get(call, _UNKNOWN)
        if made is None:
            return None
        reading = self._reading(asked, _decoding)
        try:
            if not reading.look() or reading.versions != versions:
                return None
        except OSError:  # a file that is not there any more
            return None
        return self._of(reading, beside, made.frame)

    def made(self, call: Hashable, tables: Sequence[Table | None], frame: Any) -> None:
        """Note the frame of a call of Dask's reader that has read one table of local files.

        ``tables``: the tables that it has read; None for those of other reads.
        """
        if len(tables) != 1 or (read := tables[0]) is None or read.asked.stored:
            return
        if self._frames.get(call, _UNKNOWN)[:2] == (read.asked, read.versions):
            return
        made = None
        try:
            made = self._tables().FrameOfRead.of(frame, read.table)
        except Exception as error:  # whatever has moved in the library
            self._metrics.fallback(Fallback.READS_NOT_KEPT, repr(error))
        with self._lock:
            self._frames[call] = read.asked, read.versions, made
            if len(self._frames) > MAX_CALLS:
                del self._frames[next(iter(self._frames))]

    def _reading(self, asked: Asked, read: Callable[[Sequence[str] | None], Any]) -> ColumnRead:
        return ColumnRead(self._cache, self._tables(), asked, read, self._spare, self._metrics)

    def _of(
        self,
        reading: ColumnRead,
        start: Callable[[], Beside],
        made: Callable[[Any], Any] = lambda table: table,
    ) -> Any:
        """Return what is made of the table of a read, for the user's stream; None if the library has to read.

        ``start``: returns the stream to read on.
        """
        try:
            beside = start()
            try:
                found = reading.read(beside.stream)
            except BaseException:
                beside.join(())  # of columns that others may drop, copies may still run
                raise
            beside.join([*found.columns, *reading.new_columns])
            result = made(found)
        except (MemoryError, _NotKeptError) as error:
            if isinstance(error, MemoryError):
                raise
            return None
        except Exception as error:  # whatever the library raises: it may be able to read as it was asked
            self._metrics.fallback(Fallback.READS_NOT_KEPT, repr(error))
            return None
        reading.keep()
        return result


_UNKNOWN = Asked((), None), (), None


class _NotKeptError(Exception):
    """Columns would have to be decoded."""


def _decoding(names: Sequence[str] | None) -> Any:
    raise _NotKeptError


def asked_of(
    filepaths_or_buffers: Sequence[Any],
    engine: str,
    columns: Sequence[Any] | None = None,
    row_groups: Sequence[Any] | None = None,
    use_pandas_metadata: bool | None = None,
    nrows: int | None = None,
    skip_rows: int | None = None,
    allow_mismatched_pq_schemas: bool = False,
    ignore_missing_columns: bool = True,
    case_sensitive_names: bool = True,
    filters: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Asked | None:
    """Return what a call of cudf's reader asks for; None if its result depends on anything else."""
    is_plain = nrows is None and skip_rows is None and filters is None and case_sensitive_names
    if engine != PATH_ENGINE or not is_plain or allow_mismatched_pq_schemas or args or kwargs:
        return None
    paths = list(filepaths_or_buffers)
    remote = sys.modules.get("dask_gpurt.reads.remote")  # imported by the first read of a store
    stored = () if remote is None else remote.handed_out(paths)
    # Dask asks for None, too, as for the index of a file that pandas has written; libcudf finds none.
    names = None if columns is None else tuple(name for name in columns if name is not None)
    if not (stored or _are_distinct(paths, "://")) or (names is not None and not _are_distinct(names, ".")):
        return None
    groups: list[Any] = [None] * len(paths) if row_groups is None else list(row_groups)
    if len(groups) != len(paths) or not all(each is None or isinstance(each, list) for each in groups):
        return None
    options = bool(use_pandas_metadata), ignore_missing_columns
    numbers = [each if each is None else tuple(map(int, each)) for each in groups]
    files = [file.source.file for file in stored] or paths
    parts = tuple((file, each, options) for file, each in zip(files, numbers, strict=True))
    return Asked(parts, names, stored)


def _are_distinct(names: Sequence[Any], without: str) -> bool:
    """Return whether there are names, all different and without some characters, such as those of a URL."""
    are_names = all(isinstance(name, str) and without not in name for name in names)
    return bool(names) and are_names and len({*names}) == len(names)


# ---- ranges of remote files --------------------------------------------------------------------------


class KeptRanges:
    """Have the tasks of a worker read Parquet files through its cache.

    ``columns``: keeps the columns of tables on hosts; None where others do.
    ``worker``: the Dask worker. The readers are wrapped for the whole process; calls from elsewhere pass
    through.
    """

    def __init__(
        self, worker: WorkerServer, cache: RangeCache, metrics: Metrics, columns: ColumnCache | None = None
    ):
        self._worker = worker
        self._cache = cache
        self._columns = columns
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
        return remote().Reading(self._cache, self._metrics, self._columns) if mine else None

    def _fsspec(self, files: Any, read: Callable[[Any], Any]) -> Any:
        if (reading := self._reading()) is None:
            return read(files)
        return reading.run(partial(read, remote().CachedFiles(files, reading)), partial(read, files))

    def _arrow(self, wrapper: Any, filters: Any, columns: Any, schema: Any, read: Callable[..., Any]) -> Any:
        if (reading := self._reading()) is None:
            return read(wrapper)

        def through() -> Any:
            return reading.of_fragment(wrapper.fragment, filters, columns, schema, read)

        return reading.run(through, partial(read, wrapper))


def remote() -> ModuleType:
    """Import how files are read through the cache, by the first such read: most clusters have none."""
    return import_module("dask_gpurt.reads.remote")
