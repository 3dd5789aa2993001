"""Find the reads of Parquet files in a plan, and change the number of their partitions.

Dask puts files together in the step that it calls tuning, between simplifying a plan and lowering it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from dask._expr import Expr
from dask._task_spec import Task
from dask.dataframe.dask_expr._repartition import Repartition, RepartitionToFewer
from dask.dataframe.dask_expr.io import parquet
from dask.dataframe.dask_expr.io.io import FusedIO, FusedParquetIO
from dask.typing import Key
from dask.utils import parse_bytes
from fsspec.implementations.local import LocalFileSystem as FsspecFiles
from pyarrow.fs import LocalFileSystem as ArrowFiles

__all__ = [
    "LOWERED",
    "Column",
    "FewerPartitions",
    "ParquetRead",
    "columns_of",
    "files_of_partitions",
    "fragments_of",
    "has_other_dtypes",
    "is_idle",
    "is_local",
    "lower",
    "parquet_reads",
]

#: The stages of an optimisation that come after tuning.
LOWERED = ("physical", "simplified-physical", "fused")
#: Dask's class for several files as one partition, for reads of pandas that it leaves as they are.
FUSED: dict[type, type] = {parquet.ReadParquetFSSpec: FusedIO, parquet.ReadParquetPyarrowFS: FusedParquetIO}


class FewerPartitions(FusedIO):
    """Read the files of a table as a given number of partitions.

    The operands are Dask's read, its class for a read of several files as one partition, which makes the
    tasks, and the number.
    """

    _parameters = ["_expr", "kind", "count"]

    @property
    def _load_multiple_files(self) -> Any:
        return self.kind._load_multiple_files

    @property
    def _fusion_buckets(self) -> list[Any]:
        partitions = self.operands[0]._partitions
        bounds = RepartitionToFewer._compute_partition_boundaries(self.operands[2], len(partitions))
        return [partitions[start:end] for start, end in pairwise(bounds)]

    def _task(self, name: Key, index: int) -> Task:
        task: Task = self.kind._task(self, name, index)
        return task


def lower(tuned: Expr, stage: str) -> Expr:
    """Take a tuned plan through the steps of ``optimize_until`` that are left."""
    expr = tuned.lower_completely()
    if stage == "physical":
        return expr
    expr = expr.simplify()
    return expr if stage == "simplified-physical" else expr.fuse()


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

    Attributes
    ----------
    expr
        The expression in the plan: `read`, or Dask's read of several of its files as one partition.
    read
        Dask's read of each file as a partition.
    kind
        Dask's class for a read of several files as one partition.
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

    def with_partitions(self, count: int) -> Expr:
        """Return the read with another number of partitions."""
        return FewerPartitions(self.read, self.kind, count)  # type: ignore[no-untyped-call]


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


class Column(NamedTuple):
    """Hold what a footer says of a column of some rows: their number, and the bytes before compression."""

    rows: int
    encoded: int
    has_fixed_width: bool


def columns_of(read: Any) -> tuple[float, list[list[Column]]]:
    """Return the number of files that are read, and the needed columns of up to three of them.

    A file counts in part if only some of its partitions are read.

    Raises
    ------
    OSError
        If a file cannot be read.
    """
    fragments = fragments_of(read)
    if not fragments:
        return 0, []
    sample = sorted({0, len(fragments) // 2, len(fragments) - 1})
    share = len(read._partitions) / max(len(read._divisions()) - 1, 1)
    columns = [[_column(*chunk) for chunk in _chunks(fragments[at], set(read.columns))] for at in sample]
    return len(fragments) * share, columns


def has_other_dtypes(read: Any) -> bool:
    """Return whether columns of a file in pandas may have other dtypes if it is read together with others.

    Integers with nulls are floats there, of which some large ones are not exact, and booleans are objects.
    This reads all footers.

    Raises
    ------
    OSError
        If a file cannot be read.
    """
    dtypes = read._meta.dtypes if read._meta.ndim == 2 else {read._meta.name: read._meta.dtype}
    exact = {name for name, dtype in dtypes.items() if isinstance(dtype, np.dtype) and dtype.kind in "iub"}
    kinds = set()
    for fragment in fragments_of(read):
        schema = fragment.physical_schema
        kinds.add(tuple(schema.field(name).type for name in read.columns if name in schema.names))
        for rows, chunk in _chunks(fragment, exact):
            found = chunk.statistics
            if rows and (found is None or not found.has_null_count or found.null_count):
                return True
    return len(kinds) > 1


def files_of_partitions(read: Any) -> list[str] | None:
    """Return the file that each partition of a read is of; None if one is of several files, or unknown."""
    if isinstance(read, parquet.ReadParquetPyarrowFS):
        return [read.fragments[at].path for at in read._partitions]
    pieces = [read._plan["parts"][at] for at in read._partitions]
    if not all(isinstance(piece, dict) and isinstance(piece.get("piece"), tuple) for piece in pieces):
        return None
    files = [piece["piece"][0] for piece in pieces]
    return files if all(isinstance(file, str) for file in files) else None


def fragments_of(read: Any) -> list[Any]:
    """Return Arrow's fragments of the files of a read, which know the footers."""
    facts = read._dataset_info
    if isinstance(read, parquet.ReadParquetPyarrowFS):
        return [wrapper.fragment for wrapper in facts["fragments"]]
    return list(facts["ds"].get_fragments())


def _chunks(fragment: Any, columns: Collection[str]) -> Iterator[tuple[int, Any]]:
    """Yield the chunks of some columns in a file, each with its number of rows."""
    footer = fragment.metadata
    for at in range(footer.num_row_groups):
        group = footer.row_group(at)
        for position in range(group.num_columns):
            chunk = group.column(position)
            if chunk.path_in_schema.partition(".")[0] in columns:
                yield group.num_rows, chunk


def _column(rows: int, chunk: Any) -> Column:
    has_fixed_width = chunk.physical_type not in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
    return Column(rows, chunk.total_uncompressed_size, has_fixed_width)
