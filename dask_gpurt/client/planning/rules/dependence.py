"""Find out whether the result of a plan depends on how its tables are divided into partitions.

A result is the same if each operation of the plan is one of these, with the guarantees that it takes:

- *on rows*: row by row, with fixed dtypes or nothing that depends on them (:mod:`.operations`);
- a *join* on columns whose dtypes do not vary, or on the index of groups or of one frame in memory. It finds
  the same rows, in no order, however they are divided;
- an *aggregation* of Dask's own whose value does not depend on the order of rows;
- *rows one below the other*: concatenations, sorts, and repartitions into a single partition;
- anything else, also functions of the user, *on a single partition* whose rows, labels and order are fixed,
  such as sorted groups; arithmetic and joins of two of them by their labels, in any order.

No operation may have categorical data. Which labels and which order the rows of the result have is followed
through the plan, too: if they depend on partitions, so does the result. Numbers of the rows of a read do not,
since the read can be told to number them as Dask does (:func:`labels_shown`).

What it does not reason about
    Functions of the user, other libraries, and operations without a guarantee, which all depend on partitions
    for it unless there is one; how likely it is that a result would differ; results that stay on the cluster.
Why it may be trusted
    Each guarantee has a test with rows divided at random (``tests/unit/client/planning/test_operations.py``).
The figure
    Those of the rules that stand on it.

Decisions and their figures: ``docs/decisions/partitions.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import compress
from typing import Any, NamedTuple, cast

from dask._expr import Expr, _ExprSequence
from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._concat import Concat
from dask.dataframe.dask_expr._cumulative import CumulativeAggregations
from dask.dataframe.dask_expr._merge import Merge, SemiMerge
from dask.dataframe.dask_expr._repartition import Repartition
from dask.dataframe.dask_expr._shuffle import SetIndexBlockwise, SortValues
from dask.dataframe.dask_expr.io.io import FromGraph, FromPandas, FusedIO

from dask_gpurt.client.planning.operations import (
    Columns,
    after_operation,
    dtypes_of,
    has_categories,
    has_kinds,
    index_of,
    is_narrow,
    is_of_pandas,
    is_on_rows,
)
from dask_gpurt.client.planning.reads import FUSED, FewerPartitions, ParquetRead, read_of
from dask_gpurt.client.planning.rules.anti_joins import DistinctKeys
from dask_gpurt.client.planning.rules.common_groups import GroupsAtOnce
from dask_gpurt.client.planning.rules.needed_columns import listed, names_in_join, shared_keys
from dask_gpurt.client.planning.table_facts import TableFacts
from dask_gpurt.dask_hooks.planning import bottom_up, in_sequence

#: Operations that leave out rows.
_CHOICES = (_expr.DropnaFrame, _expr.DropnaSeries, _expr.Filter)
#: Reductions whose result does not depend on the order of rows.
_REDUCTIONS = (
    *(_reductions.All, _reductions.Any, _reductions.ArrayReduction, _reductions.Count, _reductions.Len),
    *(_reductions.DropDuplicates, _reductions.Max, _reductions.Mean, _reductions.NLargest, _reductions.Size),
    *(_reductions.Sum, _reductions.ValueCounts),
)
#: The same for aggregations of a groupby, by name.
_AGGREGATIONS = frozenset(
    ["all", "any", "count", "max", "mean", "min", "nunique", "prod", "size", "std", "sum", "var"]
)
#: Reductions and aggregations whose value does not depend on the dtype of the rows.
_COUNTS = (_reductions.Count, _reductions.Len, _reductions.Size, _groupby.Count, _groupby.Size)
_COUNTS_BY_NAME = frozenset(["count", "size"])
#: Operations on several rows that leave them their labels.
_KEEPING_LABELS = (Concat, SortValues, Repartition, _reductions.NLargest, _reductions.DropDuplicates)
#: Operations that make one partition of single ones, without a look at these to find out how many.
_ON_ONE = (
    *(_expr.Blockwise, _expr.MaybeAlignPartitions, _expr.OpAlignPartitions, _expr.Head, _expr.Tail),
    CumulativeAggregations,
)
#: Expressions of Delayed objects, whose results may be anything.
_WITHOUT_META = (_expr._DelayedExpr, _expr.DelayedsExpr)
#: Subclasses by other libraries may do anything.
_LIBRARIES = frozenset(["dask", "dask_cudf"])
#: The attribute of an expression that has what a first look has found: several rules look, at other plans.
_ROWS = "_gpurt_rows"
#: The expressions of rules.
_OF_RULES = (FewerPartitions, DistinctKeys, GroupsAtOnce)


class _Labels(IntEnum):
    """Tell what the labels of an index are."""

    #: The same for any partitions.
    VALUES = 0
    #: Numbers of rows within a partition, where rows have no order: after a join or a groupby.
    OF_UNORDERED_ROWS = 1
    #: Numbers of rows within a partition of a read as Dask makes it, which a read of more files keeps.
    OF_READ = 2
    #: Numbers of rows within a partition, in the order of files.
    OF_ROWS = 3


class _Order(IntEnum):
    """Tell in which order the rows of the result would be."""

    #: The same for any partitions: that of files, of groups that are sorted, or of sorted values.
    FIXED = 0
    #: None: after a join, or of groups of cudf.
    NONE = 1
    #: One for which users may take it, but which depends on partitions: that of groups of pandas.
    OF_PARTITIONS = 2


class _Rows(NamedTuple):
    """Describe the rows of an expression.

    ``sources``: the names of the expressions that determine the partitions; none for a single partition.
    ``chosen_by``: the names of the expressions that determine which rows there are, where labels are unique
    within a partition, and would not be if it had several files.
    ``labels``: what the labels of the index are.
    ``order``: the order of the rows.
    ``columns``: what is known of the columns.
    """

    sources: frozenset[str]
    chosen_by: frozenset[str]
    labels: _Labels
    order: _Order
    columns: Columns


def why_dependent(plan: Expr, files: Mapping[str, Columns] | None = None) -> str | None:
    """Return why a result of a tuned plan may be another one if reads have fewer partitions; None if not.

    It is the same for a single partition in the end, computed by operations with the guarantees above. The
    labels and the order of joined rows do not count, since these are in no order.

    ``plan``: the tuned plan.
    ``files``: by name, what is known of the columns of reads of Parquet files. By default, all that would
    help: for a first look, before footers are read.
    """
    results = _results_of(plan)
    if not all(isinstance(each, _expr.Expr) and each.npartitions == 1 for each in results):
        return "a result has several partitions"
    found = _described(results, files)
    if isinstance(found, str):
        return found
    return next(filter(None, (_shows_partitions(found[each._name]) for each in results)), None)


def independent_part(plan: Expr) -> tuple[Expr, frozenset[str]]:
    """Return those results of a plan that do not depend on partitions, and the names of all in the others."""
    results = _results_of(plan)
    free = [why_dependent(each) is None for each in results]
    kept = (each for each, is_free in zip(results, free, strict=True) if not is_free)
    names = frozenset(str(each._name) for result in kept for each in result.walk())
    return in_sequence(*compress(results, free)), names


def rely_on_independence(facts: TableFacts, *plans: Expr) -> bool:
    """Return whether the results of tuned plans are independent of partitions, by what is in their tables.

    If all are, the plans rely on the dtypes of these, and if need be on columns that have no nulls.
    Raises OSError if a file cannot be read.
    """
    needed = [_without_nulls(plan, facts) for plan in plans]
    if None in needed:
        return False
    for plan, without_nulls in zip(plans, needed, strict=True):
        facts.rely_on_dtypes(plan, without_nulls=bool(without_nulls))
    return True


def _without_nulls(plan: Expr, facts: TableFacts) -> bool | None:
    """Return whether a plan is independent only if columns have no nulls; None if it is not even then."""
    if (tables := facts.columns(plan)) is None:
        return None
    with_any_nulls = {name: Columns(columns.varying) for name, columns in tables.items()}
    if why_dependent(plan, with_any_nulls) is None:
        return False
    return True if why_dependent(plan, tables) is None else None


def _results_of(plan: Expr) -> list[Any]:
    return list(plan.operands) if isinstance(plan, _ExprSequence) else [plan]


def _shows_partitions(rows: _Rows) -> str | None:
    """Return what of a result depends on partitions: labels, order or dtypes.

    Where they vary, the dtype of the result is that of the partitions that have rows.
    """
    if rows.labels is _Labels.OF_ROWS:
        return "the index of the result numbers rows of partitions"
    if rows.order is _Order.OF_PARTITIONS:
        return "groups of the result are in the order of partitions, which sort=True would fix"
    if varying := rows.columns.varying:
        return f"the dtypes of {', '.join(sorted(map(str, varying)))} in the result may vary"
    return None


def columns_of_result(plan: Expr, files: Mapping[str, Columns]) -> Columns | None:
    """Describe the columns of the result of a plan; None if its rows may depend on partitions."""
    found = _described([plan], files)
    return None if isinstance(found, str) else found[plan._name].columns


def numbered(plan: Expr) -> frozenset[str]:
    """Return the names of expressions in a plan whose labels are numbers of rows that no result shows.

    If the plan is independent of partitions, no result is made of these numbers.
    """
    found, shown = _labels_in(plan)
    return frozenset(name for name, labels in found.items() if labels is not _Labels.VALUES) - shown


def labels_shown(plan: Expr, reads: Mapping[str, ParquetRead]) -> frozenset[str]:
    """Return the names of reads of which a result has labels that depend on how files are put together."""
    whole = {name for name, read in reads.items() if not read.numbers_files}
    return _labels_in(plan)[1] & whole if whole else frozenset()


def _labels_in(plan: Expr) -> tuple[dict[str, _Labels], frozenset[str]]:
    """Return the labels of each expression by its name, and the names of those that results show."""
    results = _results_of(plan)
    described = _described(results, None)
    found = {} if isinstance(described, str) else {name: rows.labels for name, rows in described.items()}
    shown = set[str]()
    left = list(results)
    while left:
        expr = left.pop()
        if expr._name not in shown and found.get(expr._name) is _Labels.OF_READ:
            shown.add(expr._name)
            left.extend(expr.dependencies())
    return found, frozenset(shown)


def _described(results: Sequence[Any], files: Mapping[str, Columns] | None) -> dict[str, _Rows] | str:
    """Describe the rows of each expression by its name; the reason if some may depend on partitions."""
    found: dict[str, _Rows] = {}
    for result in results:
        for expr in bottom_up(result, _inputs_of):
            rows = vars(expr).get(_ROWS) if files is None else None
            if rows is None:
                rows = _rows_of(expr, [found[each._name] for each in _inputs_of(expr)], files)
                if rows is None:
                    return f"what {type(expr).__name__} returns may depend on them"
                if files is None:
                    vars(expr)[_ROWS] = rows
            found[expr._name] = rows
    return found


def _inputs_of(expr: Any) -> list[Any]:
    """Return the inputs of an expression; the rows whose number it is, where Dask counts their labels."""
    rows = _rows_of_labels(expr.frame) if type(expr) is _reductions.Len else None
    return list(expr.dependencies()) if rows is None else [rows]


def _rows_of_labels(expr: Any) -> Any:
    """Return the rows whose labels an expression is, or of which it chooses some labels; None if neither."""
    if type(expr) is _expr.Filter:
        rows = _rows_of_labels(expr.frame)
        return None if rows is None else _expr.Filter(rows, expr.predicate)
    return expr.frame if type(expr) is _expr.Index else None


def _rows_of(expr: Any, inputs: list[_Rows], files: Mapping[str, Columns] | None) -> _Rows | None:
    """Describe the rows of an expression, given those of its inputs; None if they depend on partitions."""
    found = _rows_by_guarantees(expr, inputs, files)
    if inputs and (found is None or type(expr) is Merge):  # of which more is known if it is on one partition
        return _rows_of_one(expr, inputs) or found
    return found


def _rows_of_one(expr: Any, inputs: list[_Rows]) -> _Rows | None:
    """Describe what an operation of Dask's own makes of the same single partitions."""
    none, order = frozenset[str](), max(rows.order for rows in inputs)
    is_on_same = not any(rows.sources or rows.labels or rows.columns.varying for rows in inputs)
    is_known = isinstance(expr, (*_ON_ONE, Merge)) and type(expr).__module__.partition(".")[0] in _LIBRARIES
    if not is_on_same or not is_known or has_categories(expr):
        return None
    is_by_labels = isinstance(expr, (_expr.OpAlignPartitions, _expr.AssignAlign))
    if isinstance(expr, Merge):
        is_by_labels = bool(expr.left_index and expr.right_index)
        if order or not is_of_pandas(expr):
            order = _Order.NONE
    return _Rows(none, none, _Labels.VALUES, order, Columns()) if is_by_labels or not order else None


