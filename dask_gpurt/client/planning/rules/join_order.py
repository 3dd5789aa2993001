"""Join tables by their sizes, and not in the order in which a program names them.

Programs join large tables first and small ones later, or tables that share a nation before those that share
an order, and so move and multiply rows that later joins leave out. Here inner joins by columns whose rows are
only joined again are taken together with all that is done row by row in between. The tables are joined in the
order in which the fewest bytes are joined and moved, as far as footers of files tell
(:mod:`.row_estimates`), also small ones with each other first. Columns that have to be equal because of
joins, or of a condition ``a == b`` later on, are keys as soon as both are there.

What it does not reason about
    Joins of other kinds, of two indexes (:mod:`.index_joins`), or by floats; what happens to the result of
    such joins, which is a table for the others. More than eight tables: those that are joined first stay
    together.
Why the result is the same
    Inner joins find all combinations of rows for which keys are equal, or both null, in any order. A
    condition ``a == b`` is checked as well, since null is not equal to null. Keys have one dtype on both
    sides, in which equal values are the same. No result may depend on how rows are divided or in which order
    they are joined (:mod:`.dependence`), and tasks check on which dtypes of files that relies.
    ``tests/unit/client/planning/test_join_order.py`` compares random trees of joins.
The figure
    See ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Hashable, Mapping
from functools import reduce
from typing import Any, NamedTuple

from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.planning.reads import parquet_reads
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.index_joins import by_columns
from dask_gpurt.client.planning.rules.join_graph import (
    Column,
    JoinFinder,
    JoinGraph,
    OrderError,
    Tables,
    Tree,
)
from dask_gpurt.client.planning.rules.needed_columns import dimensions
from dask_gpurt.client.planning.rules.row_estimates import RowEstimates, UnknownSizeError
from dask_gpurt.client.planning.rules.row_roots import RowRoots
from dask_gpurt.client.planning.rules.table_sizes import independence_of
from dask_gpurt.dask_hooks.planning import Expr, name_of

#: What an order may cost at most, of what that of the program costs, to be taken: estimates are not exact.
WORTHWHILE = 0.8
#: What it costs to join a byte, in bytes that are moved between workers.
TO_JOIN = 0.3


class JoinOrder:
    """Join tables in the order in which the fewest bytes are joined and moved."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan whose inner joins are ordered by sizes."""
        if sum(type(expr) is Merge for expr in plan.walk()) < 2:
            return plan
        bare, dependent = facts.bare(plan)
        if dependent:
            self._leave(facts, plan, f"since results depend on partitions: {dependent}")
            return plan
        roots = RowRoots(by_columns(bare))
        try:
            orders = self._orders(roots, facts)
            known = independence_of(bare, facts.tables) if orders else None
        except OSError as error:  # a file has gone, which Dask finds out as it reads it
            self._leave(facts, plan, f"since a table cannot be read: {error!r}")
            return plan
        if known is None:
            if orders:
                self._leave(facts, plan, "since dtypes vary from file to file")
            return plan
        facts.tables.rely_on_dtypes(known)
        return _rebuilt(roots, orders)

    def _leave(self, facts: Facts, plan: Expr, why: str) -> None:
        facts.note(self, name_of(plan), f"has its joins in the order of the program, {why}")

    def _orders(self, roots: RowRoots, facts: Facts) -> dict[str, _Order]:
        """Return the orders in which tables are joined, where they are others, by the last of their joins."""
        found: dict[str, _Order] = {}
        estimates, finder = RowEstimates(facts.tables), JoinFinder(roots)
        blocksize = max((each.blocksize for each in parquet_reads(roots.order[0]).values()), default=0)
        for part in finder.parts():
            name = name_of(part.joins[0])
            try:
                graph = finder.graph(part)
                costs = _Costs(graph, estimates, roots, facts.sizes.of(blocksize)[1])
                now, best = costs.of_tree(graph.tree), costs.best()
            except (OrderError, UnknownSizeError) as error:
                facts.note(self, name, f"is joined in the order of the program: {error}")
                continue
            text = f"{len(graph.tables)} tables, which costs about {_mib(now)}, by sizes {_mib(best)}"
            if best.cost > now.cost * WORTHWHILE:
                facts.note(self, name, f"joins {text}: left in the order of the program")
                continue
            facts.note(self, name, f"joins {text}: ordered by sizes", done=True)
            found[name] = _Order(graph, best.tree)
        return found


def _mib(plan: _Joined) -> str:
    return f"{plan.cost / 2**20:.1f} MiB"


# ---- which order ------------------------------------------------------------------------------------


