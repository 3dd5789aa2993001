"""Move filters down to where rows come from, below joins, groupbys, concatenations and distinct rows.

Dask moves a filter as it simplifies a plan, one step after the other, and stops where a step is not one of a
few: at a column that was assigned or renamed in between, at a condition on two tables, at ``str.contains``,
at a suffix, at a concatenation. Each row is then joined, and shuffled, before it is left out. Here conditions
are traced to the columns of the operation that made the rows, its *root*, through all operations on rows in
between; so it does not matter where a condition was written. A root passes on to its inputs what *all* that
use its rows ask for: a join whose result is used twice, once with a filter, stays as it is. An index may be
set after a filter if all that is done with it is that joins look it up.

A condition on both sides of an inner join, such as one pair of names or another, stays above it, and what it
says of each side alone is checked below as well.

This is done before Dask simplifies the plan, which then leaves out the columns that only conditions needed.

What it does not reason about
    Conditions with functions of users, on an index, on aggregates. What conditions on a side of an outer join
    imply; a left join becomes an inner join if one of them is not true of null. How many rows a condition
    leaves out. Reads: these are Dask's. Rows of left joins that shall have no match: :mod:`.anti_joins`.
Why the result is the same
    Conditions are operations on single rows (:func:`.operations.is_on_rows`) on columns that an operation
    passes on unchanged, of the same dtype, so they have the same values below it. What is left out is left
    out of everything that is computed from it. Where rows get new numbers, these must not be seen: those of
    joined rows have no meaning, since joined rows are in no order. With pandas, where integers become floats
    if there are nulls, no filter moves below an operation that does so to a column whose dtype matters
    (:func:`.needed_columns.needed_dtypes`), unless the footers of its files tell that there are none.
    ``tests/unit/client/planning/test_filters.py`` compares random programs.
The figure
    As Dask plans them, 31 of 49 programs of TPC-H in three styles read 1.3 to 5.3 times the columns of the
    careful style, and one does with this rule (``docs/decisions/planning.md``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Set
from functools import reduce
from typing import Any

import pandas as pd
from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._concat import Concat
from dask.dataframe.dask_expr._merge import Merge, SemiMerge
from dask.dataframe.dask_expr._shuffle import SetIndex, SetIndexBlockwise, SortValues

from dask_gpurt.client.planning.operations import (
    COMPUTING,
    KEEPING,
    has_fixed_dtypes,
    is_narrow,
    is_no_operation,
    is_of_pandas,
    kind_of,
)
from dask_gpurt.client.planning.reads import read_of
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.anti_joins import (
    repeats_keys,
    tells_matches,
    tested_column,
    with_distinct_keys,
)
from dask_gpurt.client.planning.rules.common_groups import GroupsAtOnce
from dask_gpurt.client.planning.rules.needed_columns import (
    column_of,
    dimensions,
    is_condition,
    keys_of_join,
    listed,
    names_in_join,
    needed_dtypes,
    origin_of,
    shared_keys,
)
from dask_gpurt.client.planning.rules.row_roots import (
    Conditions,
    Place,
    RowRoots,
    all_of,
    columns_in,
    conjuncts,
    with_columns,
)
from dask_gpurt.client.planning.table_facts import TableFacts
from dask_gpurt.dask_hooks.planning import Expr, is_computation, is_sequence, name_of

#: A condition that becomes a filter on what is at a place.
Placed = tuple[Place, Any]

#: Aggregations of which each group's is computed from its rows alone.
BY_GROUP = (
    *(_groupby.Sum, _groupby.Prod, _groupby.Min, _groupby.Max, _groupby.First, _groupby.Last),
    *(_groupby.Count, _groupby.Size, _groupby.Var, _groupby.Std, _groupby.Mean, _groupby.NUnique),
    *(_groupby.GroupbyAggregation, GroupsAtOnce),
)
#: Operations on several rows that leave them their labels, and those that show none.
_LABELLED = (
    *(_reductions.DropDuplicates, _reductions.NLargest, _reductions.NSmallest),
    *(SortValues, Concat, _expr.Head, _expr.Tail),
)
_UNLABELLED = (
    *(_reductions.Sum, _reductions.Mean, _reductions.Count, _reductions.Max, _reductions.Min),
    *(_reductions.Len, _reductions.Size, _reductions.Unique, _reductions.ValueCounts),
    *(_reductions.Any, _reductions.All, _reductions.Prod, _reductions.Var),
)
#: The sides of a join on which its result depends row by row, by its kind.
KEPT = {"inner": (0, 1), "left": (0,), "right": (1,), "leftsemi": (0,)}


class Filters:
    """Move filters down to where rows come from."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan whose filters leave out rows as early as they can."""
        if not any(type(expr) is _expr.Filter for expr in plan.walk()):
            return plan

        def note(expr: Expr, text: str, *, done: bool = False) -> None:
            facts.note(self, name_of(expr), text, done=done)

        return _Plan(plan, note, facts.tables).moved()