def _rows_by_guarantees(expr: Any, inputs: list[_Rows], files: Mapping[str, Columns] | None) -> _Rows | None:
    if type(expr).__module__.partition(".")[0] not in _LIBRARIES and type(expr) not in _OF_RULES:
        return None
    if inputs and is_on_rows(expr):
        return _rows_of_operation(expr, inputs)
    if not isinstance(expr, _WITHOUT_META) and has_categories(expr):
        return None
    if not inputs:
        return _rows_of_source(expr, files)
    if type(expr) is SetIndexBlockwise:
        return _rows_with_index(expr, inputs[0])
    columns = _columns_of(expr, inputs)
    if columns is None:
        return None
    none = frozenset[str]()
    divided = frozenset([str(expr._name)]) if _is_divided(expr, inputs) else none
    if type(expr) in (Merge, SemiMerge):
        return _Rows(divided, none, _labels_of_join(expr, inputs), _Order.NONE, columns)
    labels = max(rows.labels for rows in inputs)
    if getattr(expr, "ignore_index", False):
        labels = _Labels.OF_ROWS
    elif not isinstance(expr, _KEEPING_LABELS):
        labels = _Labels.VALUES
    return _Rows(divided, none, labels, _order_of(expr, inputs), columns)


def _rows_with_index(expr: Any, rows: _Rows) -> _Rows | None:
    """Describe rows whose index is set in each partition, to a column whose dtype is fixed."""
    if expr.append or _named(expr.other) & rows.columns.varying:
        return None
    chosen_by = frozenset([str(expr._name)]) if rows.sources else rows.chosen_by
    return rows._replace(labels=_Labels.VALUES, chosen_by=chosen_by, columns=rows.columns.only(expr.columns))


