"""Read, carry over and pickle facts about Parquet files that Dask caches in expressions.

Dask collects them as it plans a read: paths, sizes, statistics and a checksum.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any

from dask._expr import Expr
from dask._task_spec import Task
from dask.dataframe.dask_expr._expr import Literal
from dask.dataframe.dask_expr.io import parquet
from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine
from dask.dataframe.io.parquet.core import ParquetFunctionWrapper
from dask.tokenize import TokenizationError, tokenize
from fsspec.core import has_magic
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FileInfo

from dask_gpurt.dask_hooks.comparison import Seam
from dask_gpurt.dask_hooks.patch import Method, PatchSet
from dask_gpurt.dask_hooks.seams import READ_PARQUET, READS

#: Operands in which an expression caches facts about files; its name follows from the files themselves.
OF_FILES = frozenset({"_dataset_info_cache", "_pq_length_stats"})

#: A property in which a read keeps the numbers of rows of its partitions, which it has read from footers.
_LENGTHS = "_pq_length_stats"

#: The key of facts about files under which the runtime notes the state of these files.
_STATE = "gpurt-state"

#: How dask_cudf describes files: as Dask does, in pandas, and then each column is converted.
_META_OF_CUDF = Seam(
    "dask_cudf._legacy.io.parquet:CudfEngine._create_dd_meta",
    "cls dataset_info kwargs",
    bodies=("9ab98b16d3b7",),
)

#: Of the metadata of all columns of its files, a task that reads uses the name of the columns.
_READ_PART = Seam(
    "dask.dataframe.io.parquet.core:read_parquet_part",
    "fs engine meta part columns index kwargs",
    bodies=("e69ad0d3aba5",),
)

#: Operands that do not influence these facts.
_OF_COLUMNS = frozenset({"columns", "_partitions", "_series"})


def files_read(expr: Expr) -> dict[str, Any]:
    """Return the operands of a read that determine its facts about files."""
    given = zip(expr._parameters, expr.operands, strict=False)
    return {name: operand for name, operand in given if name not in OF_FILES | _OF_COLUMNS}


def known_of_files(expr: Expr) -> dict[str, Any] | None:
    """Return the facts about files that a read has cached; None if it has none."""
    found: dict[str, Any] | None = expr.operand("_dataset_info_cache")
    return found


def base_of_read(expr: Expr) -> Any:
    """Return the metadata of all columns of the files of a read."""
    return expr._dataset_info["base_meta"]


def tell_of_files(expr: Expr, known: dict[str, Any]) -> None:
    """Give a read the facts about files that another read has collected."""
    expr._dataset_info_cache = known


def look_at_files(
    look: Callable[[Expr], dict[str, Any]],
    expr: Expr,
    convert: Callable[[Any, Callable[[Any], Any]], Any],
    differs: Callable[[str], None],
) -> dict[str, Any]:
    """Return the facts about the files of a read, as Dask's function finds them.

    dask_cudf would convert each column of the metadata, which Dask then hashes, by kernels. Here it looks at
    the files as for pandas.

    ``look``: Dask's function.
    ``convert``: takes an empty frame of pandas, and the function of cudf that converts one; returns the frame
    of cudf, or None.
    ``differs``: takes how dask_cudf differs from the known one, which then looks at the files itself.
    """
    if isinstance(expr, parquet.ReadParquetFSSpec) and _is_engine_of_cudf(expr.engine):
        if (difference := difference_of_cudf()) is not None:
            differs(difference)
        elif (known := _as_for_pandas(look, expr, convert)) is not None:
            tell_of_files(expr, known)
            return known
    return look(expr)


def difference_of_cudf() -> str | None:
    """Return how dask_cudf describes files otherwise than the known one; None if it does not."""
    return _META_OF_CUDF.difference()


def _as_for_pandas(
    look: Callable[..., Any], expr: Expr, convert: Callable[..., Any]
) -> dict[str, Any] | None:
    plain: Any = object.__new__(type(expr))  # without a name, which would need the facts
    engine = expr._parameters.index("engine")
    plain.operands = [*expr.operands[:engine], ArrowDatasetEngine, *expr.operands[engine + 1 :]]
    known = dict(look(plain))
    if known["plan"]["empty"] or known["kwargs"].get("schema"):  # the first holds the metadata as a partition
        return None
    meta = convert(known["base_meta"], sys.modules["cudf"].from_pandas)
    return None if meta is None else {**known, "base_meta": meta}


def _is_engine_of_cudf(engine: type) -> bool:
    return f"{engine.__module__}:{engine.__qualname__}" == _META_OF_CUDF.name.rpartition(".")[0]


def copy_of_facts(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of facts about files that expressions of another thread may use at the same time.

    Pickling an expression empties the wrappers of its files for a moment, in which another thread would find
    nothing in them.
    """
    found = dict(known)
    if "fragments" in found:  # of Arrow's file systems
        found["fragments"] = [
            parquet.FragmentWrapper(wrapper.fragment, wrapper._filesystem) for wrapper in found["fragments"]
        ]
    return found