class _Joined(NamedTuple):
    """Describe joined tables.

    Attributes
    ----------
    tables, tree
        The tables, and in which order they are joined.
    rows, bytes
        About how many there are.
    cost
        About how many bytes have been moved for it; a byte that is joined counts as some part of one.
    is_small
        Whether it is in a single partition, to which no other table need be moved.
    divided_by
        The numbers of the keys by which it is divided; None if it is not.
    """

    tables: Tables
    tree: Tree
    rows: float
    bytes: float
    cost: float
    is_small: bool
    divided_by: Tables | None


class _Costs:
    """Estimate what orders of joins cost.

    Parameters
    ----------
    graph
        The joins.
    estimates
        Tells how many rows and values there are.
    roots
        The plan.
    small
        The bytes up to which a table is a single partition.
    """

    def __init__(self, graph: JoinGraph, estimates: RowEstimates, roots: RowRoots, small: int):
        self._graph = graph
        self._estimates = estimates
        self._widths: dict[Tables, float] = {}
        #: The rows of each table before conditions leave out some.
        self._base = [estimates.rows(roots.rows[name_of(table.frame)].root) for table in graph.tables]
        self._single = [self._table(number, small) for number in range(len(graph.tables))]

    def _table(self, number: int, small: int) -> _Joined:
        tables = frozenset([number])
        rows = self._estimates.rows(self._graph.tables[number].stand_in) * self._kept(tables)
        width = self._width(tables)
        return _Joined(tables, number, rows, rows * width, 0.0, self._base[number] * width <= small, None)

    def of_tree(self, tree: Tree) -> _Joined:
        """Return what a given order costs."""
        if isinstance(tree, int):
            return self._single[tree]
        return self._joined(self.of_tree(tree[0]), self.of_tree(tree[1]))

    def best(self) -> _Joined:
        """Return the order that costs least: the best of any tables is made of the best of some of them."""
        best: list[dict[Tables, _Joined]] = [{}, {each.tables: each for each in self._single}]
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

    def _keys(self, one: _Joined, other: _Joined) -> list[int]:
        return [
            number
            for number, keys in enumerate(self._graph.keys)
            if keys.keys() & one.tables and keys.keys() & other.tables
        ]

    def _joined(self, one: _Joined, other: _Joined) -> _Joined:
        tables, by = one.tables | other.tables, frozenset(self._keys(one, other))
        divided_by: Tables | None = by
        rows = one.rows * other.rows / self._values(one, other, by) * self._kept(tables, one, other)
        size = max(rows, 1.0) * self._width(tables)
        moved = sum(each.bytes for each in (one, other) if each.divided_by != by)
        if one.is_small or other.is_small:
            moved, divided_by = 0.0, other.divided_by if one.is_small else one.divided_by
        return _Joined(
            tables,
            (one.tree, other.tree) if one.bytes >= other.bytes else (other.tree, one.tree),
            max(rows, 1.0),
            size,
            one.cost + other.cost + moved + TO_JOIN * (one.bytes + other.bytes + size),
            one.is_small and other.is_small,
            divided_by,
        )

    def _values(self, one: _Joined, other: _Joined, by: Tables) -> float:
        """Return how many values the keys of two sides have together, of the side that has more of them."""
        keys = [self._graph.keys[number] for number in by]
        values = math.prod(max(self._distinct(one, each), self._distinct(other, each)) for each in keys)
        # Several keys that are in one table on either side have no more values than that has rows.
        rows = [
            [self._base[at] for at in side.tables if all(at in each for each in keys)]
            for side in (one, other)
        ]
        return min(values, *rows[0], *rows[1]) if len(by) > 1 and all(rows) else values

    def _distinct(self, side: _Joined, keys: Mapping[int, Hashable]) -> float:
        stand_ins = ((self._graph.tables[at].stand_in, keys[at]) for at in side.tables if at in keys)
        return min(side.rows, *(self._estimates.column(frame, name).distinct for frame, name in stand_ins))

    def _kept(self, tables: Tables, *sides: _Joined) -> float:
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


# ---- the plan ---------------------------------------------------------------------------------------


class _Order(NamedTuple):
    """Hold joins, and the order in which tables are joined."""

    graph: JoinGraph
    tree: Tree


def _rebuilt(roots: RowRoots, orders: Mapping[str, _Order]) -> Expr:
    """Return a plan in which tables are joined in the given orders, by the name of the last join."""
    new: dict[str, Any] = {}
    for expr in reversed(roots.order):
        operands = [
            new.get(name_of(each), each) if isinstance(each, Expr) else each for each in expr.operands
        ]
        same = all(one is other for one, other in zip(operands, expr.operands, strict=True))
        new[name_of(expr)] = expr if same else type(expr)(*operands)
        if (order := orders.get(name_of(expr))) is not None:
            new[name_of(expr)] = _Building(order.graph, new).result(order.tree)
    plan: Expr = new[name_of(roots.order[0])]
    return plan


class _Built(NamedTuple):
    """Hold joined tables as an expression, which has the columns that are needed, by their labels."""

    tables: Tables
    expr: Any
    columns: frozenset[Column]


