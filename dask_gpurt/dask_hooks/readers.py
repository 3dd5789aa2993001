"""Wrap the functions by which dataframe tasks read and write files, and find tasks that begin with a read.

A function is wrapped once its module has been imported, which a worker does when it receives a task that
calls it. So this imports no library by itself. Functions that tasks refer to by name are left alone if
possible, so that graphs are pickled as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

from dask._task_spec import NestedContainer, Task

from dask_gpurt.dask_hooks.comparison import Seam
from dask_gpurt.dask_hooks.patch import PatchSet, Wrap
from dask_gpurt.dask_hooks.seams import READ_PARQUET, READS, WRITE_PARQUET

_DASK_CUDF = "dask_cudf.io.parquet:"
_EXPR = "dask.dataframe.dask_expr.io."


class FileReader(NamedTuple):
    """Describe a function that reads or writes files.

    ``seam``: the function to wrap.
    ``called_by``: the functions and classes in tasks that begin by calling it, or do nothing else if it is a
    writer, as ``module:name``.
    ``calls_users``: returns whether a call with these arguments calls user code. Such calls are not wrapped.
    """

    seam: Seam
    called_by: tuple[str, ...]
    calls_users: Callable[..., bool] | None = None


def _csv_calls_users(
    reader: Any, block: Any, header: Any, kwargs: Mapping[str, Any], *_: Any, **__: Any
) -> bool:
    given = (kwargs.get(name) for name in ("skiprows", "usecols", "on_bad_lines", "date_parser"))
    return bool(kwargs.get("converters")) or any(map(callable, given))


def _names_files(writer: Any, *_: Any, **__: Any) -> bool:
    return writer.name_function is not None


#: Dask's readers are listed in the seams too. Those of dask_cudf are compared once it has been imported.
READERS = (
    FileReader(READ_PARQUET, ("dask.dataframe.io.parquet.core:ParquetFunctionWrapper",)),
    FileReader(READS["_fragment_to_table"], (_EXPR + "parquet:ReadParquetPyarrowFS._fragment_to_table",)),
    FileReader(READS["_load_multiple_files"], (_EXPR + "io:FusedParquetIO._load_multiple_files",)),
    FileReader(READS["pandas_read_text"], (), _csv_calls_users),
    FileReader(READS["read_block_from_file"], ("dask.bytes.core:read_block_from_file",)),
    FileReader(
        Seam(
            _DASK_CUDF + "CudfReadParquetPyarrowFS._fragments_to_cudf_dataframe",
            "fragment_wrappers filters columns schema",
        ),
        (
            _DASK_CUDF + "CudfReadParquetPyarrowFS._fragments_to_cudf_dataframe",
            _DASK_CUDF + "CudfFusedParquetIO._load_multiple_files",
        ),
    ),
)

#: The functions by which tasks write files, with pandas and with cudf.
WRITERS = (
    FileReader(WRITE_PARQUET, ("dask.dataframe.io.parquet.core:ToParquetFunctionWrapper",), _names_files),
)

#: The function of libcudf that its Parquet readers call, with the CUDA stream to use.
STREAM_READERS = (
    FileReader(Seam("pylibcudf.io.parquet:read_parquet", "options stream mr parquet_metadatas"), ()),
)

#: The function of cudf that calls that one, with all that the result depends on, and its engine that does.
PATH_ENGINE = "cudf"
PATH_READERS = (
    FileReader(
        Seam(
            "cudf.io.parquet:_read_parquet",
            "filepaths_or_buffers engine columns row_groups use_pandas_metadata nrows skip_rows "
            "allow_mismatched_pq_schemas ignore_missing_columns case_sensitive_names filters args kwargs",
        ),
        (),
    ),
)


class Readers:
    """Wrap the readers of this process, with one patch set.

    ``wrap``: takes a reader and returns its replacement.
    ``failed``: called once for each reader that differs from the known one, with the difference.
    ``readers``: the functions to wrap.
    """

    def __init__(
        self,
        patches: PatchSet,
        wrap: Wrap,
        failed: Callable[[str], None],
        readers: Iterable[FileReader] = READERS,
    ) -> None:
        self._patches = patches
        self._wrap = wrap
        self._failed = failed
        self._left = list(readers)
        self._names: set[str] = set()

    def begins_with_read(self, spec: Any) -> bool:
        """Return whether the first function that a task calls is one of these."""
        self.wrap_imported()
        return _begins(spec, self._names) is True

    def ends_with_write(self, spec: Any) -> bool:
        """Return whether the last function that a task calls is one of these."""
        self.wrap_imported()
        return _last(spec) in self._names

    def wrap_imported(self) -> None:
        """Wrap the readers whose modules have been imported since the last call."""
        for reader in list(self._left):
            module = sys.modules.get(reader.seam.name.partition(":")[0])
            # Another thread may still be importing the module; wrap it on the next call.
            if module is None or getattr(module.__spec__, "_initializing", False):
                continue
            self._left.remove(reader)
            if (difference := reader.seam.difference()) is not None:
                self._failed(difference)
                continue
            wrap = self._wrap if reader.calls_users is None else _unless(reader.calls_users, self._wrap)
            self._patches.put(reader.seam.owner(), reader.seam.attribute, wrap)
            self._names |= set(reader.called_by)


def _unless(calls_users: Callable[..., bool], wrap: Wrap) -> Wrap:
    """Return a wrapper that bypasses the replacement for calls into user code."""

    def wrap_some(reader: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = wrap(reader)

        def read(*args: Any, **kwargs: Any) -> Any:
            return (reader if calls_users(*args, **kwargs) else wrapped)(*args, **kwargs)

        return read

    return wrap_some


def _begins(node: Any, names: Collection[str]) -> bool | None:
    """Return whether the first function that a node calls has one of the names; None if it calls none."""
    if not isinstance(node, Task):
        return None
    if node.has_subgraph():
        graph, _, inputs = node.args[:3]
        found = [_begins(inner, names) for inner in graph.values() if inner.dependencies <= {*inputs}]
    elif _name(node.func) in names and _is_as_imported(node.func):
        return True
    else:
        found = [_begins(value, names) for value in (*node.args, *node.kwargs.values())]
    called = [one for one in found if one is not None]
    if called:
        return all(called)
    return None if node.has_subgraph() or isinstance(node, NestedContainer) else False


def _last(node: Any) -> str | None:
    """Return ``module:name`` of the last function that a node calls, if there is one and it has a name."""
    while isinstance(node, Task) and node.has_subgraph():
        node = node.args[0][node.args[1]]
    return _name(node.func) if isinstance(node, Task) else None


def _is_as_imported(function: Any) -> bool:
    """Return whether a call of this reader is a call of what its module has now, and so passes the wrapper.

    A task may hold the function from before it was wrapped: by reference where client and worker share a
    process, or as a copy, since cloudpickle sends a function whose module has another one by value.
    """
    named = _named(function)
    module, _, path = f"{named.__module__}:{named.__qualname__}".partition(":")
    return bool(reduce(getattr, path.split("."), sys.modules[module]) == named)


def _named(function: Any) -> Any:
    """Return what has the name of a callable: itself, or its class."""
    while isinstance(function, partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def _name(function: Any) -> str | None:
    """Return ``module:name`` of a function, or of the class of another callable; None if it has none."""
    try:
        named = _named(function)
        return f"{named.__module__}:{named.__qualname__}"
    # Methods of built-in types have no module, and attributes of users' callables may raise anything. All
    # readers have both names.
    except Exception:
        return None