def forget_lengths(expr: Expr) -> None:
    """Have a read find the numbers of rows of its partitions again, as a new expression would."""
    vars(expr).pop(_LENGTHS, None)


def counts_rows(plan: Expr, expr: Expr) -> bool:
    """Return whether a plan has numbers of rows, from footers, in place of a read of the expression."""
    return _literals(plan) > _literals(expr)


def _literals(expr: Expr) -> int:
    return sum(isinstance(each, Literal) for each in expr.walk())


def checksum_of_files(expr: Expr) -> str | None:
    """Return the checksum of all files that an expression reads; None if it reads no Parquet files."""
    if not isinstance(expr, (parquet.ReadParquetFSSpec, parquet.ReadParquetPyarrowFS)):
        return None
    return str(expr.checksum)


def note_state_of_files(expr: Expr, known: dict[str, Any], states: Mapping[str, Any]) -> None:
    """Note in facts about files the state that the files had before they were read.

    On an Arrow file system Dask's checksum is of paths, sizes and times, which a replaced file may have too.
    """
    if isinstance(expr, parquet.ReadParquetPyarrowFS):
        known[_STATE] = tokenize(states)


def version_of_files(expr: Expr) -> tuple[str | None, str | None]:
    """Return what changes with the files that an expression reads.

    Raises TokenizationError if files may change without it.
    """
    checksum = checksum_of_files(expr)
    if not isinstance(expr, parquet.ReadParquetPyarrowFS):
        return checksum, None
    if (state := expr._dataset_info.get(_STATE)) is None:
        raise TokenizationError("the state of the files is not known")
    return checksum, state


def has_options(expr: Expr) -> bool:
    """Return whether the file system of a read has options, from the read or from fsspec's configuration."""
    files = expr._dataset_info.get("fs")  # none for Arrow's file systems
    return bool(expr.storage_options or getattr(files, "storage_options", None))


def state_of_a_file(expr: Expr) -> Mapping[str, Any] | None:
    """Return what the file system reports of one file of a read; None if it has no files.

    Raises FileNotFoundError if the file no longer exists.
    """
    facts = expr._dataset_info
    if isinstance(expr, parquet.ReadParquetPyarrowFS):
        files = facts.get("all_files")  # none if Dask has read a file of metadata in their place
        return {"size": files[0].size, "mtime": files[0].mtime_ns / 1e9} if files else None
    files = facts["ds"].files
    state: Mapping[str, Any] | None = facts["fs"].info(files[0]) if files else None
    return state


_packing = threading.Lock()


def renew_files(patches: PatchSet) -> None:
    """Have the tasks of workers in this process read each file on Arrow's file systems as it is then.

    Arrow keeps the footer of a file with its fragment. A task that shares the process of its client reads
    with the client's fragment, or with that of a plan that is kept, though the file may be another one by
    then. Dask pickles each plan, which empties the fragments, for each computation.
    """
    if (seam := READS["_fragment_to_table"]).difference() is None:
        patches.put(seam.owner(), seam.attribute, _renewing)


