"""Find out whether the result of a plan depends on how its tables are divided into partitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from dask._expr import Expr, _ExprSequence
from dask.dataframe.dask_expr import _accessor, _expr, _groupby, _reductions
from dask.dataframe.dask_expr._concat import Concat
from dask.dataframe.dask_expr._merge import Merge, SemiMerge
from dask.dataframe.dask_expr._repartition import Repartition
from dask.dataframe.dask_expr._shuffle import SortValues, _contains_index_name
from dask.dataframe.dask_expr.io.io import FusedIO

from dask_gpurt.dask_hooks.fused_reads import FUSED, FewerPartitions

__all__ = ["depends_on_partitions", "is_no_operation", "is_on_rows", "joins_columns"]

#: Operations on each row by itself. Others of Dask's look at all values of a partition, such as
#: ``to_datetime``, which infers a format, or call functions of users, such as ``eval``.
_ON_ROWS = frozenset(
    [
        _accessor.FunctionMap,
        _accessor.PropertyMap,
        _expr.Abs,
        _expr.ArrowStringConversion,
        _expr.AsType,
        _expr.Assign,
        _expr.Between,
        _expr.Clip,
        _expr.ColumnsSetter,
        _expr.Drop,
        _expr.DropnaFrame,
        _expr.DropnaSeries,
        _expr.Fillna,
        _expr.Filter,
        _expr.IsNa,
        _expr.Isin,
        _expr.Mask,
        _expr.NotNull,
        _expr.Projection,
        _expr.RenameFrame,
        _expr.RenameSeries,
        _expr.ResetIndex,
        _expr.Round,
        _expr.ToFrame,
        _expr.Where,
    ]
)
#: The same with subclasses, and an operation of dask_cudf that leaves its input as it is.
_ARITHMETIC = (_expr.Binop, _expr.Unaryop)
_NO_OPERATION = ("dask_cudf.io.parquet", "NoOp")
#: Those that leave out rows.
_CHOICES = (_expr.DropnaFrame, _expr.DropnaSeries, _expr.Filter)
#: Accessors whose functions look at single values, but for some that look at neighbours.
_ACCESSORS = frozenset(["dt", "str"])
_OF_NEIGHBOURS = frozenset(["tz_localize"])
#: Reductions whose result does not depend on the order of rows.
_REDUCTIONS = (
    _reductions.All,
    _reductions.Any,
    _reductions.ArrayReduction,
    _reductions.Count,
    _reductions.DropDuplicates,
    _reductions.Len,
    _reductions.Max,
    _reductions.Mean,
    _reductions.NLargest,
    _reductions.Size,
    _reductions.Sum,
    _reductions.ValueCounts,
)
#: The same for aggregations of a groupby, by name.
_AGGREGATIONS = frozenset(
    ["all", "any", "count", "max", "mean", "min", "nunique", "prod", "size", "std", "sum", "var"]
)
#: Subclasses by other libraries may do anything.
_LIBRARIES = frozenset(["dask", "dask_cudf"])


class _Labels(IntEnum):
    """Tell what the labels of an index are."""

    #: The same for any partitions.
    VALUES = 0
    #: Numbers of rows within a partition, where rows have no order: after a join or a groupby.
    OF_UNORDERED_ROWS = 1
    #: Numbers of rows within a partition, in the order of files.
    OF_ROWS = 2


class _Rows(NamedTuple):
    """Describe the rows of an expression.

    Attributes
    ----------
    sources
        The names of the expressions that determine the partitions; none for a single partition.
    chosen_by
        The names of the expressions that determine which rows there are, where labels are unique within a
        partition, and would not be if it had several files.
    labels
        What the labels of the index are.
    are_ordered
        Whether rows are in the order of files.
    """

    sources: frozenset[str]
    chosen_by: frozenset[str]
    labels: _Labels
    are_ordered: bool


def depends_on_partitions(plan: Expr) -> bool:
    """Return whether a result of a tuned plan may have other rows if reads have fewer partitions.

    That is not so for a single partition in the end, computed by operations on rows, by joins, and by
    aggregations of Dask's own. Functions of users, rows taken by their position, and anything unknown count
    as dependent, as does a result whose labels number the rows of partitions. Those of joined and
    grouped rows do not count, since these are in no order.
    """
    results = plan.operands if isinstance(plan, _ExprSequence) else [plan]
    if not all(isinstance(each, _expr.Expr) and each.npartitions == 1 for each in results):
        return True
    found: dict[str, _Rows] = {}
    left = list(results)
    while left:
        expr = left[-1]
        missing = [each for each in expr.dependencies() if each._name not in found]
        if missing:
            left.extend(missing)
            continue
        left.pop()
        if expr._name not in found:
            rows = _rows_of(expr, [found[each._name] for each in expr.dependencies()])
            if rows is None:
                return True
            found[expr._name] = rows
    return any(found[each._name].labels is _Labels.OF_ROWS for each in results)


def _rows_of(expr: Any, inputs: list[_Rows]) -> _Rows | None:
    """Describe the rows of an expression, given those of its inputs; None if they depend on partitions."""
    if type(expr).__module__.partition(".")[0] not in _LIBRARIES and type(expr) is not FewerPartitions:
        return None
    none = frozenset[str]()
    divided = frozenset([str(expr._name)]) if expr.npartitions != 1 else none
    labels = max((rows.labels for rows in inputs), default=_Labels.VALUES)
    ordered = all(rows.are_ordered for rows in inputs)
    if not inputs:
        is_of_single_files = type(expr) in FUSED
        if (is_of_single_files or isinstance(expr, FusedIO)) and expr._meta.index.name is None:
            labels = _Labels.OF_ROWS
        return _Rows(divided, divided if is_of_single_files else none, labels, are_ordered=True)
    sources = none.union(*(rows.sources for rows in inputs))
    if type(expr) in (Merge, SemiMerge):
        joined = _Rows(divided, none, _Labels.OF_UNORDERED_ROWS, are_ordered=False)
        return joined if joins_columns(expr) else None
    if type(expr) is Concat:
        is_below = expr.axis == 0 and not expr.interleave_partitions
        return _Rows(divided, none, labels, ordered) if is_below else None
    if len(sources) > 1:
        return None
    if is_on_rows(expr):
        return _rows_of_operation(expr, inputs, sources, labels, ordered)
    if type(expr) is Repartition:  # not one that is lowered: it demands more partitions below
        return _Rows(divided, none, labels, ordered) if expr.new_partitions == 1 else None
    if getattr(expr, "ignore_index", False):
        labels = _Labels.OF_ROWS
    if type(expr) is SortValues:
        return _Rows(divided, none, labels, ordered) if expr.operand("sort_function") is None else None
    if not _is_unordered(expr):
        return None
    keeps_labels = isinstance(expr, (_reductions.NLargest, _reductions.DropDuplicates))
    return _Rows(divided, none, labels if keeps_labels else _Labels.VALUES, ordered and not divided)


def _rows_of_operation(
    expr: Any, inputs: list[_Rows], sources: frozenset[str], labels: _Labels, ordered: bool
) -> _Rows | None:
    """Describe the rows of an operation on each row by itself.

    Its inputs must have the same rows: pandas aligns others by labels, and fails where some occur twice.
    """
    if len({rows.chosen_by for rows in inputs if rows.sources}) > 1:
        return None
    resets = type(expr) is _expr.ResetIndex
    if resets and not expr.drop and labels is not _Labels.VALUES:
        return None
    if resets and sources:
        labels = _Labels.OF_ROWS if ordered else _Labels.OF_UNORDERED_ROWS
    chosen_by = frozenset[str]().union(*(rows.chosen_by for rows in inputs))
    # Rows that are numbered within partitions, and others, would be aligned by labels that differ.
    if (chosen_by and type(expr) in _CHOICES) or (resets and sources):
        chosen_by = frozenset([str(expr._name)])
    return _Rows(sources, chosen_by, labels, ordered)


def is_no_operation(expr: Any) -> bool:
    """Return whether an expression is dask_cudf's that leaves its input as it is."""
    return (type(expr).__module__, type(expr).__name__) == _NO_OPERATION