def _is_divided(expr: Any, inputs: list[_Rows]) -> bool:
    """Return whether an operation on several rows has several partitions.

    How many a sort has is not asked: Dask would compute its input to find out.
    """
    if type(expr) is SortValues and expr.operand("npartitions") is None:
        return bool(inputs[0].sources)
    return bool(expr.npartitions != 1)


def _labels_of_join(join: Any, inputs: list[_Rows]) -> _Labels:
    """Return what labels joined rows have: of the side whose index is no key, or of both if both are."""
    if not (join.left_index or join.right_index):
        return _Labels.OF_UNORDERED_ROWS
    if index_of(join.left).dtype != index_of(join.right).dtype:
        return _Labels.OF_ROWS  # pandas takes the other side's index where a partition has no rows
    return max(_Labels.OF_UNORDERED_ROWS, *(rows.labels for rows in inputs))


def _order_of(expr: Any, inputs: list[_Rows]) -> _Order:
    """Return the order of the rows of an operation on several rows."""
    order = max(rows.order for rows in inputs)
    is_groupby = isinstance(expr, _groupby.GroupByBase)
    makes_groups = is_groupby or isinstance(expr, _reductions.ValueCounts)
    if not makes_groups and not isinstance(expr, _KEEPING_LABELS):
        return _Order.FIXED  # a value, or one for each column
    if is_groupby and expr.npartitions == 1 and expr.sort:
        return _Order.FIXED
    is_shuffled = isinstance(expr, _reductions.DropDuplicates) and expr.should_shuffle
    if not any(rows.sources for rows in inputs) or not (makes_groups or is_shuffled):
        return order
    # Each partition has its groups in the order of rows with pandas, and in none with cudf.
    return _Order.OF_PARTITIONS if is_of_pandas(expr) and order is not _Order.NONE else _Order.NONE


