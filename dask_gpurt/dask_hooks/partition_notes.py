"""Find out whether a plan relies on Dask's notes of how rows are divided, and which of them are true.

Dask notes by which columns the partitions of an expression are divided, so that a groupby or a join by these
need not shuffle. Some notes are wrong: those of joins that send a single partition or few of them to all
partitions of the other side, of joins that give a noted name to another column by suffixes, of joins that
keep unmatched rows, and of columns that were assigned anew. How many partitions there are decides whether
such a note matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from dask._expr import Expr
from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.dask_hooks.fused_reads import is_idle
from dask_gpurt.dask_hooks.operations import is_no_operation
from dask_gpurt.dask_hooks.partition_dependence import joins_columns

__all__ = ["divided_by", "relies_on_notes"]

#: Columns by whose values rows are divided: those that are alike in all of them are in one partition.
Columns = frozenset[Any]
#: Operations that leave each row in its partition. A column that they do not assign keeps its values.
_KEEP_ROWS_IN_PLACE = frozenset([_expr.Assign, _expr.Filter, _expr.Projection, _expr.RenameFrame])


def relies_on_notes(plan: Expr) -> bool:
    """Return whether a tuned plan leaves out a shuffle because of a note that is not known to be true.

    A plan whose reads have other numbers of partitions than Dask chooses must not.
    """
    frames = [expr for expr in plan.walk() if isinstance(expr, _expr.Expr)]
    try:
        for expr in frames:
            _ = expr.unique_partition_mapping_columns_from_shuffle
        return any(map(_relies, frames))
    except (KeyError, TypeError):  # a note that Dask itself cannot follow through a renaming
        return True


def _relies(expr: Any) -> bool:
    if isinstance(expr, Merge):
        return not expr._is_single_partition_broadcast and not _shuffles_both_sides(expr)
    if isinstance(expr, _reductions.ApplyConcatApply):
        if expr.npartitions == 1 or not expr.should_shuffle or expr.need_to_shuffle:
            return False
        keys = _keys_of_groups(expr)
        return not any(columns <= keys for columns in divided_by(expr.frame))
    return False


def _shuffles_both_sides(join: Any) -> bool:
    sides = ((join.left, join.left_on), (join.right, join.right_on))
    noted = any(join._on_condition_already_partitioned(side, on) for side, on in sides)
    return not (noted or join._is_single_partition_broadcast or join.is_broadcast_join)


def _keys_of_groups(expr: Any) -> Columns:
    """Return the columns by which rows are grouped or deduplicated; none if they are computed."""
    if not isinstance(expr, _groupby.GroupByBase):
        return frozenset(expr.split_by or expr.frame.columns)
    is_plain = not any(isinstance(key, Expr) for key in expr.by)
    return frozenset(expr._by_columns) if is_plain else frozenset()


def divided_by(expr: Any) -> set[Columns]:
    """Return columns by whose values the partitions of an expression are divided, for certain.

    They are so after an inner join that shuffles both sides by integers of the same dtype, which have the
    same hash wherever they are, until the column is assigned anew or left out.
    """
    if expr.ndim != 2:
        return set()
    kind = type(expr)
    if kind is Merge:
        return _divided_by_join(expr)
    if not (kind in _KEEP_ROWS_IN_PLACE or is_no_operation(expr) or is_idle(expr)):
        return set()
    found = divided_by(expr.frame)
    if kind is _expr.RenameFrame:
        names = expr.operand("columns")
        if not isinstance(names, Mapping):
            return set()
        found = {frozenset(names.get(column, column) for column in columns) for columns in found}
    if kind is _expr.Assign:
        found = {columns for columns in found if not columns & set(expr.keys)}
    unique = {column for column in expr.columns if list(expr.columns).count(column) == 1}
    return {columns for columns in found if columns <= unique}


def _divided_by_join(join: Any) -> set[Columns]:
    if type(join) is not Merge or join.how != "inner" or not joins_columns(join):
        return set()
    if not _shuffles_both_sides(join):
        return set()
    left, right = _listed(join.left_on), _listed(join.right_on)
    dtypes = [
        (join.left._meta.dtypes[a], join.right._meta.dtypes[b]) for a, b in zip(left, right, strict=True)
    ]
    if not all(a == b and isinstance(a, np.dtype) and a.kind in "iu" for a, b in dtypes):
        return set()
    in_both = set(join.left.columns) & set(join.right.columns)
    shared = {a for a, b in zip(left, right, strict=True) if a == b}
    with_suffix = {f"{column}{suffix}" for column in in_both - shared for suffix in join.suffixes}
    renamed = (in_both - shared) | with_suffix
    return {frozenset(keys) for keys in (left, right) if not renamed & set(keys)}


def _listed(on: Any) -> list[Any]:
    return list(on) if isinstance(on, (list, tuple)) else [on]