def is_on_rows(expr: Any) -> bool:
    """Return whether an operation is on each row by itself."""
    kind = type(expr)
    if is_no_operation(expr):
        return True
    if kind not in _ON_ROWS and not isinstance(expr, _ARITHMETIC):
        return False
    if any(callable(each) and not isinstance(each, (type, Expr)) for each in expr.operands):
        return False
    if kind is _expr.AsType:  # the categories, and the format of times, would be those of a partition
        return not any(word in str(expr.dtypes) for word in ("category", "str", "object"))
    if kind in (_accessor.FunctionMap, _accessor.PropertyMap):
        return expr.accessor in _ACCESSORS and expr.attr not in _OF_NEIGHBOURS
    return True


def joins_columns(expr: Any) -> bool:
    """Return whether a join is on columns, with its partitions left to Dask."""
    given = (expr.operand("_npartitions"), expr.operand("broadcast"))
    if expr.left_index or expr.right_index or given != (None, None):
        return False
    return not any(
        _contains_index_name(side, on)
        for side, on in ((expr.left, expr.left_on), (expr.right, expr.right_on))
    )


def _is_unordered(expr: Any) -> bool:
    """Return whether an aggregation has the same result for rows in any order."""
    if isinstance(expr, _groupby.GroupbyAggregationBase):
        return _names(expr.arg) <= _AGGREGATIONS
    if isinstance(expr, _groupby.GroupByBase):
        return type(expr).__name__.lower() in _AGGREGATIONS
    if isinstance(expr, _reductions.DropDuplicates):
        return expr.subset is None
    return isinstance(expr, _REDUCTIONS)


def _names(spec: Any) -> set[Any]:
    """Return the names of all aggregations of ``agg``; functions are no names."""
    if isinstance(spec, Mapping):
        return set().union(*map(_names, spec.values()))
    if isinstance(spec, (list, tuple)):
        return set().union(*map(_names, spec))
    return {spec if isinstance(spec, str) else id(spec)}
