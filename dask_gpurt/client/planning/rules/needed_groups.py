"""Aggregate only the groups that a join looks for.

Programs compute the mean of all groups, join it to their rows, and keep a few of these afterwards, by a
condition on a table that is joined last. Filters move below joins, so that this table is small; but all rows
are still grouped. Here the rows of groups are first joined, as a semi join, with the keys that the groups are
joined with later on, if these are in one partition, and few.

What it does not reason about
    Keys of groups that are computed, of floats or categories, or that go with nulls; groups that other parts
    of the plan use as well; keys in several partitions, which would have to be moved. How many rows a key
    has. Tables whose groups take no longer than the tasks of another join.
Why the result is the same
    A group is left out if its key is not among those that an inner join, a semi join or the kept side of a
    left join looks for, in which no row of it would be found: so nothing that is computed of it is in the
    result. The rows of the other groups all stay. No result may depend on the order or the partitions of
    rows (:mod:`.dependence`), and tasks check on which dtypes of files that relies.
    ``tests/unit/client/planning/test_key_joins.py`` compares random programs.
The figure
    Q17 and Q20 of TPC-H take 0.5 to 0.75 of the CPU time in most styles (``docs/decisions/planning.md``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _expr, _groupby
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.planning.join_order.costs import RowEstimates, UnknownSizeError
from dask_gpurt.client.planning.operations import dtype_in, is_of_pandas, kind_of
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.dependence import rely_on_independence
from dask_gpurt.client.planning.rules.filters import BY_GROUP, KEPT
from dask_gpurt.client.planning.rules.needed_columns import column_of, dimensions, keys_of_join, names_in_join
from dask_gpurt.client.planning.rules.row_roots import RowRoots
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild_from, with_operand

#: The share of its groups, and of its rows, up to which keys are few.
FEW = 0.25
#: The rows from which on their groups take longer than the tasks that choose them.
WORTHWHILE, WORTHWHILE_ON_GPUS = 200_000, 5_000_000
#: The most groups of a plan whose rows are chosen.
MOST = 8
#: The sides of a join whose rows may be left out where the other side has no match, by its kind.
_SOUGHT = {"inner": (0, 1), "left": (1,), "right": (0,), "leftsemi": (0, 1)}


class _Found(NamedTuple):
    """Hold groups, the key of theirs that is sought, and the column of a frame that has what is sought."""

    groups: Any
    key: Hashable
    frame: Any
    column: Hashable


class NeededGroups:
    """Leave out rows of groups that no join looks for."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan that aggregates only groups that are needed."""
        if not any(type(expr) is Merge for expr in plan.walk()) or not any(
            isinstance(expr, _groupby.GroupByBase) for expr in plan.walk()
        ):
            return plan
        bare, dependent = facts.bare(plan)
        if dependent:
            return plan
        changed = bare
        for _ in range(MOST):
            try:
                found = _Plan(changed, RowEstimates(facts.tables)).needed()
                if found is None or not rely_on_independence(facts.tables, bare):
                    break
            except OSError:  # a file has gone, which Dask finds out as it reads it
                return plan
            facts.note(self, name_of(found.groups), "has only the groups that a join looks for", done=True)
            changed = _with(changed, found)
        if changed is bare:
            return plan
        facts.note_bare(changed)
        return changed


def _with(plan: Expr, found: _Found) -> Expr:
    """Return a plan whose groups are of those rows only that have a sought key."""
    sought: Any = _expr.Projection(found.frame, [found.column])
    if found.column != found.key:
        sought = _expr.RenameFrame(sought, {found.column: found.key})

    def change(old: Any, new: Any) -> Any:
        if name_of(old) != name_of(found.groups):
            return new
        operands = [new.frame, sought, "leftsemi", [found.key], [found.key]]
        return with_operand(new, "frame", Merge(*operands))

    return rebuild_from(plan, change)


