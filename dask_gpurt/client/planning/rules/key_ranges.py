"""Group and deduplicate rows within partitions, where each partition has all rows of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask._expr import Expr
from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._merge import Merge, SemiMerge
from dask.dataframe.dask_expr._repartition import Repartition
from dask.dataframe.dask_expr.io import parquet
from dask.dataframe.dask_expr.io.io import FusedIO

from dask_gpurt.client.planning.operations import is_no_operation, is_on_rows
from dask_gpurt.client.planning.reads import is_idle
from dask_gpurt.client.planning.rules.dependence import joins_columns

__all__ = [
    "are_alike",
    "as_one_partition",
    "chooses_or_numbers_rows",
    "deduplicated",
    "grouped",
    "grouped_in_parts",
    "is_join",
    "is_row_by_row",
    "keys_of_duplicates",
    "keys_of_groups",
    "origin_of",
    "rows_of_groups",
    "with_rows",
]

#: Operations on single rows whose dtype follows from those of their inputs.
_IN_PARTS = frozenset(
    [_expr.Projection, _expr.RenameFrame, _expr.RenameSeries, _expr.ToFrame, _expr.ResetIndex, _expr.Filter]
    + [_expr.EQ, _expr.NE, _expr.GT, _expr.GE, _expr.LT, _expr.LE, _expr.And, _expr.Or]
)

# ---- where rows come from ---------------------------------------------------------------------------


def origin_of(expr: Any, column: Any) -> tuple[Any, Any] | None:
    """Return the read of Parquet files that a column comes from, and its name there; None if it is unknown.

    Its values are those in the files, and its rows are in the same partitions.
    """
    while True:
        if expr.ndim != 2 or column not in expr.columns:
            return None
        kind = type(expr)
        read = expr.operand("_expr") if isinstance(expr, FusedIO) else expr
        if isinstance(read, (parquet.ReadParquetFSSpec, parquet.ReadParquetPyarrowFS)):
            return read, column
        if kind is _expr.RenameFrame:
            if not isinstance(expr.operand("columns"), Mapping):
                return None
            sources = [old for old in expr.frame.columns if expr.operand("columns").get(old, old) == column]
            if len(sources) != 1:
                return None
            (column,) = sources
        elif kind is _expr.Assign:
            if column in expr.keys:
                return None
        elif not (kind in (_expr.Projection, _expr.Filter) or is_no_operation(expr) or is_idle(expr)):
            return None
        expr = expr.frame


# ---- operations within partitions -------------------------------------------------------------------


def keys_of_duplicates(expr: Any) -> list[Any] | None:
    """Return the columns by which rows are deduplicated in a shuffle; None if there is no such shuffle."""
    if type(expr) is not _reductions.DropDuplicates or expr.frame.ndim != 2 or expr.npartitions == 1:
        return None
    if expr.subset is not None or expr.ignore_index or expr.keep not in ("first", "last"):
        return None
    return list(expr.frame.columns) if expr.should_shuffle and expr.need_to_shuffle else None


def deduplicated(expr: Any) -> Expr:
    """Deduplicate the rows of each partition by itself."""
    chunk: Expr = expr._chunk_cls(expr.frame, type(expr), expr.chunk, expr.chunk_kwargs)
    return chunk


def keys_of_groups(expr: Any) -> list[Any] | None:
    """Return the columns of a groupby whose result is a single partition; None for another expression."""
    if not isinstance(expr, _groupby.GroupByBase) or not isinstance(expr, _reductions.ApplyConcatApply):
        return None
    if expr.npartitions != 1 or expr.frame.npartitions == 1 or expr.frame.ndim != 2:
        return None
    keys = list(expr.by)
    # Unobserved categories would be groups in each partition.
    dtypes = [expr.frame._meta.dtypes.get(key) for key in keys if not isinstance(key, Expr)]
    is_plain = len(dtypes) == len(keys) and None not in dtypes
    return keys if is_plain and not any(map(_is_category, dtypes)) and not expr.sort else None


def _is_category(dtype: Any) -> bool:
    return type(dtype).__name__ == "CategoricalDtype"  # of pandas or cudf


def grouped_in_parts(expr: Any) -> Expr:
    """Return a groupby with as many partitions of groups as of rows, by Dask."""
    parts: Expr = expr.substitute_parameters({"split_out": True})
    return parts


def rows_of_groups(expr: Any) -> Expr:
    """Return the rows that a groupby is of."""
    rows: Expr = expr.frame
    return rows


def with_rows(expr: Any, rows: Expr) -> Expr:
    """Return a groupby of other rows."""
    of_others: Expr = expr.substitute_parameters({"frame": rows})
    return of_others


def grouped(expr: Any) -> Expr | None:
    """Group the rows of each partition by itself; None if it is not known how."""
    physical = expr._lower() if isinstance(expr, _groupby.GroupbyAggregation) else expr
    if type(physical)._lower is not _reductions.ApplyConcatApply._lower or not physical.aggregate:
        return None
    chunk = physical._chunk_cls(
        physical.frame, type(physical), physical.chunk, physical.chunk_kwargs, *physical._chunk_cls_args
    )
    whole: Expr = _reductions.Aggregate(
        chunk, type(physical), physical.aggregate, physical.aggregate_kwargs, *physical.aggregate_args
    )
    return whole


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two expressions have the same columns and index, in name and dtype."""
    return bool(_columns_of(one._meta) == _columns_of(other._meta))


def _columns_of(meta: Any) -> tuple[Any, ...]:
    dtypes = list(map(str, meta.dtypes)) if meta.ndim == 2 else [str(meta.dtype)]
    names = list(meta.columns) if meta.ndim == 2 else [meta.name]
    levels = [str(dtype) for dtype in getattr(meta.index, "dtypes", [meta.index.dtype])]
    return type(meta), names, dtypes, list(meta.index.names), levels


def is_row_by_row(expr: Any) -> bool:
    """Return whether an operation can be done in each partition of groups.

    It is on each row by itself, and neither its values nor its dtype follow from other rows. Others that
    :func:`is_on_rows` allows infer a dtype from all values of a partition, such as ``where``, which makes
    floats of integers where a row does not match.
    """
    return type(expr) in _IN_PARTS and is_on_rows(expr)


def chooses_or_numbers_rows(expr: Any) -> bool:
    """Return whether the rows of the result, or their labels, are others than those of the input."""
    return type(expr) in (_expr.Filter, _expr.ResetIndex)


def is_join(expr: Any) -> bool:
    """Return whether an expression joins columns, for which neither order nor labels of rows matter."""
    return type(expr) in (Merge, SemiMerge) and joins_columns(expr)


def as_one_partition(expr: Expr) -> Expr:
    """Return the rows of all partitions as one."""
    return Repartition(expr, 1)