def _renewing(read: Method) -> Method:
    @wraps(read)
    def renewed(fragment_wrapper: Any, filters: Any, columns: Any, schema: Any) -> Any:
        return read(_renewed(fragment_wrapper), filters, columns, schema)

    return renewed


def _renewed(fragment: Any) -> Any:
    """Return the wrapper of a file as another process would receive it; unchanged if this one has."""
    if type(fragment) is not parquet.FragmentWrapper or fragment._fragment is None:
        return fragment
    unpickle, packed = _reduced(fragment)
    return unpickle(*packed)


def _reduced(wrapper: Any) -> Any:
    """Return how a wrapper is pickled: a copy, since packing empties a wrapper, which other threads may use.

    Dask keeps the last pickled file system by its address, which one with other credentials may have by now.
    """
    files = wrapper._filesystem or wrapper.fragment.filesystem
    with _packing:
        parquet.FragmentWrapper._filesystem_pickle_cache = -1, None
        return parquet.FragmentWrapper(wrapper.fragment, files).__reduce__()


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Return all that the result of a read depends on, but the contents of its files, which are local.

    Equal ones are pickled to the same bytes, so that two tasks could be one. None if it may be a call of
    another reader, or of an engine of the user.
    """
    if kwargs or len(args) != 2 or type(args[0]) is not ParquetFunctionWrapper:
        return None
    reader, part = args
    if type(reader.fs) is not LocalFileSystem or not _is_engine_of_cudf(reader.engine):
        return None
    pieces = part if isinstance(part, list) else [part]
    if any(type(piece) is not dict or has_magic(piece["piece"][0]) for piece in pieces):
        return None
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.fast = True  # else the bytes also tell which values are the same object
    try:
        pickler.dump((reader.columns, reader.index, reader.common_kwargs, pieces, reader.meta.columns.name))
    except Exception:  # whatever values of users raise: they are read without this
        return None
    return file.getvalue()


# ---- reads through other files --------------------------------------------------------------------

#: The file systems of Arrow that tell one version of a file from another, and the modules that have them.
ARROW_STORES = frozenset({"s3", "gcs", "abfs"})
_ARROW_STORES = (b"pyarrow._s3fs", b"pyarrow._gcsfs", b"pyarrow._azurefs")


def read_through(
    patches: PatchSet,
    fsspec: Callable[[Any, Callable[[Any], Any]], Any],
    arrow: Callable[[Any, Any, Any, Any, Callable[[Any], Any]], Any],
) -> None:
    """Have tasks read Parquet files that are not local in another way, unless by an engine of the user.

    ``fsspec``: called with a file system, and a function that reads by the file system that it is given. If
    that has a method ``table``, this is called for the table of each file: with its path, what else the table
    depends on, the columns, and a function that reads some columns.
    ``arrow``: called with the fragment of a file on a store, in Dask's wrapper, the filters, the columns, the
    schema, and a function that reads a fragment, in a wrapper or not, or some columns of it.
    Raises UnsupportedError if a reader differs from the known one.
    """

    def by_fsspec(read: Method) -> Method:
        @wraps(read)
        def reading(self: Any, part: Any) -> Any:
            if is_local(self.fs) or not _reads_by(self.engine):
                return read(self, part)
            return fsspec(self.fs, lambda files: read(_with_files(self, files), part))

        return reading

    def by_arrow(read: Method) -> Method:
        @wraps(read)
        def reading(fragment_wrapper: Any, filters: Any, columns: Any, schema: Any) -> Any:
            def of(fragment: Any, names: Any = columns) -> Any:
                return read(fragment, filters, names, schema)

            wrapper = _renewed(fragment_wrapper)
            if type(wrapper) is not parquet.FragmentWrapper:  # of another worker of this process
                return of(wrapper)
            is_stored = wrapper.fragment.filesystem.type_name in ARROW_STORES
            return arrow(wrapper, filters, columns, schema, of) if is_stored else of(wrapper)

        return reading

    patches.replace_all({READ_PARQUET: by_fsspec, READS["_fragment_to_table"]: by_arrow})


def _reads_by(engine: type) -> bool:
    """Return whether an engine reads files of a store only by the file system that it is given."""
    if engine is ArrowDatasetEngine:
        return True
    # libcudf may read from S3 itself, by URLs.
    return _is_engine_of_cudf(engine) and not sys.modules["cudf"].get_option("kvikio_remote_io")


def is_local(files: Any) -> bool:
    """Return whether a file system of fsspec, as Dask has it in a read, is this host's."""
    return isinstance(files, (LocalFileSystem, ArrowFSWrapper))