class _Building:
    """Make a plan of joins in a given order.

    Parameters
    ----------
    graph
        The joins.
    new
        The expressions of the plan as they are now, by the names that they had.
    """

    def __init__(self, graph: JoinGraph, new: Mapping[str, Any]):
        self._graph = graph
        self._new = new
        self._labels = _labels_of(graph)

    def result(self, tree: Tree) -> Any:
        """Return the joined tables, with the columns of the last join that are needed, in its order."""
        built = self._joined(tree)
        found, sources = built.expr, list[Hashable]()
        for name, column in self._graph.columns.items():
            is_column = self._graph.is_column(column)
            source = self._labels[self._graph.column_of(column)] if is_column else None
            if not is_column or source in sources:
                source = _unused(name, {*found.columns, *self._graph.columns})
                found = _expr.Assign(found, source, self._on(built.expr, column))
            sources.append(source)
        found = _projected(found, sources)
        names = {old: new for old, new in zip(sources, self._graph.columns, strict=True) if old != new}
        return _expr.RenameFrame(found, names) if names else found

    def _joined(self, tree: Tree) -> _Built:
        if isinstance(tree, int):
            return self._table(tree)
        left, right = self._joined(tree[0]), self._joined(tree[1])
        tables = left.tables | right.tables
        pairs = [pair for keys in self._graph.keys for pair in self._pairs(left, right, keys)]
        keys = ([one for one, _ in pairs], [other for _, other in pairs])
        join = self._graph.join
        expr = Merge(left.expr, right.expr, "inner", *keys, shuffle_method=join.shuffle_method)
        return self._chosen(_Built(tables, expr, left.columns | right.columns), left.tables, right.tables)

    def _pairs(self, left: _Built, right: _Built, keys: Mapping[int, Hashable]) -> list[tuple[Any, Any]]:
        """Return the labels of the keys that have to be equal on both sides."""
        ones, others = (
            dict.fromkeys(self._labels[each] for each in keys.items() if each in side.columns)
            for side in (left, right)
        )
        both = [(label, label) for label in ones if label in others]
        return both or list(zip(ones, others, strict=False))[:1]

    def _table(self, number: int) -> _Built:
        tables = frozenset([number])
        columns = self._graph.needed(tables)
        frame = self._new[name_of(self._graph.tables[number].frame)]
        frame = _projected(frame, [name for _, name in columns])
        names = {each[1]: self._labels[each] for each in columns if self._labels[each] != each[1]}
        expr = _expr.RenameFrame(frame, names) if names else frame
        return self._chosen(_Built(tables, expr, frozenset(columns)))

    def _chosen(self, built: _Built, *sides: Tables) -> _Built:
        """Return joined tables whose rows are chosen by conditions that no side could check."""
        conditions = [
            self._on(built.expr, each.expr)
            for each in self._graph.conditions
            if each.tables <= built.tables and not any(each.tables <= side for side in sides)
        ]
        expr = _expr.Filter(built.expr, reduce(_expr.And, conditions)) if conditions else built.expr
        columns = frozenset(self._graph.needed(built.tables, built.columns))
        return _Built(
            built.tables, _projected(expr, list(dict.fromkeys(map(self._labels.get, columns)))), columns
        )

    def _on(self, frame: Any, expr: Any) -> Any:
        """Return an expression on columns of tables as one on those of joined tables."""
        made: dict[str, Any] = {}

        def moved(expr: Any) -> Any:
            if not isinstance(expr, Expr):
                return expr
            if not dimensions(expr):
                return self._new.get(name_of(expr), expr)
            if (name := name_of(expr)) not in made:
                if self._graph.is_column(expr):
                    made[name] = _expr.Projection(frame, self._labels[self._graph.column_of(expr)])
                else:
                    made[name] = type(expr)(*map(moved, expr.operands))
            return made[name]

        return moved(expr)


def _projected(frame: Any, labels: list[Hashable]) -> Any:
    return frame if list(frame.columns) == labels else _expr.Projection(frame, labels)


def _labels_of(graph: JoinGraph) -> dict[Column, Hashable]:
    """Return a label for each column of a table; only keys that are equal may have the same."""
    found: dict[Column, Hashable] = {}
    used: dict[Hashable, int] = {}
    kinds = {column: number for number, keys in enumerate(graph.keys) for column in keys.items()}
    for number, table in enumerate(graph.tables):
        for name in table.frame.columns:
            column = (number, name)
            kind = kinds.get(column, -1)
            label = name if used.get(name, kind) == kind >= 0 or name not in used else _unused(name, used)
            found[column], used[label] = label, kind
    return found


def _unused(name: Hashable, used: Container[Hashable]) -> Hashable:
    return next(label for at in itertools.count(1) if (label := f"{name}_{at}") not in used)
