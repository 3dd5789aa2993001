"""Find out which columns of each expression of a plan are used, and of which the dtypes matter.

Shared by rules. A plan that Dask has not simplified carries all columns of its tables along, and so no rule
can see which of them matter. With pandas, a column of integers with nulls is one of floats. That matters
where it is part of the result, or computed with: of bytes, ``x - 5`` is never below zero. It does not where
it is compared, or is the key of a join: numbers are equal as integers and as floats.

What it does not reason about
    Operations that are not named here: these need all columns.
Why it may be trusted
    ``tests/unit/client/planning/test_filters.py`` compares random programs, with the rules and without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr._concat import Concat
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr._shuffle import SetIndex, SetIndexBlockwise, SortValues

from dask_gpurt.client.planning.catalogue.schema import known_schema
from dask_gpurt.client.planning.operations import (
    COMPARISONS,
    COMPUTING,
    RENAMING,
    is_no_operation,
    is_on_rows,
    kind_of,
)
from dask_gpurt.dask_hooks.planning import Expr, bottom_up, is_computation, name_of

#: Operations on columns whose result follows from the values, whichever dtype these have.
_COMPARING = frozenset([*COMPARISONS, _expr.Between, _expr.Isin, _expr.IsNa, _expr.NotNull])
#: Labels of columns.
Names = frozenset[Any]
#: What an expression needs of each of its inputs.
Needs = Iterator[tuple[Any, Iterable[Any]]]


def dimensions(expr: Any) -> int:
    """Return the number of dimensions of an expression; 0 for what is no frame or series."""
    return 0 if is_computation(expr) else int(getattr(expr, "ndim", 0))


def is_condition(expr: Any) -> bool:
    """Return whether an expression has a boolean for each row."""
    return isinstance(expr, Expr) and expr.ndim == 1 and pd.api.types.is_bool_dtype(expr._meta.dtype)


def users_first(plan: Any) -> list[Any]:
    """Return each expression of a plan once, those that use it before it."""
    return list(bottom_up(plan))[::-1]


def users_of(order: Iterable[Any]) -> defaultdict[str, list[Any]]:
    """Return the expressions that use another one, by its name."""
    users = defaultdict[str, list[Any]](list)
    for expr in order:
        for each in expr.dependencies():
            users[name_of(each)].append(expr)
    return users


def needed_dtypes(order: Sequence[Any]) -> dict[str, Names]:
    """Return the columns of each expression of which the dtypes matter, by its name.

    ``order``: the expressions of a plan, those that use another one before it.
    """
    used = _traced(order, _with_conditions)  # of those that nobody uses no dtype matters
    return _traced(order, _dtypes, used)


def _traced(
    order: Sequence[Any], needs: Callable[[Any, Names], Needs], used: Container[str] | None = None
) -> dict[str, Names]:
    needed: dict[str, set[Any]] = {name_of(order[0]): set(_columns(order[0]))}
    for expr in order:
        if name_of(expr) in (needed if used is None else used):
            for each, columns in needs(expr, frozenset(needed.get(name_of(expr), ()))):
                if isinstance(each, Expr):
                    needed.setdefault(name_of(each), set()).update(columns)
    return {name: frozenset(columns) for name, columns in needed.items()}


def _with_conditions(expr: Any, names: Names) -> Needs:
    yield from _rule_of(expr)(expr, names) if names or not dimensions(expr) else _all(expr, names)
    if type(expr) is _expr.Filter:
        yield expr.predicate, _columns(expr.predicate)


def _dtypes(expr: Any, names: Names) -> Needs:
    kind, rule = type(expr), _rule_of(expr)
    if kind in _COMPARING:
        return
    if kind in COMPUTING:
        yield from _all(expr, names)
    elif rule is _joined:
        for side, made in zip((expr.left, expr.right), names_in_join(expr), strict=True):
            yield side, {column for name, column in made.items() if name in names}
    else:
        yield from rule(expr, names)
    if kind is _expr.Filter:
        yield expr.predicate, _columns(expr.predicate)


def _columns(expr: Any) -> list[Any]:
    """Return the columns of an expression; those of an array, as ``values`` makes, have no labels."""
    if not dimensions(expr) or (known_schema(expr) is None and _is_array(expr._meta)):
        return []
    return list(expr.columns)


def _is_array(meta: Any) -> bool:
    return not (hasattr(meta, "columns") or hasattr(meta, "name"))


def _rule_of(expr: Any) -> Callable[[Any, Names], Needs]:
    """Return what yields the inputs of an expression, and the columns of them that some of its need."""
    rule = _same if is_no_operation(expr) else _RULES.get(kind_of(expr))
    if rule is None and isinstance(expr, _groupby.GroupByBase) and hasattr(expr, "frame"):
        rule = _of_groups
    if rule is None or any(len({*_columns(each)}) < len(_columns(each)) for each in expr.dependencies()):
        rule = _all
    return rule


def _all(expr: Any, names: Names) -> Needs:
    yield from ((each, _columns(each)) for each in expr.dependencies())


def _same(expr: Any, names: Names) -> Needs:
    yield from ((each, names & {*_columns(each)}) for each in expr.dependencies())


def _chosen(expr: Any, names: Names) -> Needs:
    yield expr.frame, names & {*_columns(expr.frame)}


def _with_keys(expr: Any, names: Names) -> Needs:
    yield expr.frame, names | {*listed(expr.operand("by"))} & {*_columns(expr.frame)}


def _indexed(expr: Any, names: Names) -> Needs:
    key = expr.operands[1]
    if expr.append or isinstance(key, Expr):
        yield from _all(expr, names)
    else:
        yield expr.frame, names | {key} & {*_columns(expr.frame)}


def _assigned(expr: Any, names: Names) -> Needs:
    yield expr.frame, names - {*expr.keys}
    for key, value in zip(expr.keys, expr.vals, strict=True):
        if key in names and isinstance(value, Expr):
            yield value, _columns(value)


def _renamed(expr: Any, names: Names) -> Needs:
    pairs = zip(_columns(expr.frame), _columns(expr), strict=True)
    yield expr.frame, {old for old, new in pairs if new in names}


def _joined(join: Any, names: Names) -> Needs:
    for side, on, made in zip((join.left, join.right), keys_of_join(join), names_in_join(join), strict=True):
        yield side, {*on} | {column for name, column in made.items() if name in names}
        other = join.right if side is join.left else join.left  # for a suffix, both have to have a column
        yield (
            other,
            {each for each in made.values() if each in {*_columns(other)} and each in {*_columns(side)}},
        )


def keys_of_join(join: Any) -> tuple[list[Any], list[Any]]:
    """Return the columns by which a join joins either side; none for its index."""
    return listed(join.left_on), listed(join.right_on)


def shared_keys(join: Any) -> set[Any]:
    """Return the keys with the same name on both sides, which become one column."""
    return {one for one, other in zip(*keys_of_join(join), strict=False) if one == other}


def names_in_join(join: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return, for the left and the right side, its columns by the names that they have in the result."""
    in_both = {*join.left.columns} & {*join.right.columns} - shared_keys(join)
    left_names, right_names = (
        {f"{name}{suffix}" if suffix and name in in_both else name: name for name in side.columns}
        for side, suffix in zip((join.left, join.right), join.suffixes, strict=True)
    )
    return left_names, right_names


