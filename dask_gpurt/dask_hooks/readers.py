"""Wrap the functions by which tasks of dataframes read and write files, and tell which begin with a read.

A function is wrapped when its module has been imported, by a worker that has got a task which calls it: no
library is imported for this. Where possible, the functions that tasks refer to by name are left as they are,
so that graphs made before and after are pickled as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from dask._task_spec import NestedContainer, Task

from dask_gpurt.dask_hooks.comparison import Seam
from dask_gpurt.dask_hooks.patch import PatchSet, Wrap
from dask_gpurt.dask_hooks.seams import READ_PARQUET, READS, WRITE_PARQUET

_DASK_CUDF = "dask_cudf.io.parquet:"
_EXPR = "dask.dataframe.dask_expr.io."


class Reader(NamedTuple):
    """Describe a function that reads, or writes.

    Attributes
    ----------
    seam
        What is wrapped.
    called_by
        The functions and classes in tasks that begin by calling it, as ``module:name``: of a writer none.
    calls_users
        Tells of a call, by its arguments, whether it calls code of users; that is not wrapped.
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


#: Those of Dask are listed among its seams. Those of dask_cudf are compared when it has been imported.
READERS = (
    Reader(READ_PARQUET, ("dask.dataframe.io.parquet.core:ParquetFunctionWrapper",)),
    Reader(WRITE_PARQUET, (), _names_files),  # for cudf too
    Reader(READS["_fragment_to_table"], (_EXPR + "parquet:ReadParquetPyarrowFS._fragment_to_table",)),
    Reader(READS["_load_multiple_files"], (_EXPR + "io:FusedParquetIO._load_multiple_files",)),
    Reader(READS["pandas_read_text"], (), _csv_calls_users),
    Reader(READS["read_block_from_file"], ("dask.bytes.core:read_block_from_file",)),
    Reader(
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


class Readers:
    """Wrap readers in this process, as one set of replacements.

    Parameters
    ----------
    wrap
        Makes what is called in place of a reader.
    failed
        Is told of a reader that is not as it is known, once.
    """

    def __init__(self, patches: PatchSet, wrap: Wrap, failed: Callable[[str], None]) -> None:
        self._patches = patches
        self._wrap = wrap
        self._failed = failed
        self._left = list(READERS)
        self._names: set[str] = set()

    def begins_with_read(self, spec: Any) -> bool:
        """Return whether the first function that a task calls is a reader; the task has no dependencies."""
        self.look()
        return _begins(spec, self._names) is True

    def look(self) -> None:
        """Wrap the readers whose modules have been imported meanwhile."""
        for reader in list(self._left):
            module = sys.modules.get(reader.seam.name.partition(":")[0])
            # Another thread may be in the middle of importing it.
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
    """Return a way to wrap a reader that leaves calls alone which call code of users."""

    def wrap_some(reader: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = wrap(reader)

        def read(*args: Any, **kwargs: Any) -> Any:
            return (reader if calls_users(*args, **kwargs) else wrapped)(*args, **kwargs)

        return read

    return wrap_some


def _begins(node: Any, names: Collection[str]) -> bool | None:
    """Return whether the first function that a node calls is one of these; None where it calls none."""
    if not isinstance(node, Task):
        return None
    if node.has_subgraph():
        found = [_begins(inner, names) for inner in node.args[0].values() if not inner.dependencies]
    elif _name(node.func) in names:
        return True
    else:
        found = [_begins(value, names) for value in (*node.args, *node.kwargs.values())]
    called = [one for one in found if one is not None]
    if called:
        return all(called)
    return None if node.has_subgraph() or isinstance(node, NestedContainer) else False


def _name(function: Any) -> str:
    """Return the module and the name of a function, or of the class of another callable."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