def conditions_on_reads(plan: Expr) -> dict[str, list[list[Any]]]:
    """Return, for each expression without inputs, by name, what all that use its rows check before.

    There is a list for each user, of conditions on the columns of the expression.
    """
    found = _Plan(plan, lambda expr, text: None, TableFacts())
    return {
        name_of(expr): [
            [each for each in found.asked(expr, *user).values() if each is not None]
            for user in found.exits[name_of(expr)]
        ]
        for expr in plan.walk()
        if not expr.dependencies()
    }


class _LeftError(Exception):
    """A condition has to stay above an operation."""


class _Plan(RowRoots):
    """Hold a plan, and decide where its filters go."""

    def __init__(self, plan: Any, note: Callable[..., None], tables: TableFacts):
        super().__init__(plan)
        self._note, self._tables = note, tables
        self._dtypes = needed_dtypes(self.order)
        #: The filters that are added, and the conditions that hold for all rows of a root because of them.
        self._placed: defaultdict[Place, list[Any]] = defaultdict(list)
        self._moved: defaultdict[str, set[str]] = defaultdict(set)
        #: The left joins that are inner joins, since rows without a match are left out later.
        self._inner = set[str]()
        #: The left joins of which only rows without a match are kept.
        self._unmatched = set[str]()

    def moved(self) -> Expr:
        """Return the plan with its filters moved."""
        for expr in self.order:
            if self.rows[name_of(expr)].root is expr and dimensions(expr):
                self._pass_on(expr)
        plan: Expr = self.order[0]
        changes = (self._inner, self._unmatched, *self._moved.values(), *self._placed.values())
        return self._rebuilt() if any(changes) else plan

    # ---- where filters go -------------------------------------------------------------------------

    def _pass_on(self, root: Any) -> None:
        """Have the inputs of an operation fulfil what all users of its rows ask for, where possible."""
        exits = self.exits[name_of(root)]
        asked = [self.asked(root, expr, place) for expr, place in exits]
        shared = [name for name in (asked[0] if asked else ()) if all(name in each for each in asked)]
        if type(root) is Merge and root.how == "left":
            self._find_other_kind(root, {name: asked[0][name] for name in shared})
        for name in shared if root.dependencies() else ():
            condition = asked[0][name]
            try:
                if condition is None:
                    raise _LeftError("it is not on columns of it alone")
                placed = self._passed(root, condition)
                self._check_what_shows(root, name)
            except _LeftError as error:
                self._note(root, f"has rows that are left out later, by {_text(root, condition)}: {error}")
                self._pass_on_implied(root, name, condition)
                continue
            for place, moved in placed:
                self._placed[place].append(moved)
            self._moved[name_of(root)].add(name)
            self._note(
                root, f"lacks rows from the start for which {_text(root, condition)} is false", done=True
            )
        for _, place in exits:
            kept = self._placed[place]
            self._placed[place] = [
                each for each in kept if self.name(root, each) not in self._moved[name_of(root)]
            ]

    def _pass_on_implied(self, join: Any, name: str, condition: Any) -> None:
        """Have the sides of an inner join fulfil what a condition on both of them says of each alone."""
        if type(join) is not Merge or self._how(join) != "inner" or condition is None:
            return
        for names in map(frozenset, names_in_join(join)):
            if (implied := _implied(join, condition, names)) is None:
                continue
            try:
                placed = self._passed(join, implied)
                self._check_what_shows(join, name)
            except _LeftError:
                continue
            for place, moved in placed:
                self._placed[place].append(moved)
            self._note(join, f"lacks rows that {_text(join, implied)} leaves out later on", done=True)

    def _find_other_kind(self, join: Any, conditions: Conditions) -> None:
        """Make another join of a left join if conditions leave out its rows without a match, or all others.

        It is an inner join then, or one whose right side needs each key once.
        """
        names = names_in_join(join)[1].keys() - shared_keys(join)
        if join.left_index:  # without a match, pandas fills these with the labels of the left side
            names -= {*keys_of_join(join)[1]}
        for name, condition in conditions.items():
            if condition is None:
                continue
            is_inner, column = _is_false_for_nulls(join, condition, names), tested_column(join, condition)
            if not is_inner and column is None:
                continue
            kind = "inner" if is_inner else "anti"
            try:
                if is_inner:
                    self._check_filled(join, 1)
                elif not repeats_keys(join, self._tables) or not tells_matches(join, column, self._tables):
                    raise _LeftError("keys may be distinct, or columns null")
                self._check_what_shows(join, name)
            except (OSError, _LeftError) as error:
                self._note(join, f"is not taken for an {kind} join: {error}")
                continue
            (self._inner if is_inner else self._unmatched).add(name_of(join))
            left_out = "without a match" if is_inner else "with a match"
            self._note(join, f"is an {kind} join: rows {left_out} are left out later", done=True)
            return

    def _how(self, join: Any) -> str:
        return "inner" if name_of(join) in self._inner else str(join.how)

    def asked(self, root: Any, expr: Any, place: Place) -> Conditions:
        """Return the conditions that hold for the rows at a place, or shall."""
        moved = {self.name(root, each): self.on(root, each) for each in self._placed[place]}
        return self.rows[name_of(expr)].chosen | moved

    def _passed(self, root: Any, condition: Any) -> list[Placed]:
        """Return the filters below an operation that are the same as a condition on its result."""
        columns = columns_in(root, condition)
        if not columns:
            raise _LeftError("it is not on columns of it alone")
        if any(_is_category(root, column) for column in columns):
            raise _LeftError("it is on categories")
        kind = type(root)
        if kind in (Merge, SemiMerge):
            return list(self._below_join(root, condition, columns))
        if kind is _expr.ResetIndex:
            return self._below_groups(root, condition, columns)
        if kind is Concat:
            return list(_below_concat(root, condition, columns))
        if kind in (SetIndex, SetIndexBlockwise):
            return self._below_index(root, condition)
        is_distinct = kind is _reductions.DropDuplicates and columns <= {*listed(root.subset or root.columns)}
        if is_distinct and not root.ignore_index and not _has_floats(root, columns):
            return [((name_of(root), 0), _on_other(root, condition, root.frame))]
        raise _LeftError(f"{kind.__name__} is not computed row by row")

    def _below_join(self, join: Any, condition: Any, columns: set[Any]) -> Iterator[Placed]:
        sides, keys, shared = (join.left, join.right), keys_of_join(join), shared_keys(join)
        if (how := self._how(join)) not in KEPT or any(
            isinstance(key, Expr) for each in keys for key in each
        ):
            raise _LeftError(f"it is a join of kind {how}")
        if any(len({*side.columns}) < len(side.columns) for side in sides):
            raise _LeftError("a side has several columns of one name")
        found = False
        for at, names in enumerate(names_in_join(join)):
            if at not in KEPT[how] or not columns <= names.keys() & {*join.columns}:
                continue
            if _dtypes_differ(join, sides[at], {name: names[name] for name in columns}):
                raise _LeftError("keys of its sides have other dtypes")
            if at == 1 and how == "inner" and columns & shared and _has_floats(join, columns):
                continue  # the result has those of the left side: 0.0 is equal to -0.0, but not the same
            if how in ("left", "right"):
                self._check_filled(join, 1 - at)
            found = True
            yield (name_of(join), at), _on_other(join, condition, sides[at], names)
        if not found:
            raise _LeftError(f"it is not on one side alone that a join of kind {how} keeps")

    def _check_filled(self, join: Any, at: int) -> None:
        """Raise if columns of a side become floats where there is no match, and that matters."""
        if not is_of_pandas(join):
            return
        names = names_in_join(join)[at]
        filled = (join.left, join.right)[at]._meta.dtypes
        for name in self._dtypes.get(name_of(join), frozenset()) & names.keys() - shared_keys(join):
            if is_narrow(filled[names[name]]):
                raise _LeftError(f"whether {name} has nulls, and so its dtype, depends on it")

    def _below_groups(self, resets: Any, condition: Any, columns: set[Any]) -> list[Placed]:
        groups = self.rows[name_of(resets.frame)].root
        if kind_of(groups) not in BY_GROUP or any(isinstance(key, Expr) for key in groups.by):
            raise _LeftError("what it has for an index is not made of columns by a groupby")
        if not columns <= {*groups.by} & {*groups.frame.columns} or _has_floats(groups.frame, columns):
            raise _LeftError("it is not on keys of groups alone")
        if any(_is_category(groups.frame, key) for key in groups.by):
            raise _LeftError("it has groups of categories")
        if any(user != name_of(resets) for _, (user, _) in self.exits[name_of(groups)]):
            raise _LeftError("others use the groups as well")
        return [((name_of(groups), 0), _on_other(resets, condition, groups.frame))]

    def _below_index(self, index: Any, condition: Any) -> list[Placed]:
        key = index.operands[1]
        if isinstance(key, Expr) or key not in index.frame.columns or index.append:
            raise _LeftError("its index is not one of its columns alone")
        for _, (name, position) in self.exits[name_of(index)]:
            user = self.exprs[name]
            if type(user) is not Merge or (user.left_index, user.right_index) != (
                position == 0,
                position == 1,
            ):
                raise _LeftError("more is done with its index than that a join looks it up")
        return [((name_of(index), 0), _on_other(index, condition, index.frame))]

    # ---- what would be seen -----------------------------------------------------------------------

    def _check_what_shows(self, root: Any, condition: str) -> None:
        """Raise if labels or dtypes before a condition is checked depend on it, and show."""
        exprs = [expr for expr in self.order if self.rows[name_of(expr)].root is root]
        rows = [expr for expr in exprs if condition not in self.rows[name_of(expr)].chosen]
        is_join = type(root) in (Merge, SemiMerge)
        by_index = is_join and (root.left_index or root.right_index)
        if (is_join and not by_index) or any(type(expr) is _expr.ResetIndex for expr in rows):
            self._check_numbers(root, are_results=is_join)
        if not is_of_pandas(root):
            return
        for expr in rows:
            is_fixed = (
                kind_of(expr) in KEEPING
                or is_no_operation(expr)
                or (type(expr) in COMPUTING and (has_fixed_dtypes(expr) or self._is_of_full(root, expr)))
            )
            if not is_fixed and self._dtypes.get(name_of(expr)) and expr is not root:
                raise _LeftError(f"the dtype of {type(expr).__name__} depends on which rows there are")

    def _is_of_full(self, root: Any, expr: Any) -> bool:
        """Return whether an operation is on a column without nulls, where ``dt.year`` has one dtype."""
        if not has_fixed_dtypes(expr, without_nulls=True):
            return False
        column = column_of(root, self.on(root, expr.frame))
        try:
            return column is not None and self._is_full(root, column)
        except OSError:  # Dask finds out as it reads the file
            return False

    def _is_full(self, frame: Any, column: Hashable) -> bool:
        """Return whether a column of files has no nulls, through joins that make none."""
        origin, name = origin_of(frame, column)
        if type(origin) is not Merge:
            return (read := read_of(origin)) is not None and self._tables.is_full(read, name)
        sides = zip((origin.left, origin.right), names_in_join(origin), strict=True)
        kept = [side for at, side in enumerate(sides) if at in KEPT.get(origin.how, ())]
        return any(name in names and self._is_full(side, names[name]) for side, names in kept)

    def _check_numbers(self, root: Any, *, are_results: bool) -> None:
        left = [place for _, place in self.exits[name_of(root)]]
        while left:
            name, position = left.pop()
            user = self.exprs[name]
            kind, follows = kind_of(user), False
            if is_computation(user) or is_sequence(user):
                if not are_results:
                    raise _LeftError("the numbers of its rows are a result")
            elif kind in (Merge, SemiMerge):
                if (user.left_index, user.right_index)[position]:
                    raise _LeftError("the numbers of its rows are joined")
                follows = user.left_index or user.right_index
            elif kind in BY_GROUP:
                if position or any(isinstance(key, Expr) for key in user.by):
                    raise _LeftError("groups are made of its rows by their numbers")
            elif kind in _LABELLED:
                follows = True
            elif kind not in _UNLABELLED:
                raise _LeftError(f"{kind.__name__} may see the numbers of its rows")
            if follows:
                left.extend(place for _, place in self.exits[name])

    # ---- the plan ---------------------------------------------------------------------------------

    def _rebuilt(self) -> Expr:
        new: dict[str, Any] = {}

        def renewed(expr: Any) -> Any:
            if not isinstance(expr, Expr):
                return expr
            if name_of(expr) not in new:
                new[name_of(expr)] = type(expr)(*map(renewed, expr.operands))
            return new[name_of(expr)]

        def filtered(frame: Any, conditions: list[Any]) -> Any:
            made = [renewed(each) for each in conditions]
            return _expr.Filter(renewed(frame), all_of(made)) if made else renewed(frame)

        for expr in reversed(self.order):
            name = name_of(expr)
            if type(expr) is _expr.Filter and (moved := self._moved[name_of(root := self.rows[name].root)]):
                parts = conjuncts(expr.predicate)
                kept = [each for each in parts if self.name(root, each) not in moved]
                if len(kept) < len(parts):
                    new[name] = filtered(expr.frame, kept)
                    continue
            operands = [
                filtered(operand, self._placed.get((name, position), []))
                for position, operand in enumerate(expr.operands)
            ]
            if name in self._inner:
                operands[expr._parameters.index("how")] = "inner"
            same = all(one is other for one, other in zip(operands, expr.operands, strict=True))
            new[name] = expr if same else type(expr)(*operands)
            if name in self._unmatched:
                new[name] = with_distinct_keys(new[name])
        plan: Expr = new[name_of(self.order[0])]
        return plan


