"""Aggregate the same groups once, whatever a program asks of them one by one.

Programs that are written column by column ask groups for sums, then for means, then for sizes, and put the
columns side by side by a join of indexes, by setting a column, or by arithmetic. Dask groups all rows anew
for each. Here what is asked of the same groups of the same rows is one aggregation, of which each takes its
columns; what is put side by side is a column of the same rows then, and neither joined nor aligned.

What it does not reason about
    Keys other than columns, groups of nulls, categories; aggregates other than sums, means, counts, sizes,
    least and largest values; numbers that are objects, and texts other than to count them. Rows that are
    filtered in other ways. With pandas, aggregates of ``agg`` beside others unless groups are sorted.
Why the result is the same
    Dask computes each aggregate of ``agg`` by the same steps as by itself: on each partition, and then of
    what these returned. Groups of pandas come in the order in which Dask has them for single aggregates:
    sorted in each partition, then as they come. Those of cudf have no order. The labels and dtypes of each
    result are compared with those before. The keys of groups are distinct, so a join of two indexes that are
    those of the same groups finds each row once.
    ``tests/unit/client/planning/test_common_groups.py`` compares random programs.
The figure
    Q1 of TPC-H by columns: 3 tasks in place of 12, 0.78 of the CPU time (``docs/decisions/planning.md``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dask.dataframe.dask_expr import _expr, _groupby
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.planning.operations import (
    COMPUTING,
    RELABELLING,
    are_alike,
    dtypes_of,
    has_categories,
    is_of_pandas,
    is_on_rows,
    kind_of,
)
from dask_gpurt.client.planning.rules.needed_columns import dimensions, listed, names_in_join
from dask_gpurt.dask_hooks.planning import Expr, bottom_up, collection_of, name_of, rebuild, rebuild_from

if TYPE_CHECKING:
    from dask_gpurt.client.planning.rules import Facts

#: The aggregates that are computed at once, by Dask's classes, and the kinds of numpy's dtypes they are of.
_SINGLE: dict[type, str] = {
    _groupby.Sum: "sum",
    _groupby.Mean: "mean",
    _groupby.Count: "count",
    _groupby.Size: "size",
    _groupby.Min: "min",
    _groupby.Max: "max",
}
_KINDS = {"sum": "biuf", "mean": "iuf", "min": "iufmM", "max": "iufmM"}
#: How groups are made: the operands that have to be the same.
_HOW = ("observed", "dropna", "split_every", "split_out", "sort", "shuffle_method")
#: Operations on rows that leave each its label.
_LABELLED = frozenset([*RELABELLING, *COMPUTING, _expr.Projection, _expr.Assign])


class GroupsAtOnce(_groupby.DecomposableGroupbyAggregation):
    """Aggregate groups of pandas in the order that single aggregates have: sorted in each partition."""

    @property
    def chunk_kwargs(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the arguments of the aggregation of a partition."""
        return {**super().chunk_kwargs, "sort": True}


class _Asked(NamedTuple):
    """Hold what is asked of groups: the column and the aggregate of each column of the result."""

    expr: Any
    columns: list[tuple[Hashable, str]]


class CommonGroups:
    """Aggregate the same groups once."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan in which no rows are grouped twice by the same keys for known aggregates."""
        asked: defaultdict[Hashable, list[_Asked]] = defaultdict(list)
        for expr in bottom_up(plan):
            found = _asked_of(expr) if isinstance(expr, _groupby.GroupByBase) else None
            if found is not None:
                how = tuple(map(expr.operand, _HOW))
                asked[name_of(_rows_below(expr.frame)), tuple(expr.by), how].append(found)
        instead: dict[str, Expr] = {}
        for several in asked.values():
            made = _at_once(several)
            instead |= made
            for name in made:
                facts.note(self, name, "is aggregated with others of the same groups", done=True)
        if not instead:
            return plan
        return _side_by_side(rebuild_from(plan, lambda old, new: instead.get(name_of(old), new)))


