"""Find the reads of Parquet files in a plan, and change the number of their partitions.

Dask puts files together in the step that it calls tuning, between simplifying a plan and lowering it.

Decisions and their figures: ``docs/decisions/partitions.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from dask._expr import Expr
from dask._task_spec import List, Task
from dask.dataframe.dask_expr._repartition import Repartition, RepartitionToFewer
from dask.dataframe.dask_expr._shuffle import BaseSetIndexSortValues
from dask.dataframe.dask_expr.io import parquet
from dask.dataframe.dask_expr.io.io import FusedIO, FusedParquetIO
from dask.dataframe.dispatch import concat
from dask.typing import Key
from dask.utils import parse_bytes
from fsspec.implementations.local import LocalFileSystem as FsspecFiles
from pyarrow.fs import LocalFileSystem as ArrowFiles

from dask_gpurt.dask_hooks.dictionary_reads import with_dictionaries
from dask_gpurt.dask_hooks.planning import is_sequence, keys_of

#: The stages of an optimisation that come after tuning.
LOWERED = ("physical", "simplified-physical", "fused")
#: The attribute of a read that has its files.
_FILES = "_gpurt_files"
#: Dask's class for several files as one partition, for reads of pandas that it leaves as they are.
FUSED: dict[type, type] = {parquet.ReadParquetFSSpec: FusedIO, parquet.ReadParquetPyarrowFS: FusedParquetIO}


class FewerPartitions(FusedIO):
    """Read the files of a table as a given number of partitions.

    The operands are Dask's read, its class for a read of several files as one partition, which makes the
    tasks, and the number; and, if rows are to have the labels that they have with Dask, Dask's read in the
    plan. That numbers the rows of each of its partitions, so that these are read one by one.
    """

    _parameters = ["_expr", "kind", "count", "labelled"]
    _defaults = {"labelled": None}

    @property
    def _load_multiple_files(self) -> Any:
        return self.kind._load_multiple_files

    @property
    def _fusion_buckets(self) -> list[Any]:
        read, _, _, labelled = self.operands
        of_dask = [[at] for at in read._partitions] if labelled is None else buckets_of(labelled)
        return [list(chain(*of_dask[start:end])) for start, end in self._bounds(len(of_dask))]

    def _bounds(self, number: int) -> Iterator[tuple[int, int]]:
        return pairwise(RepartitionToFewer._compute_partition_boundaries(self.operands[2], number))

    def _task(self, name: Key, index: int) -> Task:
        if (labelled := self.operands[3]) is None:
            task: Task = self.kind._task(self, name, index)
            return task
        start, end = list(self._bounds(labelled.npartitions))[index]
        parts = [labelled._task(name, at) for at in range(start, end)]
        return Task(name, concat, List(*parts), _data_producer=True)


def buckets_of(expr: Any) -> list[list[int]]:
    """Return which files are read as each partition of what Dask reads, by their numbers in the read."""
    return expr._fusion_buckets if isinstance(expr, FusedIO) else [[at] for at in expr._partitions]


def lower(tuned: Expr, stage: str) -> Expr:
    """Take a tuned plan through the steps of ``optimize_until`` that are left."""
    expr = tuned.lower_completely()
    if stage == "physical":
        return expr
    expr = expr.simplify()
    return expr if stage == "simplified-physical" else expr.fuse()


def tuned_to_stay(given: Expr, changed: Expr, optimise: Callable[[Expr, str], Expr]) -> Expr:
    """Return the tuned plan of results that stay on the cluster, in the partitions that they were given.

    A collection is made of each of several results with the partitions that it had before. Dask's tuning
    leaves fewer of these where it reads several files as one, and computing such a collection fails:
    ``client.persist(table[["key"]])``, and with files in many partitions also ``table[["key"]].persist()``.

    ``given``: the results, a sequence of them or one, as Dask has been asked for them.
    ``changed``: what has become of them so far.
    ``optimise``: takes a plan to a stage.
    """
    tuned = optimise(changed, "tuned-logical")
    if not is_sequence(given) or not any(isinstance(each, FusedIO) for each in tuned.walk()):
        return tuned
    is_same = list(map(len, keys_of(tuned))) == list(map(len, keys_of(given)))
    return tuned if is_same else optimise(changed, "simplified-logical")


def is_whole(results: Expr) -> bool:
    """Return whether each result is a single partition, with unknown labels at its ends.

    Dask finds the ends of a repartitioned frame by planning it, which would ask this again, and those of a
    sorted one by computing it: these count as divided.
    """
    if any(isinstance(each, (Repartition, BaseSetIndexSortValues)) for each in results.walk()):
        return False
    each = results.operands if is_sequence(results) else [results]
    return all(result.npartitions == 1 and not result.known_divisions for result in each)


def is_idle(expr: Any) -> bool:
    """Return whether an expression repartitions a frame into as many partitions as it has.

    Tuning adds these, so that a read of several files as one partition and what is combined with it have the
    same number.
    """
    if type(expr) is not Repartition or expr.new_divisions is not None:
        return False
    return bool(expr.new_partitions == expr.frame.npartitions)


class ParquetRead(NamedTuple):
    """Hold a read of Parquet files as Dask has planned it.

    ``expr``: the expression in the plan: `read`, or Dask's read of several of its files as one partition.
    ``read``: Dask's read of each file as a partition.
    ``kind``: Dask's class for a read of several files as one partition.
    """

    expr: Any
    read: Any
    kind: type

    @property
    def is_of_cudf(self) -> bool:
        """Return whether dask_cudf reads the files."""
        return type(self.read).__module__.partition(".")[0] == "dask_cudf"

    @property
    def blocksize(self) -> int:
        """Return the bytes of a partition that dask_cudf aims at; 0 for pandas."""
        return int(parse_bytes(self.read.blocksize)) if self.is_of_cudf else 0

    @property
    def numbers_files(self) -> bool:
        """Return whether the rows of each file are numbered, however files are put together."""
        return self.kind is FusedIO

    def with_partitions(self, count: int, *, labelled: bool = False) -> Expr:
        """Return the read with another number of partitions.

        ``labelled``: whether the rows are to have the labels that they have with Dask.
        """
        like = self.expr if labelled else None
        return FewerPartitions(self.read, self.kind, count, like)  # type: ignore[no-untyped-call]


def parquet_reads(plan: Expr) -> dict[str, ParquetRead]:
    """Return the reads of a tuned plan whose files can be put together, by name.

    Left out are those of dask_cudf with ``blocksize=None``, which asks for each file as a partition, and
    those from object storage, where one task would wait for one file after the other.
    """
    found = {}
    for expr in plan.walk():
        read, kind = expr, FUSED.get(type(expr))
        if isinstance(expr, FusedIO) and type(expr) is not FewerPartitions:
            read, kind = expr.operand("_expr"), type(expr)
        is_parquet = isinstance(read, (parquet.ReadParquetFSSpec, parquet.ReadParquetPyarrowFS))
        if kind is not None and is_parquet and not expr.known_divisions and is_local(read):
            found[str(expr._name)] = ParquetRead(expr, read, kind)
    return found


def is_local(read: Any) -> bool:
    """Return whether the files of a read are on a file system of this host."""
    if isinstance(read, parquet.ReadParquetPyarrowFS):
        return type(read.fs) is ArrowFiles
    return type(read._dataset_info.get("fs")) is FsspecFiles


def read_of(expr: Any) -> Any | None:
    """Return Dask's read of each file as a partition, if an expression is that or a read of several."""
    while isinstance(expr, FusedIO):
        expr = expr.operand("_expr")
    is_parquet = isinstance(expr, (parquet.ReadParquetFSSpec, parquet.ReadParquetPyarrowFS))
    return expr if is_parquet else None