def _on_other(root: Any, condition: Any, frame: Any, names: dict[Any, Any] | None = None) -> Any:
    """Return a condition on columns of the root as one on those of another frame, by their names in it."""
    return with_columns(
        root, condition, lambda column: _expr.Projection(frame, column if names is None else names[column])
    )


_COMPARISONS = (_expr.EQ, _expr.LT, _expr.LE, _expr.GT, _expr.GE)


def _is_false_for_nulls(root: Any, condition: Any, names: Set[Any]) -> bool:
    """Return whether a condition is never true of rows for which all of these columns are null.

    What is inverted twice are booleans, as all conditions are, or null for such rows.
    """

    def is_null(expr: Any) -> bool:
        column = column_of(root, expr)
        return column is not None and column in names

    while type(condition) is _expr.Invert and type(condition.operands[0]) is _expr.Invert:
        condition = condition.operands[0].operands[0]  # of `~frame.column.isnull()`
    kind, operands = type(condition), condition.operands
    if kind in (_expr.And, _expr.Or):
        return (any if kind is _expr.And else all)(
            isinstance(each, Expr) and _is_false_for_nulls(root, each, names) for each in operands
        )
    return (kind in _COMPARISONS and any(map(is_null, operands))) or (
        kind in (_expr.NotNull, _expr.Between) and is_null(operands[0])
    )