def column_of(root: Any, expr: Any) -> Any:
    """Return the label of a column of the root; None if an expression is anything else."""
    is_column = type(expr) is _expr.Projection and expr.frame is root
    return expr.operand("columns") if is_column else None


def origin_of(frame: Any, column: Hashable) -> tuple[Any, Hashable]:
    """Return where the values of a column of a frame come from, and the name that they have there."""
    while list(frame.columns).count(column) == 1:
        kind = type(frame)
        if kind is _expr.Assign and column in frame.keys:
            value = dict(zip(frame.keys, frame.vals, strict=True))[column]
            if type(value) is not _expr.Projection or isinstance(value.operand("columns"), list):
                return value, column
            frame, column = value.frame, value.operand("columns")
        elif kind in (_expr.RenameFrame, _expr.ColumnsSetter):
            column = frame.frame.columns[list(frame.columns).index(column)]
            frame = frame.frame
        elif kind in (_expr.Assign, _expr.Drop, _expr.Filter, _expr.Projection) or is_no_operation(frame):
            frame = frame.frame
        else:
            return frame, column
    return None, column


def _of_groups(groups: Any, names: Names) -> Needs:
    frame = groups.frame
    chosen = groups.operand("_slice") if "_slice" in groups._parameters else None
    columns = {*listed(chosen)} if chosen is not None else {*_columns(frame)}
    if isinstance(groups, _groupby.GroupbyAggregationBase) and isinstance(groups.arg, dict):
        columns = {*groups.arg}
    yield frame, (columns | {each for each in groups.by if not isinstance(each, Expr)}) & {*_columns(frame)}
    yield from ((each, _columns(each)) for each in groups.by if isinstance(each, Expr))


def listed(names: Any) -> list[Any]:
    """Return labels as a list, also a single one; none for None."""
    if names is None:
        return []
    return list(names) if isinstance(names, (list, tuple)) else [names]


def _computed(expr: Any, names: Names) -> Needs:
    yield from (_same if expr.ndim == 2 and is_on_rows(expr) else _all)(expr, names)


_RULES: dict[type, Callable[[Any, Names], Needs]] = {
    **dict.fromkeys(COMPUTING, _computed),
    **dict.fromkeys([_expr.Projection, _expr.Drop, _expr.Filter, _expr.ResetIndex], _chosen),
    **dict.fromkeys([_expr.Head, _expr.Tail, _expr.RenameAxis], _chosen),
    **dict.fromkeys(RENAMING, _renamed),
    **dict.fromkeys([SetIndex, SetIndexBlockwise], _indexed),
    **dict.fromkeys([_reductions.NLargest, _reductions.NSmallest], _all),
    Concat: _same,
    Merge: _joined,
    SortValues: _with_keys,
    _expr.Assign: _assigned,
}
