"""Estimate rows and values before anything is computed, and find the order of joins that costs least.

Footers of files tell rows, the range of numbers and times, and how many values a column has about
(:meth:`.footers.Footer.values_of`). From there conditions are taken to be independent of each other, values
to be spread evenly over their range, and each key of the side of a join that has fewer of them to be among
those of the other side, as planners of databases do.

What it does not reason about
    Values that go together, such as a city and its country; values of which some are frequent.
Why it may be trusted
    It need not be: a wrong estimate costs time, never rows.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._concat import Concat
from dask.dataframe.dask_expr._merge import Merge, SemiMerge
from dask.dataframe.dask_expr._repartition import Repartition
from dask.dataframe.dask_expr._shuffle import SetIndex, SetIndexBlockwise, SortValues
from dask.dataframe.dask_expr.io.io import FromPandas

from dask_gpurt.client.planning.footers import Values, number_of
from dask_gpurt.client.planning.join_order.graph import JoinGraph, Tables, Tree
from dask_gpurt.client.planning.operations import RENAMING, is_on_rows
from dask_gpurt.client.planning.reads import read_of
from dask_gpurt.client.planning.rules.needed_columns import (
    dimensions,
    is_condition,
    keys_of_join,
    listed,
    names_in_join,
)
from dask_gpurt.client.planning.rules.row_roots import RowRoots, conjuncts
from dask_gpurt.client.planning.table_facts import TableFacts
from dask_gpurt.dask_hooks.planning import Expr, deferred_values, name_of

#: The share of rows that a condition is taken to keep of which nothing is known: one on texts, and any other.
ON_TEXTS, ON_VALUES = 0.1, 1 / 3
#: The bytes of a value of which nothing is known.
WIDTH = 16.0

_TEXTS = frozenset(["contains", "endswith", "fullmatch", "match", "startswith"])
_BELOW, _ABOVE = (_expr.LT, _expr.LE), (_expr.GT, _expr.GE)
_SAME_ROWS = (SortValues, SetIndex, SetIndexBlockwise, Repartition)
_FIRST_ROWS = (_expr.Head, _expr.Tail, _reductions.NLargest)


class UnknownSizeError(Exception):
    """Nothing is known of how many rows an expression has."""


class RowEstimates:
    """Estimate rows and values of the expressions of a plan.

    ``tables``: tells what footers of files say.
    """

    def __init__(self, tables: TableFacts):
        self._tables = tables
        self._rows: dict[str, float] = {}
        self._columns: dict[tuple[str, Hashable], Values] = {}

    def rows(self, expr: Any) -> float:
        """Return about how many rows an expression has.

        Raises UnknownSizeError if nothing is known.
        """
        if (name := name_of(expr)) not in self._rows:
            self._rows[name] = max(1.0, self._rows_of(expr))
        return self._rows[name]

    def column(self, expr: Any, column: Hashable) -> Values:
        """Return about which values a column of an expression has."""
        if (key := (name_of(expr), column)) not in self._columns:
            rows = self.rows(expr)
            found = self._column_of(expr, column) or Values(rows, rows, None, None, WIDTH)
            self._columns[key] = found._replace(rows=rows, distinct=min(found.distinct, rows))
        return self._columns[key]

    def kept(self, conditions: Iterable[Any]) -> float:
        """Return the share of rows that conditions keep; those on the range of a column belong together."""
        share = 1.0
        ranges: defaultdict[str, list[float]] = defaultdict(list)
        for condition in conditions:
            found = self._share(condition)
            if type(condition) in (*_BELOW, *_ABOVE) and isinstance(condition.left, Expr):
                ranges[name_of(condition.left)].append(found)
            else:
                share *= found
        for shares in ranges.values():
            share *= max(sum(shares) - len(shares) + 1, math.prod(shares) / 10)
        return share

    # ---- rows -------------------------------------------------------------------------------------

    def _rows_of(self, expr: Any) -> float:
        kind = type(expr)
        if not dimensions(expr):
            return 1.0
        if (read := read_of(expr)) is not None:
            return self._rows_of_read(read)
        if kind is FromPandas:
            return float(len(expr.operand("frame")))
        if kind is _expr.Filter:
            return self.rows(expr.frame) * self.kept(conjuncts(expr.predicate))
        if kind in (Merge, SemiMerge):
            return self._rows_of_join(expr)
        if isinstance(expr, _groupby.GroupByBase) and hasattr(expr, "frame"):
            return self._groups(expr.frame, expr.by)
        if kind is _reductions.DropDuplicates:
            return self._groups(expr.frame, listed(expr.subset) or list(expr.frame.columns))
        if kind is Concat:
            return sum(self.rows(each) for each in expr.dependencies())
        if kind in _FIRST_ROWS:
            return float(abs(expr.n))
        if kind in _SAME_ROWS or is_on_rows(expr):
            return max(self.rows(each) for each in expr.dependencies() if dimensions(each))
        raise UnknownSizeError(f"it is not known how many rows {kind.__name__} returns")

    def _rows_of_read(self, read: Any) -> float:
        known = (self._tables.values(read, column) for column in read.columns)
        if (found := next(filter(None, known), None)) is None:
            raise UnknownSizeError("it is not known how many rows a table has")
        return found.rows

    def _rows_of_join(self, join: Any) -> float:
        left, right = self.rows(join.left), self.rows(join.right)
        keys = [
            (self.column(join.left, one).distinct, self.column(join.right, other).distinct)
            for one, other in zip(*keys_of_join(join), strict=False)
            if not isinstance(one, Expr) and not isinstance(other, Expr)
        ]
        pairs = left * right / math.prod(max(pair) for pair in keys or [(left, right)])
        if join.how in ("leftsemi", "leftanti"):
            return min(left, pairs)
        return max(pairs, left * (join.how in ("left", "outer")), right * (join.how in ("right", "outer")))

    def _groups(self, frame: Any, keys: Iterable[Any]) -> float:
        rows = self.rows(frame)
        by_key = (rows if isinstance(key, Expr) else self.column(frame, key).distinct for key in keys)
        return min(rows, math.prod(by_key))

    # ---- values -----------------------------------------------------------------------------------

    def _column_of(self, expr: Any, column: Hashable) -> Values | None:
        """Return what is known of a column where it comes from; None if it is computed."""
        kind = type(expr)
        if (read := read_of(expr)) is not None:
            return self._tables.values(read, column)
        if kind is Merge:
            for side, names in zip((expr.left, expr.right), names_in_join(expr), strict=True):
                if column in names:
                    return self.column(side, names[column])
        if kind is _expr.Assign and column in expr.keys:
            return self._values(dict(zip(expr.keys, expr.vals, strict=True))[column])
        if kind in RENAMING:
            column = expr.frame.columns[list(expr.columns).index(column)]
        frame: Any = expr.left if kind is SemiMerge else getattr(expr, "frame", None)
        if isinstance(expr, _groupby.GroupByBase) or not isinstance(frame, Expr) or not dimensions(frame):
            return None
        if column in list(frame.columns):
            return self.column(frame, column)
        if isinstance(frame, _groupby.GroupByBase):  # its index becomes columns
            keys = [key for key in frame.by if not isinstance(key, Expr)]
            return self.column(frame.frame, column) if column in keys else None
        return None

    def _values(self, expr: Any) -> Values | None:
        """Return what is known of the values of a series."""
        if type(expr) is not _expr.Projection or isinstance(column := expr.operand("columns"), list):
            return None
        return self.column(expr.frame, column)

    # ---- conditions -------------------------------------------------------------------------------

    def _share(self, condition: Any) -> float:
        kind, operands = type(condition), condition.operands
        if kind is _expr.And:
            return self.kept(conjuncts(condition)) if _are_conditions(operands) else ON_VALUES
        if kind is _expr.Or and _are_conditions(operands):
            return min(1.0, sum(map(self._share, operands)))
        if kind is _expr.Invert and _are_conditions(operands):
            return max(1 - self._share(operands[0]), 0.01)
        if kind is _expr.NE:
            return max(1 - self._share(_expr.EQ(*operands)), 0.01)
        known = self._values(operands[0]) if operands and isinstance(operands[0], Expr) else None
        if getattr(condition, "attr", None) in _TEXTS:
            return ON_TEXTS
        if kind in (_expr.NotNull, _expr.IsNa):
            return 0.9 if kind is _expr.NotNull else 0.1
        if known is None:
            return ON_VALUES
        if kind is _expr.EQ:
            other = self._values(operands[1])
            return 1 / max(known.distinct, other.distinct if other else 1)
        if kind is _expr.Isin:
            return min(1.0, len(_values_of(condition)) / known.distinct)
        return _share_of_range(known, kind, condition)


def _are_conditions(operands: Iterable[Any]) -> bool:
    return all(isinstance(each, Expr) and is_condition(each) for each in operands)


def _values_of(isin: Any) -> Collection[Any]:
    values = isin.operand("values")
    if isinstance(values, Expr):
        values = next(iter(deferred_values(values.operands[0]) or [[None]]))
    return values if isinstance(values, Collection) else [values]


def _share_of_range(known: Values, kind: type, condition: Any) -> float:
    """Return the share of a range that is below or above a number or a time."""
    low, high = known.low, known.high
    ends = (condition.left, condition.right) if kind is _expr.Between else (condition.operands[-1],)
    numbers = [number_of(end) for end in ends]
    if low is None or high is None or high <= low or None in numbers:
        return ON_VALUES
    at = [min(max((number - low) / (high - low), 0.0), 1.0) for number in numbers if number is not None]
    if kind is _expr.Between:
        return max(at[1] - at[0], 0.0)
    return at[0] if kind in _BELOW else 1 - at[0] if kind in _ABOVE else ON_VALUES


# ---- orders --------------------------------------------------------------------------------------


#: What it costs to join a byte, in bytes that are moved between workers.
TO_JOIN = 0.3


class Joined(NamedTuple):
    """Describe joined tables.

    ``tables``, ``tree``: the tables, and in which order they are joined.
    ``rows``, ``bytes``: about how many there are.
    ``cost``: about how many bytes have been moved for it; a byte that is joined counts as some part of one.
    ``is_small``: whether it is in a single partition, to which no other table need be moved.
    ``divided_by``: the numbers of the keys by which it is divided; None if it is not.
    """

    tables: Tables
    tree: Tree
    rows: float
    bytes: float
    cost: float
    is_small: bool
    divided_by: Tables | None


class Costs:
    """Estimate what orders of joins cost.

    ``graph``: the joins.
    ``estimates``: tells how many rows and values there are.
    ``roots``: the plan.
    ``small``: the bytes up to which a table is a single partition.
    """

    def __init__(self, graph: JoinGraph, estimates: RowEstimates, roots: RowRoots, small: int):
        self._graph = graph
        self._estimates = estimates
        self._widths: dict[Tables, float] = {}
        #: The rows of each table before conditions leave out some.
        self._base = [estimates.rows(roots.rows[name_of(table.frame)].root) for table in graph.tables]
        self._single = [self._table(number, small) for number in range(len(graph.tables))]

    def _table(self, number: int, small: int) -> Joined:
        tables = frozenset([number])
        rows = self._estimates.rows(self._graph.tables[number].stand_in) * self._kept(tables)
        width = self._width(tables)
        return Joined(tables, number, rows, rows * width, 0.0, self._base[number] * width <= small, None)

    def of_tree(self, tree: Tree) -> Joined:
        """Return what a given order costs."""
        if isinstance(tree, int):
            return self._single[tree]
        return self._joined(self.of_tree(tree[0]), self.of_tree(tree[1]))

    def best(self) -> Joined:
        """Return the order that costs least: the best of any tables is made of the best of some of them."""
        best: list[dict[Tables, Joined]] = [{}, {each.tables: each for each in self._single}]
        for size in range(2, len(self._single) + 1):
            best.append({})
            for part in range(1, size // 2 + 1):
                for one, other in itertools.product(best[part].values(), best[size - part].values()):
                    if one.tables & other.tables or not self._keys(one, other):
                        continue
                    found = self._joined(one, other)
                    known = best[size].get(found.tables)
                    if known is None or found.cost < known.cost:
                        best[size][found.tables] = found
        (found,) = best[-1].values()
        return found

    def _keys(self, one: Joined, other: Joined) -> list[int]:
        return [
            number
            for number, keys in enumerate(self._graph.keys)
            if keys.keys() & one.tables and keys.keys() & other.tables
        ]

    def _joined(self, one: Joined, other: Joined) -> Joined:
        tables, by = one.tables | other.tables, frozenset(self._keys(one, other))
        divided_by: Tables | None = by
        rows = one.rows * other.rows / self._values(one, other, by) * self._kept(tables, one, other)
        size = max(rows, 1.0) * self._width(tables)
        moved = sum(each.bytes for each in (one, other) if each.divided_by != by)
        if one.is_small or other.is_small:
            moved, divided_by = 0.0, other.divided_by if one.is_small else one.divided_by
        return Joined(
            tables,
            (one.tree, other.tree) if one.bytes >= other.bytes else (other.tree, one.tree),
            max(rows, 1.0),
            size,
            one.cost + other.cost + moved + TO_JOIN * (one.bytes + other.bytes + size),
            one.is_small and other.is_small,
            divided_by,
        )

    def _values(self, one: Joined, other: Joined, by: Tables) -> float:
        """Return how many values the keys of two sides have together, of the side that has more of them."""
        keys = [self._graph.keys[number] for number in by]
        values = math.prod(max(self._distinct(one, each), self._distinct(other, each)) for each in keys)
        # Several keys that are in one table on either side have no more values than that has rows.
        rows = [
            [self._base[at] for at in side.tables if all(at in each for each in keys)]
            for side in (one, other)
        ]
        return min(values, *rows[0], *rows[1]) if len(by) > 1 and all(rows) else values

    def _distinct(self, side: Joined, keys: Mapping[int, Hashable]) -> float:
        stand_ins = ((self._graph.tables[at].stand_in, keys[at]) for at in side.tables if at in keys)
        return min(side.rows, *(self._estimates.column(frame, name).distinct for frame, name in stand_ins))

    def _kept(self, tables: Tables, *sides: Joined) -> float:
        """Return the share of joined rows that are kept by conditions which no side could check."""
        return self._estimates.kept(
            each.expr
            for each in self._graph.conditions
            if each.tables <= tables
            and not any(each.tables <= side.tables for side in sides)
            and name_of(each.expr) not in self._graph.equal
        )

    def _width(self, tables: Tables) -> float:
        if tables not in self._widths:
            self._widths[tables] = max(
                1.0,
                sum(
                    self._estimates.column(self._graph.tables[at].stand_in, name).width
                    for at, name in self._graph.needed(tables)
                ),
            )
        return self._widths[tables]