def _rows_of_source(expr: Any, files: Mapping[str, Columns] | None) -> _Rows:
    none = frozenset[str]()
    divided = frozenset([str(expr._name)]) if expr.npartitions != 1 else none
    is_of_single_files = type(expr) in FUSED
    is_of_files = is_of_single_files or isinstance(expr, FusedIO)
    labels = _Labels.OF_READ if is_of_files and index_of(expr).name is None else _Labels.VALUES
    return _Rows(
        divided,
        divided if is_of_single_files else none,
        labels,
        _Order.FIXED,
        _columns_of_source(expr, files),
    )


def _columns_of_source(expr: Any, files: Mapping[str, Columns] | None) -> Columns:
    """Describe the columns of what has no inputs: files, or other data, of which little is known."""
    if not getattr(expr, "ndim", 0):
        return Columns()
    names = frozenset(expr.columns)
    if (read := read_of(expr)) is not None:
        if files is None:
            return Columns(frozenset(), names)
        if (known := files.get(str(read._name))) is not None:
            return known.only(names)
    is_one_frame = isinstance(expr, FromPandas) or expr.npartitions == 1
    return Columns() if is_one_frame or not is_of_pandas(expr) else Columns(names)


def _rows_of_operation(expr: Any, inputs: list[_Rows]) -> _Rows | None:
    """Describe the rows of an operation on each row by itself.

    Its inputs must have the same rows: pandas aligns others by labels, and fails where some occur twice.
    """
    sources = frozenset[str]().union(*(rows.sources for rows in inputs))
    if len(sources) > 1 or len({rows.chosen_by for rows in inputs if rows.sources}) > 1:
        return None
    labels = max(rows.labels for rows in inputs)
    order = max(rows.order for rows in inputs)
    known = dict(zip((each._name for each in expr.dependencies()), inputs, strict=True))
    columns = after_operation(expr, lambda each: known[each._name].columns)
    resets = type(expr) is _expr.ResetIndex
    if columns is None or (resets and not expr.drop and labels is not _Labels.VALUES):
        return None
    if resets and (sources or order is _Order.OF_PARTITIONS):
        labels = _Labels.OF_UNORDERED_ROWS if order is _Order.NONE else _Labels.OF_ROWS
    chosen_by = frozenset[str]().union(*(rows.chosen_by for rows in inputs))
    # Rows that are numbered within partitions, and others, would be aligned by labels that differ.
    if (chosen_by and type(expr) in _CHOICES) or (resets and sources):
        chosen_by = frozenset([str(expr._name)])
    return _Rows(sources, chosen_by, labels, order, columns)