def _rows_below(frame: Any) -> Any:
    """Return the rows of a frame with all of its columns."""
    while type(frame) is _expr.Projection and frame.ndim == 2:
        frame = frame.frame
    return frame


def _asked_of(groups: Any) -> _Asked | None:
    """Return what is asked of groups; None if that is left to Dask."""
    kind = kind_of(groups)
    if kind not in (*_SINGLE, _groupby.GroupbyAggregation) or dimensions(groups.frame) != 2:
        return None
    labels = list(groups.frame.columns)
    is_plain = all(type(label) is str and "___" not in label for label in labels)
    if not is_plain or len({*labels}) < len(labels) or groups.dropna is False:
        return None
    if not {*map(type, groups.by)} <= {str} or not {*groups.by} <= {*labels} or has_categories(groups.frame):
        return None
    columns = _columns_of(groups, kind)
    dtypes = dict(zip(labels, dtypes_of(groups.frame), strict=True))
    is_known = columns and all(
        name == "size" or (column not in groups.by and _is_known(dtypes.get(column), name))
        for column, name in columns
    )
    return _Asked(groups, columns) if is_known else None


def _is_known(dtype: Any, aggregate: str) -> bool:
    """Return whether an aggregate of a column has the same values beside others."""
    is_of_numpy = isinstance(dtype, np.dtype) and dtype.kind in _KINDS.get(aggregate, "")
    return is_of_numpy or (aggregate == "count" and dtype is not None)


def _columns_of(groups: Any, kind: type) -> list[tuple[Any, str]]:
    if kind is _groupby.GroupbyAggregation:
        if not isinstance(groups.arg, dict) or (is_of_pandas(groups) and groups.sort is not True):
            return []
        return [(column, name if isinstance(name, str) else "") for column, name in groups.arg.items()]
    options = [groups.operand(name) or {} for name in ("chunk_kwargs", "aggregate_kwargs")]
    if any(value for each in options for value in each.values()):
        return []
    if kind is _groupby.Size:
        return [(groups.by[0], "size")]
    chosen = groups.operand("_slice")
    others = (column for column in groups.frame.columns if column not in groups.by)
    return [(column, _SINGLE[kind]) for column in (listed(chosen) if chosen is not None else others)]


def _at_once(several: list[_Asked]) -> dict[str, Expr]:
    """Return what takes the place of aggregations, by name; none of those whose result would be another."""
    while len(several) > 1:
        try:
            made = _made(several)
        except (TypeError, ValueError):  # a library has no such aggregate
            return {}
        alike = [each for each in several if _takes_place(made[name_of(each.expr)], each.expr)]
        if len(alike) == len(several):
            return made
        several = alike
    return {}


def _made(several: list[_Asked]) -> dict[str, Expr]:
    first = several[0].expr
    rows = _rows_below(first.frame)
    frame, taken = collection_of(rows), {*rows.columns}
    names: dict[tuple[Hashable, str], str] = {}
    for column, aggregate in dict.fromkeys(pair for each in several for pair in each.columns):
        label = f"{aggregate} of {column}"
        while label in taken:
            label += "_"
        taken.add(label)
        names[column, aggregate] = label
    copies = {label: _values(frame, *pair) for pair, label in names.items()}
    aggregates = {label: aggregate for (_, aggregate), label in names.items()}
    made = collection_of(_aggregated(first, frame.assign(**copies), aggregates))
    return {name_of(each.expr): _part_of(made, each, names) for each in several}


def _values(frame: Any, column: Hashable, aggregate: str) -> Any:
    """Return what is aggregated. The size of a group is that of any column; that of nulls has another dtype.

    Sums of integers, which dask_cudf divides for a mean, may wrap around.
    """
    if aggregate == "size":
        return 1
    is_of_floats = is_of_pandas(frame.expr) or frame[column].dtype.kind == "f" or aggregate != "mean"
    return frame[column] if is_of_floats else frame[column].astype("float64")


