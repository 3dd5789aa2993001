"""Trace rows, and conditions on them, through operations on single rows to the operation that made them.

Shared by rules. The operation that made the rows of an expression is their *root*: a read, a join, a groupby.
In between, columns are assigned, renamed and left out, and rows are chosen; so where a program does that does
not matter to what is computed from the root.

What it does not reason about
    Operations that are not row by row: these are roots. Conditions with functions of users, on an index, on
    aggregates, which are not known as conditions on columns of a root.
Why it may be trusted
    ``tests/unit/client/planning/test_filters.py`` compares random programs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

from dask.dataframe.dask_expr import _expr

from dask_gpurt.client.planning.operations import (
    COMPUTING,
    KEEPING,
    RENAMING,
    is_no_operation,
    is_on_rows,
    kind_of,
)
from dask_gpurt.client.planning.rules.needed_columns import column_of, dimensions, is_condition, users_first
from dask_gpurt.dask_hooks.planning import Expr, name_of

#: A place in a plan: the name of an expression, and which of its operands.
Place = tuple[str, int]
#: Conditions as expressions on the root of rows, by name; None for what is not known to be one.
Conditions = dict[str, Any]

#: Operations on rows whose columns are some of those of their input, as they are.
_SELECTING = (
    *(_expr.Assign, _expr.Drop, _expr.DropnaFrame, _expr.Filter, _expr.Projection),
    *(_expr.ResetIndex, _expr.RenameAxis),
)
#: Functions of users on single values or rows.
_OF_USERS = (_expr.Apply, _expr.Map)
_DROPPING = (_expr.DropnaFrame, _expr.DropnaSeries)


class Rows(NamedTuple):
    """Describe the rows of an expression: those of its root that were chosen by conditions."""

    root: Any
    chosen: Conditions


class RowRoots:
    """Hold the roots of the rows of each expression of a plan.

    ``order``: the expressions, those that use another one before it.
    ``exprs``, ``rows``: the expressions, and what their rows are, by name.
    ``exits``: by the name of a root, where its rows, and what is computed from them row by row, are used by
    others.
    """

    def __init__(self, plan: Any):
        self.order = users_first(plan)
        self.exprs = {name_of(expr): expr for expr in self.order}
        self._on_root: dict[str, Any] = {}
        self.rows: dict[str, Rows] = {}
        for expr in reversed(self.order):
            self.rows[name_of(expr)] = self._rows_of(expr)
        self.exits: defaultdict[str, list[tuple[Any, Place]]] = defaultdict(list)
        for user in self.order:
            for position, expr in enumerate(user.operands):
                if isinstance(expr, Expr) and name_of(expr) in self.rows and self._is_exit(expr, user):
                    place = (name_of(user), position)
                    self.exits[name_of(self.rows[name_of(expr)].root)].append((expr, place))

    def _is_exit(self, expr: Any, user: Any) -> bool:
        return self.rows[name_of(user)].root is not self.rows[name_of(expr)].root

    def _rows_of(self, expr: Any) -> Rows:
        inputs = [self.rows[name_of(each)] for each in expr.dependencies() if dimensions(each)]
        own = Rows(expr, {})
        if not inputs or not _is_row_by_row(expr) or any(rows.root is not inputs[0].root for rows in inputs):
            return own
        root, chosen = inputs[0]
        if type(expr) is _expr.Filter:  # the condition may be on rows that others have left out since
            conditions = {self.name(root, each): self.on(root, each) for each in conjuncts(expr.predicate)}
            return Rows(root, chosen | conditions) if inputs[-1].chosen.keys() <= chosen.keys() else own
        if any(rows.chosen.keys() != chosen.keys() for rows in inputs):
            return own  # there are nulls for the rows that one of them lacks
        return Rows(root, chosen | {name_of(expr): None}) if type(expr) in _DROPPING else inputs[0]

    def name(self, root: Any, condition: Any) -> str:
        """Return the name of a condition, the same for equal ones wherever they were written."""
        on_root = self.on(root, condition)
        return name_of(condition if on_root is None else on_root)

    def on(self, root: Any, expr: Any) -> Any:
        """Return an expression on rows as one on the columns of their root; None if it is none."""
        if not isinstance(expr, Expr) or not dimensions(expr) or expr is root:
            return expr
        if name_of(expr) not in self._on_root:
            self._on_root[name_of(expr)] = self._traced(root, expr)
        return self._on_root[name_of(expr)]

    def _traced(self, root: Any, expr: Any) -> Any:
        kind = type(expr)
        if kind is _expr.Filter:
            return self.on(root, expr.frame)
        if kind is _expr.Projection:
            column = expr.operand("columns")
            return None if isinstance(column, list) else self.column(root, expr.frame, column)
        if kind not in COMPUTING or expr.ndim != 1 or not is_on_rows(expr):
            return None
        operands = [self.on(root, operand) for operand in expr.operands]
        lost = any(new is None and old is not None for new, old in zip(operands, expr.operands, strict=True))
        return None if lost else kind(*operands)

    def column(self, root: Any, frame: Any, column: Hashable) -> Any:
        """Return a column of a frame as an expression on the root of its rows."""
        while list(frame.columns).count(column) == 1:
            if frame is root:
                return _expr.Projection(root, column)
            kind = kind_of(frame)
            if kind is _expr.Assign and column in frame.keys:
                return self.on(root, dict(zip(frame.keys, frame.vals, strict=True))[column])
            if kind is _expr.ToFrame:
                return self.on(root, frame.frame)
            if kind in RENAMING:
                column = frame.frame.columns[list(frame.columns).index(column)]
            elif kind not in _SELECTING and not is_no_operation(frame):
                break
            frame = frame.frame
        return None


def _is_row_by_row(expr: Any) -> bool:
    """Return whether each row of an expression is made of a row of its inputs, with its label or a number."""
    kind = kind_of(expr)
    if kind is _expr.ResetIndex:
        return bool(expr.drop)
    if kind is _expr.RenameAxis:
        return not isinstance(expr.operand("columns"), (str, list, dict)) and expr.axis in (0, "index")
    if kind in _OF_USERS or is_no_operation(expr):
        return True
    return kind in (*KEEPING, *COMPUTING) and is_on_rows(expr)


def conjuncts(condition: Any) -> list[Any]:
    """Return the conditions that all have to be true for a condition to be."""
    if type(condition) is not _expr.And or not all(map(is_condition, condition.operands)):
        return [condition]
    return [each for part in condition.operands for each in conjuncts(part)]


def all_of(conditions: Sequence[Any]) -> Any:
    """Return a condition that is true of the rows of which all conditions are.

    Pandas has two kinds of booleans with nulls, for its own columns and those of Arrow, which do not go
    together; a row for which a condition is null is left out.
    """
    nullable = {str(each._meta.dtype) for each in conditions} - {"bool"}
    filled = [
        _expr.Fillna(each, False) if str(each._meta.dtype) in nullable and len(nullable) > 1 else each
        for each in conditions
    ]
    return reduce(_expr.And, filled)


def columns_in(root: Any, condition: Any) -> set[Any] | None:
    """Return the columns of the root that a condition is on; None if it is on the root as a whole."""
    ends = [*ends_of(condition, lambda each: each is root or column_of(root, each) is not None)]
    return None if any(each is root for each in ends) else {each.operand("columns") for each in ends}


def ends_of(expr: Any, is_end: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield those parts of an expression on rows that are its ends, and look no further there."""
    seen, left = set[str](), [expr]
    while left:
        each = left.pop()
        if name_of(each) not in seen:
            seen.add(name_of(each))
            if is_end(each):
                yield each
            else:
                left.extend(below for below in each.dependencies() if dimensions(below))


def with_columns(root: Any, expr: Any, made_of: Callable[[Any], Any]) -> Any:
    """Return an expression on columns of the root with each of these replaced by another expression."""

    def instead(each: Any) -> Any:
        return None if (column := column_of(root, each)) is None else made_of(column)

    return with_ends(expr, instead)


def with_ends(expr: Any, instead: Callable[[Any], Any]) -> Any:
    """Return an expression on rows with each part replaced for which a function does not return None."""
    made: dict[str, Any] = {}

    def moved(expr: Any) -> Any:
        if not isinstance(expr, Expr) or not dimensions(expr):
            return expr
        if (name := name_of(expr)) not in made:
            new = instead(expr)
            made[name] = type(expr)(*map(moved, expr.operands)) if new is None else new
        return made[name]

    return moved(expr)
