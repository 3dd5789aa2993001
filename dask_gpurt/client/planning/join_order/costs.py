"""Find the order of joins that costs least."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from dask_gpurt.client.planning.join_order.estimates import RowEstimates
from dask_gpurt.client.planning.join_order.graph import JoinGraph, Tables, Tree
from dask_gpurt.client.planning.rules.row_roots import RowRoots
from dask_gpurt.dask_hooks.planning import name_of

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