# ---- operations on several rows -------------------------------------------------------------------


def _columns_of(expr: Any, inputs: list[_Rows]) -> Columns | None:
    """Describe the columns of an operation on several rows; None if its result depends on partitions."""
    frame = inputs[0].columns
    if type(expr) is Merge:
        is_fixed = joins_columns(expr) or _joins_groups(expr, inputs)
        return _columns_of_join(expr, frame, inputs[1].columns) if is_fixed else None
    if type(expr) is SemiMerge:
        varying = frame.varying & _named(expr.left_on) or inputs[1].columns.varying & _named(expr.right_on)
        return frame if joins_columns(expr) and not varying else None
    if type(expr) is Concat:
        return _columns_of_concat(expr, inputs) if expr.axis == 0 and not expr.interleave_partitions else None
    if len(frozenset().union(*(rows.sources for rows in inputs))) > 1:
        return None
    if type(expr) is Repartition:  # not one that is lowered: it demands more partitions below
        return frame if expr.new_partitions == 1 else None
    if type(expr) is SortValues:
        is_by_values = expr.operand("sort_function") is None
        return frame if is_by_values and not frame.varying & _named(expr.by) else None
    if not _is_unordered(expr) or (any(rows.columns.varying for rows in inputs) and not _counts(expr, frame)):
        return None
    if isinstance(expr, (_reductions.NLargest, _reductions.DropDuplicates)):
        return frame
    return Columns(counts=_numbers_of_rows(expr))


def _numbers_of_rows(expr: Any) -> frozenset[Any]:
    """Return the columns of groups that are numbers of rows."""
    if not isinstance(expr, _groupby.GroupByBase):
        return frozenset()
    if isinstance(expr, _groupby.GroupbyAggregationBase):
        spec = expr.arg if isinstance(expr.arg, Mapping) else {}
        return frozenset(
            name for name, how in spec.items() if isinstance(how, str) and how in _COUNTS_BY_NAME
        )
    return frozenset(expr.columns if isinstance(expr, _COUNTS) else ())


def _named(names: Any) -> frozenset[Any]:
    return frozenset(listed(names))


def _columns_of_join(join: Any, left: Columns, right: Columns) -> Columns | None:
    if left.varying & _named(join.left_on) or right.varying & _named(join.right_on):
        return None
    if any(len(set(side.columns)) < len(side.columns) for side in (join.left, join.right)):
        return None
    shared = shared_keys(join)
    one, other = (dict(zip(each.columns, dtypes_of(each), strict=True)) for each in (join.left, join.right))
    sides = []
    for dtypes, known, names, filled_by in zip(
        (one, other), (left, right), names_in_join(join), ("right", "left"), strict=True
    ):
        if join.how in (filled_by, "outer"):  # rows without a match get nulls
            narrow = {name for name, dtype in dtypes.items() if is_narrow(dtype) and name not in shared}
            known = Columns(known.varying | (narrow if is_of_pandas(join) else set()), counts=known.counts)
        sides.append(known.renamed(names.values(), names))
    # Keys are those of the left side, unless rows of the right one are without a match.
    is_mixed = join.how not in ("inner", "left") and is_of_pandas(join)
    mixed = {name for name in shared if one[name] != other[name] and is_mixed}
    return Columns(
        sides[0].varying | sides[1].varying | mixed,
        sides[0].without_nulls | sides[1].without_nulls,
        (sides[0].counts | sides[1].counts) - shared,
    )