class _Plan(RowRoots):
    """Hold a plan, and find groups of which a join needs few."""

    def __init__(self, plan: Any, estimates: RowEstimates):
        super().__init__(plan)
        self._estimates = estimates

    def needed(self) -> _Found | None:
        """Return groups of which few are needed, those first that are joined last."""
        for join in self.order:
            if type(join) is not Merge or (join.left_index and join.right_index):
                continue
            for at in _SOUGHT.get(join.how, ()):
                if (found := self._needed_of(join, at)) is not None:
                    return found
        return None

    def _needed_of(self, join: Any, at: int) -> _Found | None:
        """Return groups of one side of a join of which few are on the other."""
        sides, keys = (join.left, join.right), keys_of_join(join)
        by_index = (join.left_index, join.right_index)
        if by_index[1 - at] or any(isinstance(key, Expr) for each in keys for key in each):
            return None
        for number, sought in enumerate(keys[1 - at]):
            if by_index[at]:
                led = self._by_index(join, sides[at])
            else:
                led = self._led(join, sides[at], keys[at][number])
            for groups, key in led:
                if (found := self._few(groups, key, sides[1 - at], sought)) is not None:
                    return found
        return None

    def _led(self, user: Any, frame: Any, column: Hashable) -> Iterator[tuple[Any, Hashable]]:
        """Yield the groups that a column has the keys of, and the key, if only a join uses these."""
        root = self.rows[name_of(frame)].root
        if not self._is_only_for(root, user) or (name := self._name_in(root, frame, column)) is None:
            return
        if type(root) is _expr.ResetIndex and not root.drop and name in root.frame._meta.index.names:
            groups = self.rows[name_of(root.frame)].root
            if has_known_keys(groups) and name in groups.by and self._is_only_for(groups, root):
                yield groups, name
        elif type(root) is Merge:
            for side, below in _passed_on(root, name):
                yield from self._by_index(root, side) if below is None else self._led(root, side, below)

    def _by_index(self, user: Any, frame: Any) -> Iterator[tuple[Any, Hashable]]:
        """Yield the groups whose one key is the index of a frame, if only a join uses these."""
        groups = self.rows[name_of(frame)].root
        if has_known_keys(groups) and len(groups.by) == 1 and self._is_only_for(groups, user):
            yield groups, groups.by[0]

    def _is_only_for(self, root: Any, user: Any) -> bool:
        return {place[0] for _, place in self.exits[name_of(root)]} == {name_of(user)}

    def _name_in(self, root: Any, frame: Any, column: Hashable) -> Any:
        """Return the name that a column of a frame has in the root of its rows; None if it is computed."""
        return column_of(root, self.column(root, frame, column)) if dimensions(frame) == 2 else None

    def _few(self, groups: Any, key: Any, frame: Any, column: Hashable) -> _Found | None:
        """Return keys in one partition that are few of the keys of groups; None if there are none."""
        rows = groups.frame
        try:
            total, of_rows = self._estimates.column(rows, key).distinct, self._estimates.rows(rows)
            candidates = [
                (self._estimates.rows(each), each, name)
                for each, name in self._sources(frame, column)
                if each.npartitions == 1 and dtype_in(each, name) == dtype_in(rows, key)
            ]
            number, keys, name = min(candidates, key=lambda each: each[0])
            few = min(number, self._estimates.column(keys, name).distinct)
        except (UnknownSizeError, ValueError):
            return None
        known = {name_of(each) for each in rows.walk()}
        inside = {name_of(each) for each in keys.walk()}
        is_new = name_of(keys) not in known and name_of(groups) not in inside
        is_worthwhile = of_rows >= (WORTHWHILE if is_of_pandas(rows) else WORTHWHILE_ON_GPUS)
        is_few = few <= FEW * total and number <= FEW * of_rows
        return _Found(groups, key, keys, name) if is_new and is_worthwhile and is_few else None

    def _sources(self, frame: Any, column: Hashable) -> Iterator[tuple[Any, Hashable]]:
        """Yield the frames that have all values that a column has."""
        if dimensions(frame) != 2 or list(frame.columns).count(column) != 1:
            return
        yield frame, column
        root = self.rows[name_of(frame)].root
        name = self._name_in(root, frame, column)
        if type(root) is Merge and name is not None:
            for side, below in _passed_on(root, name):
                if below is not None:
                    yield from self._sources(side, below)


def _passed_on(join: Any, name: Hashable) -> Iterator[tuple[Any, Hashable | None]]:
    """Yield the sides that a join takes rows of, and what has a column's values there; None for the index."""
    for at, names in enumerate(names_in_join(join)):
        if at not in KEPT.get(join.how, ()):
            continue
        side = (join.left, join.right)[at]
        if name in names and names[name] in side.columns:
            yield side, names[name]
        elif join.how == "inner" and (other := _equal_key(join, at, name)) is not None:
            yield side, other
        elif join.how == "inner" and (join.left_index, join.right_index)[at] and _is_key(join, 1 - at, name):
            yield side, None


def _equal_key(join: Any, at: int, name: Hashable) -> Any:
    """Return the key of a side that is equal to a column which is a key of the other side."""
    keys, names = keys_of_join(join), names_in_join(join)[1 - at]
    for own, other in zip(keys[at], keys[1 - at], strict=False):
        if names.get(name) == other and not isinstance(own, Expr):
            return own
    return None


def _is_key(join: Any, at: int, name: Hashable) -> bool:
    """Return whether a column of a join is the only key of a side."""
    keys = keys_of_join(join)[at]
    return len(keys) == 1 and names_in_join(join)[at].get(name) == keys[0]


def has_known_keys(groups: Any) -> bool:
    """Return whether there is a row for each group, by columns whose equal values are the same, but nulls."""
    if kind_of(groups) not in BY_GROUP:
        return False
    if groups.dropna is False or dimensions(groups.frame) != 2:
        return False
    labels = list(groups.frame.columns)
    return all(
        not isinstance(key, Expr) and labels.count(key) == 1 and _is_plain(dtype_in(groups.frame, key))
        for key in groups.by
    )


def _is_plain(dtype: Any) -> bool:
    is_of_numpy = isinstance(dtype, np.dtype) and dtype.kind in "iuM"
    return is_of_numpy or isinstance(dtype, pd.StringDtype)