def needed_columns(read: Any) -> tuple[Hashable, ...]:
    """Return the columns that are read, those of the index included."""
    return tuple(dict.fromkeys([*read.columns, *_index_columns(read)]))


def exact_columns(read: Any) -> tuple[Hashable, ...]:
    """Return the columns that are read which may have another dtype in pandas where there are nulls.

    Those of categories and of nullable numbers have the same. Of others the files tell, not what Dask knows,
    which it has looked up as the collection was created.
    """
    meta = read._meta.to_frame() if read._meta.ndim == 1 else read._meta
    same = {name for name, dtype in meta.dtypes.items() if _holds_nulls(dtype)}
    return tuple(name for name in needed_columns(read) if name not in same)


def count_columns(read: Any) -> int:
    """Return the number of columns in the files of a read."""
    return len(read._dataset_info["schema"].names)


def _holds_nulls(dtype: Any) -> bool:
    is_category = type(dtype).__name__ == "CategoricalDtype"  # of pandas or cudf
    return is_category or (not isinstance(dtype, np.dtype) and dtype.kind in "iufb")


def _index_columns(read: Any) -> list[Hashable]:
    """Return the columns in the files that become the index."""
    schema = read._dataset_info["schema"]
    if isinstance(read, parquet.ReadParquetPyarrowFS):
        found = [read._meta.index.name]
    else:
        found = list(read._dataset_info["index"] or ())
    return [name for name in found if name in schema.names]