def _implied(root: Any, condition: Any, names: Set[Any]) -> Any:
    """Return what is true of some columns alone wherever a condition is true; None if nothing is known."""
    columns, kind = columns_in(root, condition), type(condition)
    if columns and columns <= names:
        return condition
    if kind not in (_expr.And, _expr.Or) or not all(map(is_condition, condition.operands)):
        return None
    parts = [_implied(root, each, names) for each in condition.operands]
    known = [each for each in parts if each is not None]
    return reduce(kind, known) if known and (kind is _expr.And or len(known) == len(parts)) else None


def _below_concat(rows: Any, condition: Any, columns: set[Any]) -> Iterator[Placed]:
    if rows.axis != 0 or rows.interleave_partitions:
        raise _LeftError("it is not of rows one below the other")
    for position, frame in enumerate(rows.operands):
        if isinstance(frame, Expr):
            if frame.ndim != 2 or _dtypes_differ(rows, frame, {name: name for name in columns}):
                raise _LeftError("its frames have other columns or dtypes")
            yield (name_of(rows), position), _on_other(rows, condition, frame)


def _dtypes_differ(expr: Any, frame: Any, names: dict[Any, Any]) -> bool:
    """Return whether columns of a result, by those of an input, have other dtypes than these."""
    made, given = expr._meta.dtypes, frame._meta.dtypes
    # Dask asks cudf what a join returns for strings of the default dtype, whichever theirs is: a join takes
    # rows of columns as they are, but for keys that both sides have.
    keeps_strings = type(expr) in (Merge, SemiMerge) and not is_of_pandas(expr)
    strings = names.keys() - shared_keys(expr) if keeps_strings else frozenset[Any]()
    return any(
        list(frame.columns).count(old) != 1
        or not (made[new] == given[old] or (new in strings and _is_text(made[new]) and _is_text(given[old])))
        for new, old in names.items()
    )


def _is_text(dtype: Any) -> bool:
    """Return whether a dtype of cudf is of strings: its columns of objects are, too."""
    return isinstance(dtype, pd.StringDtype) or dtype == "object"


def _is_category(frame: Any, column: Any) -> bool:
    return str(frame._meta.dtypes[column]) == "category"


def _has_floats(frame: Any, columns: set[Any]) -> bool:
    return any(getattr(frame._meta.dtypes[each], "kind", "O") == "f" for each in columns)


def _text(root: Any, condition: Any) -> str:
    """Return what a condition is on, for people."""
    columns = None if condition is None else columns_in(root, condition)
    return f"a condition on {', '.join(map(str, sorted(columns, key=str)))}" if columns else "a condition"