def _columns_of_concat(expr: Any, inputs: list[_Rows]) -> Columns:
    frames = expr.dependencies()
    dtypes = [dict(zip(each.columns, dtypes_of(each), strict=True)) for each in frames]
    differing = {
        name for name in expr.columns if any(each.get(name) != dtypes[0].get(name) for each in dtypes)
    }
    known = [rows.columns for rows in inputs]
    return Columns(
        frozenset(differing if is_of_pandas(expr) else ()).union(*(each.varying for each in known)),
        known[0].without_nulls.intersection(*(each.without_nulls for each in known)) - differing,
    )


def _counts(expr: Any, frame: Columns) -> bool:
    """Return whether columns whose dtypes vary are only counted."""
    if not isinstance(expr, _groupby.GroupByBase):
        return isinstance(expr, _COUNTS)
    if any(isinstance(key, Expr) for key in expr.by) or frame.varying & set(expr.by):
        return False
    if isinstance(expr, _groupby.GroupbyAggregationBase) and isinstance(expr.arg, Mapping):
        return all(_names(expr.arg.get(name, ())) <= _COUNTS_BY_NAME for name in frame.varying)
    return isinstance(expr, _COUNTS)


def joins_columns(expr: Any) -> bool:
    """Return whether a join is on columns, with its partitions left to Dask."""
    return not (expr.left_index or expr.right_index) and _joins_by_name(expr)


def _joins_by_name(expr: Any) -> bool:
    """Return whether the keys of a join that are no index are columns, with partitions left to Dask."""
    if (expr.operand("_npartitions"), expr.operand("broadcast")) != (None, None):
        return False
    keys = [(expr.left, expr.left_on), (expr.right, expr.right_on)]
    return not any(
        isinstance(key, Expr) or (key == index_of(side).name and key not in side.columns)
        for side, on in keys
        if on is not None
        for key in listed(on)
    )


def _joins_groups(join: Any, inputs: list[_Rows]) -> bool:
    """Return whether each index that is a key of a join is the key of groups, whose dtype is fixed."""
    sides = zip((join.left, join.right), (join.left_index, join.right_index), inputs, strict=True)
    return (
        join.how != "leftsemi"
        and _joins_by_name(join)
        and all(
            rows.labels is _Labels.VALUES and _is_labelled_by_key(side)
            for side, is_key, rows in sides
            if is_key
        )
    )


def _is_labelled_by_key(expr: Any) -> bool:
    """Return whether the index is that of groups, by one key, a column, or that of one frame in memory."""
    while is_on_rows(expr) and type(expr) is not _expr.ResetIndex:
        expr = expr.dependencies()[0]
    is_known = isinstance(expr, (_groupby.GroupByBase, SetIndexBlockwise)) or (
        isinstance(expr, (FromGraph, FromPandas)) and expr.npartitions == 1
    )
    return is_known and cast(Any, expr)._meta.index.nlevels == 1


def _is_unordered(expr: Any) -> bool:
    """Return whether an aggregation has the same result for rows in any order."""
    if isinstance(expr, _groupby.GroupbyAggregationBase):
        return _names(expr.arg) <= _AGGREGATIONS
    if isinstance(expr, _groupby.GroupByBase):
        return type(expr).__name__.lower() in _AGGREGATIONS
    if isinstance(expr, _reductions.DropDuplicates):
        return expr.subset is None or isinstance(expr, DistinctKeys)
    if isinstance(expr, _reductions.Max) and is_of_pandas(expr.frame):  # or Min
        # That of a partition without rows is null, by which integers become floats.
        return has_kinds(expr.frame, "fmM")
    return isinstance(expr, _REDUCTIONS)


def _names(spec: Any) -> set[Any]:
    """Return the names of all aggregations of ``agg``; functions are no names."""
    if isinstance(spec, Mapping):
        return set().union(*map(_names, spec.values()))
    if isinstance(spec, (list, tuple)):
        return set().union(*map(_names, spec))
    return {spec if isinstance(spec, str) else id(spec)}