def _with_files(reader: Any, files: Any) -> Any:
    found = copy.copy(reader)
    found.fs = files
    if reader.engine is ArrowDatasetEngine and hasattr(files, "table"):
        found.engine = _OfTables
    return found


class _OfTables(ArrowDatasetEngine):
    """Read the tables of files by a method of their file system."""

    @classmethod
    def multi_support(cls) -> bool:
        """Return that several pieces make one table, as of the engine itself: Dask says no for subclasses."""
        return True

    @classmethod
    def _read_table(  # type: ignore[override]
        cls,
        path: Any,
        fs: Any,
        groups: Any,
        columns: Any,
        schema: Any,
        filters: Any,
        partitions: Any,
        *args: Any,
        **how: Any,
    ) -> Any:
        read: Any = super()._read_table

        wanted = [name for name in columns if isinstance(name, str)]
        unnamed = [name for name in columns if not isinstance(name, str)]  # None, for an index without a name
        # These are in each table, asked for or not. If they are, they may have other types.
        of_path = [each.name for each in partitions] if isinstance(partitions, list) else []
        options = groups, unnamed, schema, filters, partitions, args, how, [*filter(of_path.count, wanted)]

        def some(names: Any) -> Any:
            asked = [name for name in names if name in wanted]
            return read(path, fs, groups, [*asked, *unnamed], schema, filters, partitions, *args, **how)

        if not isinstance(path, str):
            return some(wanted)
        return fs.table(path, options, list(dict.fromkeys([*wanted, *of_path])), some)


#: A row group of a file, by path and number, and whether the file is local; all of it if the number is None.
Piece = tuple[str, int | None, bool]


def pieces_read(spec: Any, *, local: bool) -> list[tuple[Piece, Sequence[str]]]:
    """Return what a task reads of Parquet files on stores, and local ones if wanted. In some microseconds.

    With each piece come the names of its columns; none if all are read, or if they are not known.
    """
    found: list[tuple[Piece, Sequence[str]]] = []
    left: list[tuple[Any, Sequence[str]]] = [(spec, ())]
    while left:
        node, columns = left.pop()
        if isinstance(node, Task):
            if type(node.func) is ParquetFunctionWrapper:
                if local or not is_local(node.func.fs):
                    columns = node.func.columns or ()
                    found += [(piece, columns) for piece in _pieces_of_parts(node.func.fs, node.args[0])]
            elif node.has_subgraph():
                left += [(each, ()) for each in node.args[0].values() if each.data_producer]
            else:
                given = [*node.args, *node.kwargs.values()]
                named = next(filter(_is_names, given), columns)
                left += [(each, named) for each in given]
        elif type(node) is parquet.FragmentWrapper:
            path, is_on_host = _path(node)
            if path is not None and (local or not is_on_host):
                found.append(((path, None, is_on_host), columns))
        elif type(node) in (list, tuple):  # of several files
            left += [(each, columns) for each in node]
    return found


def _is_names(value: Any) -> bool:
    return type(value) is list and bool(value) and all(type(each) is str for each in value)


