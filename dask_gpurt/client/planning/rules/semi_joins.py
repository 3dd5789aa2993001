"""Look for a match where a join only leaves out rows, and make no distinct keys or groups for that.

There is a semi join in dask.dataframe, which few know. Programs join with distinct keys, or with what a
groupby returns, and use no column of these: the join only leaves out the rows without a match. Here it is a
semi join with the rows themselves, which need be neither deduplicated nor grouped.

What it does not reason about
    Distinct keys that other columns of the join depend on; keys in several partitions, of which each has to
    be moved once only; joins of other kinds, of two indexes, and by labels that a result shows.
Why the result is the same
    With distinct keys on one side, a join has each row of the other side once, if there is a match, and so
    has a semi join, whichever rows have that key. Groups have no null for a key, so rows without a key are
    left out first. Both match nulls of distinct keys. No result may depend on the order of rows
    (:mod:`.dependence`).
    ``tests/unit/client/planning/test_key_joins.py`` compares random programs.
The figure
    Q4 of TPC-H takes as long as with a semi join in all styles, before 1.35 to 1.65 times
    (``docs/decisions/planning.md``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.planning.operations import dtypes_of, is_no_operation, kind_of
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.dependence import numbered
from dask_gpurt.client.planning.rules.needed_columns import keys_of_join, listed, names_in_join, users_of
from dask_gpurt.client.planning.rules.needed_groups import has_known_keys
from dask_gpurt.dask_hooks.planning import Expr, collection_of, name_of, rebuild_from

#: Operations on rows below which the keys have the names that they have above.
_SAME_KEYS = (_expr.Projection, _expr.ToFrame, _expr.RenameSeries, _expr.RenameAxis)
#: Aggregates that are never null.
_FULL = (_groupby.Size, _groupby.Count)


class SemiJoins:
    """Make semi joins of joins that only leave out rows."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan that makes no distinct keys only to look them up."""
        if not any(type(expr) is Merge and expr.how == "inner" for expr in plan.walk()):
            return plan
        bare, dependent = facts.bare(plan)
        if dependent:
            return plan
        numbers = numbered(bare)
        users = users_of(bare.walk())

        def change(old: Any, new: Any) -> Any:
            if type(old) is not Merge or old.how != "inner" or old.indicator:
                return new
            for at in (1, 0):
                found = _semi_join(new, at)
                kept = (old.left, old.right)[1 - at]
                by_index = old.left_index or old.right_index
                if (
                    found is None
                    or not all(_uses_only(each, kept) for each in users[name_of(old)])
                    or (by_index and name_of(kept) not in numbers)
                ):
                    continue
                facts.note(self, name_of(old), "only leaves out rows without a match", done=True)
                return found
            return new

        changed = rebuild_from(bare, change)
        if name_of(changed) == name_of(bare):
            return plan
        facts.note_bare(changed)
        return changed


def _uses_only(user: Any, kept: Any) -> bool:
    """Return whether what uses a join takes columns of one side alone, which have their names."""
    labels = list(kept.columns)
    is_chosen = type(user) is _expr.Projection
    return is_chosen and all(labels.count(name) == 1 for name in listed(user.operand("columns")))


def _semi_join(join: Any, at: int) -> Any:
    """Return a semi join in place of one whose one side has distinct keys; None if it may not have."""
    side, kept = (join.left, join.right)[at], (join.left, join.right)[1 - at]
    by_index, (own, other) = (join.left_index, join.right_index), keys_of_join(join)
    keys, sought = (own, other) if at == 0 else (other, own)
    if by_index[1 - at] or not sought or any(isinstance(key, Expr) for key in (*keys, *sought)):
        return None
    names = names_in_join(join)[1 - at]
    if kept.ndim != 2 or any(new != old for new, old in names.items()):
        return None
    found = _by_index(side) if by_index[at] else _distinct(side, keys)
    if found is None:
        return None
    rows, columns = found
    if (
        rows.npartitions != 1
        or len(columns) != len(sought)
        or _dtypes(rows, columns) != _dtypes(kept, sought)
    ):
        return None
    renamed = {old: new for old, new in zip(columns, sought, strict=True) if old != new}
    rows = _expr.RenameFrame(rows, renamed) if renamed else rows
    return Merge(kept, rows, "leftsemi", list(sought), list(sought))


def _dtypes(frame: Any, columns: Sequence[Hashable]) -> list[Any] | None:
    known = dict(zip(frame.columns, dtypes_of(frame), strict=True))
    dtypes = [known.get(column) for column in columns]
    return None if None in dtypes or len(known) < len(frame.columns) else dtypes


def _distinct(frame: Any, keys: Sequence[Hashable]) -> tuple[Any, list[Hashable]] | None:
    """Return rows, and their columns, of which a frame has each combination once; None if it is none."""
    names = list(keys)
    while True:
        if (type(frame) is _expr.Projection and frame.ndim == 2) or is_no_operation(frame):
            frame = frame.frame
        elif type(frame) is _expr.RenameFrame and isinstance(frame.operand("columns"), dict):
            before = dict(zip(frame.columns, frame.frame.columns, strict=True))
            names, frame = [before.get(name) for name in names], frame.frame
        else:
            break
    if type(frame) is _reductions.DropDuplicates and frame.ndim == 2:
        is_by_keys = {*names} == {*listed(frame.subset or frame.columns)} and len({*names}) == len(names)
        return (_expr.Projection(frame.frame, names), names) if is_by_keys else None
    if type(frame) is not _expr.ResetIndex or frame.drop:
        return None
    groups = _groups_below(frame.frame)
    if groups is None or {*names} != {*groups.by} or len(names) != len(groups.by):
        return None
    return collection_of(groups.frame)[names].dropna().expr, names


def _by_index(frame: Any) -> tuple[Any, list[Hashable]] | None:
    """Return the rows of groups by one column, and that column."""
    groups = _groups_below(frame)
    if groups is None or len(groups.by) != 1:
        return None
    names = list(groups.by)
    return collection_of(groups.frame)[names].dropna().expr, names


def _groups_below(frame: Any) -> Any:
    """Return the groups that a frame has all of, each with its label; None if it has other rows."""
    while kind_of(frame) in (*_SAME_KEYS, _expr.RenameFrame, _expr.Filter):
        if type(frame) is _expr.Filter and not _is_true(frame.predicate):
            return None
        frame = frame.frame
    return frame if has_known_keys(frame) else None


def _is_true(condition: Any) -> bool:
    """Return whether a condition only says that an aggregate that is never null is none."""
    while type(condition) is _expr.Invert and type(condition.frame) is _expr.Invert:
        condition = condition.frame.frame
    if type(condition) is not _expr.NotNull:
        return False
    column = condition.frame
    while kind_of(column) in (*_SAME_KEYS, _expr.RenameFrame):
        column = column.frame
    return type(column) in _FULL