def _aggregated(like: Any, frame: Any, aggregates: dict[str, str]) -> Expr:
    how = {name: like.operand(name) for name in _HOW}
    if is_of_pandas(like):
        operands = [frame.expr, aggregates, *how.values(), None, *like.by]
        return GroupsAtOnce(*operands)  # type: ignore[no-untyped-call]
    chosen = {name: how.pop(name) for name in ("observed", "dropna", "sort")}
    groups = frame.groupby(list(like.by), **{name: each for name, each in chosen.items() if each is not None})
    found: Expr = groups.agg(aggregates, **how).expr
    return found


def _part_of(made: Any, asked: _Asked, names: dict[tuple[Hashable, str], str]) -> Expr:
    """Return the columns of an aggregation that one of those in it has asked for."""
    labels = [names[pair] for pair in asked.columns]
    if asked.expr.ndim == 1:
        part: Any = _expr.RenameSeries(made[labels[0]].expr, asked.expr._meta.name)
    else:
        part = _expr.RenameFrame(made[labels].expr, dict(zip(labels, asked.expr.columns, strict=True)))
    found: Expr = part
    return found


def _takes_place(made: Any, expr: Any) -> bool:
    return are_alike(made, expr) and bool(made.npartitions == expr.npartitions)


# ---- side by side ---------------------------------------------------------------------------------


def _side_by_side(plan: Expr) -> Expr:
    """Return a plan in which columns of the same groups are set, and not joined or aligned by labels."""
    known: dict[str, str | None] = {}

    def groups_of(expr: Any) -> str | None:
        """Return the name of the groups that rows are, each with its label; None if they are no groups."""
        if (name := name_of(expr)) not in known:
            known[name] = name if isinstance(expr, _groupby.GroupByBase) else None
            if type(expr) in _LABELLED and is_on_rows(expr):
                inputs = {groups_of(each) for each in expr.dependencies() if dimensions(each)}
                known[name] = inputs.pop() if len(inputs) == 1 else None
        return known[name]

    def change(expr: Any) -> Any:
        sides = [each for each in expr.operands if isinstance(each, Expr)]
        if type(expr) not in _MADE or len(sides) != 2 or groups_of(sides[0]) is None:
            return expr
        if groups_of(sides[0]) != groups_of(sides[1]):
            return expr
        made = _MADE[type(expr)](expr)
        return made if made is not None and _takes_place(made, expr) else expr

    return rebuild(plan, change)


def _joined(join: Any) -> Any:
    if not (join.left_index and join.right_index) or join.how not in ("inner", "left") or join.indicator:
        return None
    if join.left.ndim != 2 or join.right.ndim != 2 or len({*join.columns}) < len(join.columns):
        return None
    left, right = names_in_join(join)
    if not all(isinstance(name, str) for name in join.columns):
        return None
    renamed = {old: new for new, old in left.items() if old != new}
    frame: Any = _expr.RenameFrame(join.left, renamed) if renamed else join.left
    return _expr.Assign(frame, *_pairs(join.right, right))


def _pairs(frame: Any, names: dict[Any, Any]) -> Iterator[Any]:
    for new, old in names.items():
        yield from (new, _expr.Projection(frame, old))


def _set(expr: Any) -> Any:
    is_column = isinstance(expr.column, str) and expr.value.ndim == 1
    return _expr.Assign(expr.frame, expr.column, expr.value) if is_column else None


def _computed(expr: Any) -> Any:
    if expr.frame.ndim != 1 or expr.other.ndim != 1:
        return None
    found: Any = getattr(expr.frame, expr.op)(expr.other)
    return found if type(found) in COMPUTING else None


#: What puts columns of two frames side by side by their labels, and what makes the same of the same rows.
_MADE: dict[type, Any] = {
    Merge: _joined,
    _expr.AssignAlign: _set,
    _expr.OpAlignPartitions: _computed,
}
