"""Make a plan of joins in a given order."""

from __future__ import annotations

import itertools
from collections.abc import Container, Hashable, Mapping
from typing import Any, NamedTuple

from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.planning.join_order.graph import Column, JoinGraph, Tables, Tree
from dask_gpurt.client.planning.rules.row_roots import all_of, with_ends


class _Built(NamedTuple):
    """Hold joined tables as an expression, which has the columns that are needed, by their labels."""

    tables: Tables
    expr: Any
    columns: frozenset[Column]


def ordered(graph: JoinGraph, tree: Tree) -> Any:
    """Return the joined tables, with the columns of the last join that are needed, in its order."""
    return _Building(graph).result(tree)


class _Building:
    def __init__(self, graph: JoinGraph):
        self._graph = graph
        self._labels = _labels_of(graph)

    def result(self, tree: Tree) -> Any:
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
        frame = _projected(self._graph.tables[number].frame, [name for _, name in columns])
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
        expr = _expr.Filter(built.expr, all_of(conditions)) if conditions else built.expr
        columns = frozenset(self._graph.needed(built.tables, built.columns))
        return _Built(
            built.tables, _projected(expr, list(dict.fromkeys(map(self._labels.get, columns)))), columns
        )

    def _on(self, frame: Any, expr: Any) -> Any:
        """Return an expression on columns of tables as one on those of joined tables."""

        def moved(expr: Any) -> Any:
            if self._graph.is_column(expr):
                return _expr.Projection(frame, self._labels[self._graph.column_of(expr)])
            return None

        return with_ends(expr, moved)


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