def _pieces_of_parts(files: Any, parts: Any) -> Iterator[Piece]:
    is_on_host = is_local(files)
    for part in parts if isinstance(parts, list) else (parts,):
        path, groups, *_ = part["piece"]
        yield from ((path, group, is_on_host) for group in groups or (None,))


def _path(wrapper: Any) -> tuple[str | None, bool]:
    """Return the path of a file of Arrow's file systems, if they are known, and whether it is local."""
    if wrapper._fragment is not None:
        kind = wrapper._fragment.filesystem.type_name
        return wrapper._fragment.path if kind in ARROW_STORES or kind == "local" else None, kind == "local"
    _, path, files, *_ = wrapper._fragment_packed
    # Unpickling a file system makes a client of the store, and takes long.
    is_on_host = b"file:///" in files
    return path if is_on_host or any(module in files for module in _ARROW_STORES) else None, is_on_host


# ---- pickling -------------------------------------------------------------------------------------


def _reduced_read(read: Any) -> Any:
    """Return how a read on Arrow's file systems is pickled: with facts about its files."""
    return _with_statistics, (_statistics_of_files(read), *read.__reduce__())


def _statistics_of_files(read: Expr) -> dict[str, Any]:
    """Return the statistics of a read's files that Dask has collected, by the token of the file."""
    known: dict[str, Any] = vars(parquet)["_STATS_CACHE"]
    # There is no list of files if Dask has read a file of metadata in their place.
    tokens = map(tokenize, read._dataset_info.get("all_files", ()))
    return {token: known[token] for token in tokens if token in known}


def _with_statistics(
    statistics: Mapping[str, Any], reconstruct: Callable[..., Expr], operands: tuple[Any, ...]
) -> Expr:
    """Return a read from Arrow's file system, with the statistics that it was planned with.

    The number of its partitions depends on them. Dask collects them as it plans, in a dict of the process, in
    which the scheduler finds them if it is of the same process. If it did not, it would compute them through
    the client, which waits for the scheduler.
    """
    for token, found in statistics.items():
        vars(parquet)["_STATS_CACHE"].setdefault(token, found)
    return reconstruct(*operands)


def _reduced_info(info: FileInfo) -> Any:
    return partial(FileInfo, size=info.size, mtime_ns=info.mtime_ns), (info.path, info.type)


# Arrow pickles none, so cloudpickle failed, by which Dask sends plans that call functions of ``__main__``.
copyreg.pickle(FileInfo, _reduced_info)


@cache
def uses_the_name_only() -> bool:
    """Return whether a task that reads uses nothing of its metadata but the name of the columns."""
    return _READ_PART.difference() is None


def _reduced_reader(reader: ParquetFunctionWrapper) -> Any:
    """Return how the function of a task that reads is pickled: without metadata that it does not use.

    Dask pickles that with each task. Most of the time of unpickling a task went into it, and a frame of cudf
    takes memory of the device for each column.
    """
    state = dict(vars(reader))
    if uses_the_name_only():
        state["meta"] = SimpleNamespace(columns=SimpleNamespace(name=reader.meta.columns.name))
    return copyreg.__newobj__, (ParquetFunctionWrapper,), state  # type: ignore[attr-defined]


copyreg.pickle(ParquetFunctionWrapper, _reduced_reader)


def pickled(value: Any, others: Mapping[type, Callable[[Any], Any]] | None = None) -> bytes:
    """Return a pickled expression, or facts about files. Other threads may use it meanwhile.

    ``others``: by class, how values are reduced that this module does not know.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    kind = parquet.ReadParquetPyarrowFS
    reads = dict.fromkeys((kind, *kind.__subclasses__()), _reduced_read)
    # By class, since a function would be called with each of thousands of values.
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        **(others or {}),
        **reads,
        parquet.FragmentWrapper: _reduced,
    }
    pickler.dump(value)
    return file.getvalue()
