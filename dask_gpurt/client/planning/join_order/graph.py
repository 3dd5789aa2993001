"""Find inner joins whose rows are only joined again, describe them without an order, and make them in one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.planning.operations import dtype_in, is_of_pandas
from dask_gpurt.client.planning.rules.dependence import joins_columns
from dask_gpurt.client.planning.rules.needed_columns import keys_of_join, listed, names_in_join, users_of
from dask_gpurt.client.planning.rules.row_roots import (
    RowRoots,
    all_of,
    columns_in,
    ends_of,
    with_columns,
    with_ends,
)
from dask_gpurt.dask_hooks.planning import name_of

#: The most tables that are ordered together: the number of orders doubles with each.
MOST_TABLES = 8

#: Numbers of tables.
Tables = frozenset[int]
#: The number of a table, or what is joined with what.
Tree = int | tuple["Tree", "Tree"]
#: A column of a table.
Column = tuple[int, Hashable]


class OrderError(Exception):
    """Joins stay in the order in which they are."""


class Table(NamedTuple):
    """Hold what is joined.

    ``frame``: its expression in the plan.
    ``stand_in``: stands for it in expressions on its columns; another one each time that a frame is joined.
    """

    frame: Any
    stand_in: Any


class Condition(NamedTuple):
    """Hold a condition on columns of stand-ins, and these; and the tables that it is on."""

    expr: Any
    columns: frozenset[Column]
    tables: Tables


class _Part(NamedTuple):
    """Describe the result of joins: its columns, and pairs of keys, are expressions on those of stand-ins."""

    tables: list[Table]
    joins: list[Any]
    columns: dict[Hashable, Any]
    pairs: list[tuple[Any, Any]]
    conditions: list[Any]
    tree: Any


class JoinGraph:
    """Describe inner joins without an order.

    ``join``: the last of the joins.
    ``tables``: what is joined.
    ``columns``: the columns of the result that are needed, as expressions on columns of the tables'
    stand-ins.
    ``keys``: columns that have to be equal, at most one of a table, by its number.
    ``conditions``: the conditions on rows that are checked in between.
    ``tree``: the joins in the order of the program.
    """

    def __init__(self, part: _Part, needed: Iterable[Hashable], later: Iterable[Any]):
        self.join = part.joins[0]
        self.tables = part.tables
        self._numbers = {name_of(table.stand_in): at for at, table in enumerate(part.tables)}
        self._positions = {
            (at, name): (at, position)
            for at, table in enumerate(part.tables)
            for position, name in enumerate(table.frame.columns)
        }
        self.columns = {name: part.columns[name] for name in needed}
        self._shown = frozenset[Column]().union(*map(self._columns_in, self.columns.values()))
        self.conditions = [self._condition(each) for each in part.conditions]
        self.keys: list[dict[int, Hashable]] = []
        for one, other in part.pairs:
            if not self._equate(one, other):
                raise OrderError("two columns of a table have to be equal")
        #: The names of conditions that two columns are equal, which are keys as well.
        self.equal = set[str]()
        for each in (*part.conditions, *later):
            if (
                type(each) is _expr.EQ
                and all(map(self.is_column, each.operands))
                and self._equate(*each.operands)
            ):
                self.equal.add(name_of(each))
        self.tree: Tree = self._numbered(part.tree)

    def column_of(self, expr: Any) -> Column:
        """Return the table and the label of a column."""
        return self._numbers[name_of(expr.frame)], expr.operand("columns")

    def is_column(self, expr: Any) -> bool:
        """Return whether an expression is a column of a stand-in."""
        return type(expr) is _expr.Projection and name_of(expr.frame) in self._numbers and expr.ndim == 1

    def needed(self, tables: Tables, columns: Container[Column] | None = None) -> list[Column]:
        """Return the columns of joined tables that are needed later on, or for the result.

        ``tables``: the tables, or a single one before its rows are chosen.
        ``columns``: those that are there, by default all: of keys that are equal one is enough to join by.
        """
        later = (each.columns for each in self.conditions if not each.tables <= tables or len(tables) == 1)
        found = set(self._shown.union(*later))
        for keys in self.keys:
            own = [
                each for each in keys.items() if each[0] in tables and (columns is None or each in columns)
            ]
            if keys.keys() - tables and not found.intersection(own):
                found.update(own[:1])
        return sorted((each for each in found if each[0] in tables), key=self._positions.__getitem__)

    def _columns_in(self, expr: Any) -> frozenset[Column]:
        return frozenset(map(self.column_of, ends_of(expr, self.is_column)))

    def _condition(self, expr: Any) -> Condition:
        columns = self._columns_in(expr)
        return Condition(expr, columns, frozenset(table for table, _ in columns))

    def _equate(self, one: Any, other: Any) -> bool:
        """Make keys of two columns, and return whether each table has one of each kind still."""
        if not are_comparable(one.frame, one.operand("columns"), other.frame, other.operand("columns")):
            return False
        pair = {self.column_of(one), self.column_of(other)}
        joined = [keys for keys in self.keys if pair & keys.items()]
        columns = pair.union(*(keys.items() for keys in joined))
        if len({table for table, _ in columns}) < len(columns) or len(pair) < 2:
            return False
        self.keys = [keys for keys in self.keys if keys not in joined] + [dict(columns)]
        return True

    def _numbered(self, tree: Any) -> Tree:
        if isinstance(tree, tuple):
            return self._numbered(tree[0]), self._numbered(tree[1])
        return self._numbers[tree]


class JoinFinder:
    """Find the inner joins of a plan that may be in any order.

    ``roots``: the plan.
    """

    def __init__(self, roots: RowRoots):
        self._roots = roots
        self._users = users_of(roots.order)
        self._seen = Counter[str]()

    def parts(self) -> Iterator[_Part]:
        """Yield joins of three tables or more, the last joins of the plan first."""
        found = set[str]()
        for expr in self._roots.order:
            if name_of(expr) in found or not _is_free(expr):
                continue
            self._seen.clear()
            part = self._joined(expr, MOST_TABLES)
            found.update(map(name_of, part.joins))
            if len(part.tables) > 2:
                yield part

    def graph(self, part: _Part) -> JoinGraph:
        """Return the joins without an order.

        Raises OrderError if they have to stay in the order in which they are.
        """
        join = part.joins[0]
        later = [
            with_columns(join, condition, part.columns.__getitem__) for condition in self._asked_by_all(join)
        ]
        return JoinGraph(part, self._needed(join), later)

    def _asked_by_all(self, join: Any) -> Iterator[Any]:
        """Yield the conditions that hold for all rows of a join that are used."""
        exits = self._roots.exits[name_of(join)]
        asked = [self._roots.rows[name_of(expr)].chosen for expr, _ in exits]
        for name, condition in asked[0].items() if asked else ():
            if condition is not None and columns_in(join, condition) and all(name in each for each in asked):
                yield condition

    def _needed(self, join: Any) -> list[Hashable]:
        """Return the columns of a join that are used."""
        users = self._users[name_of(join)]
        if not users or not all(type(user) is _expr.Projection for user in users):
            return list(join.columns)
        used = {name for user in users for name in listed(user.operand("columns"))}
        return [name for name in join.columns if name in used]

    def _joined(self, join: Any, room: int) -> _Part:
        left = self._side(join, 0, room - 1)
        right = self._side(join, 1, room - len(left.tables))
        columns = {}
        for part, names in zip((right, left), reversed(names_in_join(join)), strict=True):
            columns.update({new: part.columns[old] for new, old in names.items()})
        pairs = [
            (left.columns[one], right.columns[other]) for one, other in zip(*keys_of_join(join), strict=True)
        ]
        return _Part(
            left.tables + right.tables,
            [join, *left.joins, *right.joins],
            {name: columns[name] for name in join.columns},
            left.pairs + right.pairs + pairs,
            left.conditions + right.conditions,
            (left.tree, right.tree),
        )

    def _side(self, join: Any, at: int, room: int) -> _Part:
        """Return a side of a join as joins of tables, if that is what it is, and else as a table."""
        side = (join.left, join.right)[at]
        if room > 1 and (part := self._inner(join, at, side, room)) is not None:
            return part
        self._seen[name_of(side)] += 1
        stand_in = side
        for _ in range(self._seen[name_of(side)] - 1):
            stand_in = _expr.RenameFrame(stand_in, {})
        columns = {name: _expr.Projection(stand_in, name) for name in side.columns}
        return _Part([Table(side, stand_in)], [], columns, [], [], name_of(stand_in))

    def _inner(self, join: Any, at: int, side: Any, room: int) -> _Part | None:
        inner, chosen = self._roots.rows[name_of(side)]
        places = [place for _, place in self._roots.exits[name_of(inner)]]
        if (
            places != [(name_of(join), at)]
            or not _is_free(inner)
            or inner.shuffle_method != join.shuffle_method
        ):
            return None
        columns = {name: self._roots.column(inner, side, name) for name in side.columns}
        conditions = list(chosen.values())
        if any(each is None or not columns_in(inner, each) for each in (*columns.values(), *conditions)):
            return None
        if any(type(columns[key]) is not _expr.Projection for key in keys_of_join(join)[at]):
            return None  # it is computed
        part = self._joined(inner, room)
        on_tables = [
            {name: with_columns(inner, each, part.columns.__getitem__) for name, each in named.items()}
            for named in (columns, dict(enumerate(conditions)))
        ]
        if any(type(on_tables[0][key]) is not _expr.Projection for key in keys_of_join(join)[at]):
            return None
        return part._replace(columns=on_tables[0], conditions=part.conditions + list(on_tables[1].values()))


def _is_free(join: Any) -> bool:
    """Return whether a join may be done earlier or later: an inner join by columns that are comparable."""
    if type(join) is not Merge or join.how != "inner" or join.indicator or not joins_columns(join):
        return False
    frames = (join.left, join.right, join)
    keys = keys_of_join(join)
    return (
        all(len({*frame.columns}) == len(frame.columns) for frame in frames)
        and len(keys[0]) == len(keys[1]) > 0
        and all(are_comparable(join.left, one, join.right, other) for one, other in zip(*keys, strict=True))
    )


def are_comparable(one: Any, name: Hashable, other: Any, other_name: Hashable) -> bool:
    """Return whether columns of two frames have one dtype, in which equal values are the same."""
    dtype = dtype_in(one, name)
    if bool(dtype != dtype_in(other, other_name)):
        return False
    if isinstance(dtype, np.dtype) and dtype.kind == "O":
        return not is_of_pandas(one)  # texts in cudf, and anything in pandas
    return isinstance(dtype, pd.StringDtype) or getattr(dtype, "kind", "") in tuple("iubmM")


# ---- a plan in a given order ---------------------------------------------------------------------


class _Built(NamedTuple):
    """Hold joined tables as an expression, which has the columns that are needed, by their labels."""

    tables: Tables
    expr: Any
    columns: frozenset[Column]


class Building:
    """Make a plan of joins."""

    def __init__(self, graph: JoinGraph):
        self._graph = graph
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