def is_integer(read: Any, column: Hashable) -> bool:
    """Return whether a column of a read is of signed integers, of numpy's dtypes."""
    meta = read._meta[column] if read._meta.ndim == 2 else read._meta
    return isinstance(meta.dtype, np.dtype) and meta.dtype.kind == "i"


def share_of_files(read: Any) -> float:
    """Return the share of its files that a read takes: less than 1 if partitions are left out."""
    return len(read._partitions) / max(len(read._divisions()) - 1, 1)


def files_of_partitions(read: Any) -> list[str] | None:
    """Return the file that each partition of a read is of; None if one is of several files, or unknown."""
    files = [_files_at(read, at) for at in read._partitions]
    return [each[0] for each in files] if all(len(each) == 1 for each in files) else None


def tells_files(read: Any) -> bool:
    """Return whether it is known of which files each partition of a read is."""
    return all(_files_at(read, at) for at in read._partitions)


def _files_at(read: Any, at: int) -> list[str]:
    """Return the files that one of all partitions of a read is of; none if they are unknown."""
    if isinstance(read, parquet.ReadParquetPyarrowFS):
        return [read.fragments[at].path]
    part = read._plan["parts"][at]
    pieces = part if isinstance(part, list) else [part]
    if not all(isinstance(piece, dict) and isinstance(piece.get("piece"), tuple) for piece in pieces):
        return []
    files = [piece["piece"][0] for piece in pieces]
    return list(dict.fromkeys(files)) if all(isinstance(file, str) for file in files) else []


def files_of(read: Any) -> Sequence[str]:
    """Return the files of a read, whether or not all of their partitions are read."""
    if (known := vars(read).get(_FILES)) is None:  # rules ask several times, and there may be hundreds
        known = vars(read)[_FILES] = tuple(_files_of(read))
    found: tuple[str, ...] = known
    return found


def _files_of(read: Any) -> list[str]:
    facts = read._dataset_info
    if not isinstance(read, parquet.ReadParquetPyarrowFS):
        of_parts = (file for at in range(len(read._plan["parts"])) for file in _files_at(read, at))
        return list(dict.fromkeys([*facts["ds"].files, *of_parts]))
    if "all_files" in facts:
        return [info.path for info in facts["all_files"]]
    return [wrapper.fragment.path for wrapper in facts["fragments"]]


def local_reads(plan: Expr) -> Iterator[Any]:
    """Yield Dask's reads of files on file systems of this host."""
    return (read for read in map(read_of, plan.walk()) if read is not None and is_local(read))


def local_files(expr: Expr) -> list[str]:
    """Return all files on file systems of this host that an expression reads."""
    return sorted({path for read in local_reads(expr) for path in files_of(read)})


class CodedRead(FusedIO):
    """Read the files of a table, with some columns as categories.

    The operands are the read and the names of the columns. Whatever takes the rows has to know: to Dask they
    have the dtypes of the read.
    """

    _parameters = ["_expr", "coded"]

    @property
    def _fusion_buckets(self) -> list[Any]:
        return buckets_of(self.operands[0])

    def _divisions(self) -> Any:
        return self.operands[0].divisions  # of the partitions that are read

    def _task(self, name: Key, index: int) -> Task:
        read: Any = read_of(self)
        parts = [read._plan["parts"][at] for at in self._fusion_buckets[index]]
        pieces = [piece for part in parts for piece in (part if isinstance(part, list) else [part])]
        return Task(name, with_dictionaries(read, self.operands[1]), pieces, _data_producer=True)


class CheckedRead(FusedIO):
    """Read files, and have each task check what is known of those that it has read.

    The operands are the read; a function, which takes the rows, what it checks, and what is known of each of
    their files, and returns the rows; what it checks; and what is known of each file, by name.
    """

    _parameters = ["_expr", "check", "checked", "known"]

    @cached_property
    def _name(self) -> str:
        return f"{self.operands[0]._funcname}-checked-{self.deterministic_token}"

    @cached_property
    def npartitions(self) -> int:
        """Return the number of partitions."""
        return int(self.operands[0].npartitions)

    def _divisions(self) -> Any:
        return self.operands[0].divisions  # of the partitions that are read

    def _task(self, name: Key, index: int) -> Task:
        inner, check, checked, known = self.operands
        read: Any = read_of(inner)
        at = inner._fusion_buckets[index] if isinstance(inner, FusedIO) else [read._partitions[index]]
        files = dict.fromkeys(file for each in at for file in _files_at(read, each))
        return Task(
            name,
            check,
            inner._task(name, index),
            checked,
            [known[file] for file in files],
            _data_producer=True,
        )
