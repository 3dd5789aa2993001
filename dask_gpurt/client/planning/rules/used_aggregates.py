"""Compute only those aggregates of groups that a program uses.

Programs describe a table with many aggregates, ``groupby(...).agg({...})``, and use some. Dask leaves out
columns of other groupbys that nobody uses, but of ``agg`` it computes all, and so reads, joins and shuffles
all columns that they are made of. Here ``agg`` is asked for what is used. A constant takes the place of each
other aggregate, so that whatever names it still finds it. Once Dask has simplified the plan, columns that are
assigned and then left out are not assigned any more, which Dask does for some only.

What it does not reason about
    Aggregates by functions of users; those of a series or of all columns, and keys that are computed.
Why the result is the same
    Which groups there are follows from keys alone, and each aggregate from its own column. Nobody uses those
    that are left out: neither the result nor a condition (:func:`.needed_columns.needed_columns`).
The figure
    Columns, not seconds: an ``agg`` of three columns of which one is used reads two of the table, not four.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._groupby import GroupbyAggregation

from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.needed_columns import listed, needed_columns, users_first
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild


class UsedAggregates:
    """Compute only those aggregates of groups that a program uses."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan without the aggregates that nobody uses."""
        for _ in range(len({name_of(expr) for expr in plan.walk() if type(expr) is GroupbyAggregation})):
            if (change := _first_change(plan)) is None:
                break
            name, names, changed = change
            plan = rebuild(plan, partial(_instead, name, changed))
            left_out = ", ".join(map(str, names))
            facts.note(
                self, name, f"has aggregates that nobody uses, which are left out: {left_out}", done=True
            )
        return plan


class UsedAssignments:
    """Assign no columns that are left out next."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a tuned plan without assignments that nobody uses."""
        return rebuild(plan, _without_unused)


def _without_unused(expr: Any) -> Any:
    while type(expr) is _expr.Projection and type(expr.frame) is _expr.Assign:
        chosen, assigned = expr.operand("columns"), expr.frame
        pairs = list(zip(assigned.keys, assigned.vals, strict=True))
        used = [part for pair in pairs if pair[0] in listed(chosen) for part in pair]
        if len(used) == 2 * len(pairs):
            break
        made: Any = _expr.Assign
        expr = _expr.Projection(made(assigned.frame, *used) if used else assigned.frame, chosen)
    return expr


def _instead(name: str, changed: Expr, expr: Expr) -> Expr:
    return changed if name_of(expr) == name else expr


def _first_change(plan: Expr) -> tuple[str, list[Any], Any] | None:
    """Return the first aggregates of which some are not used: their name, these, and what replaces them."""
    order = users_first(plan)
    needed = needed_columns(order)
    users = Counter(name_of(each) for expr in order for each in expr.dependencies())
    for expr in order:
        groups, labels = _aggregates(expr)
        names = needed.get(name_of(expr), frozenset())
        if groups is None or not names or (expr is not groups and users[name_of(groups)] > 1):
            continue
        columns = list(expr.columns)
        used = [at for at, name in enumerate(columns) if name in names]
        unused = [name for name in columns if name not in names]
        if unused and used and (changed := _only(expr, groups, labels, used)) is not None:
            missing = [part for name in unused for part in (name, _constant(expr._meta.dtypes[name]))]
            made: Any = _expr.Assign
            return name_of(expr), unused, _expr.Projection(made(changed, *missing), columns)
    return None


def _aggregates(expr: Any) -> tuple[Any, list[Any]]:
    """Return the groupby whose columns an expression has, perhaps renamed, and their labels there."""
    if type(expr) is GroupbyAggregation and not any(isinstance(each, list) for each in _values(expr)):
        return expr, list(expr.columns)
    if (
        type(expr) is _expr.ColumnsSetter and type(expr.frame) is _expr.Projection
    ):  # names as keywords of `agg`
        groups = expr.frame.frame
        if type(groups) is GroupbyAggregation and all(isinstance(each, list) for each in _values(groups)):
            return groups, listed(expr.frame.operand("columns"))
    return None, []


def _values(groups: Any) -> list[Any]:
    """Return what is computed of each column; a list of nothing known unless that is given by column."""
    is_known = isinstance(groups.arg, Mapping) and groups.frame.ndim == 2 and groups.operand("_slice") is None
    return list(groups.arg.values()) if is_known else [[], ""]


def _only(expr: Any, groups: Any, labels: list[Any], used: list[int]) -> Any:
    """Return some of the aggregates, by their position."""
    kept = [labels[at] for at in used]
    if expr is groups:
        if set(labels) != set(groups.arg):
            return None
        return groups.substitute_parameters({"arg": {name: groups.arg[name] for name in kept}})
    if any(not isinstance(label, tuple) or not isinstance(label[1], str) for label in labels):
        return None
    arg = {
        name: [each for each in values if (name, each) in kept]
        for name, values in groups.arg.items()
        if any((name, each) in kept for each in values)
    }
    frame: Any = _expr.Projection(groups.substitute_parameters({"arg": arg}), kept)
    made: Any = _expr.ColumnsSetter
    return made(frame, tuple(expr.columns[at] for at in used))


def _constant(dtype: Any) -> Any:
    """Return a value of a dtype, for operations on columns that nobody uses."""
    kind = getattr(dtype, "kind", "O")
    return {"M": pd.Timestamp(0), "m": pd.Timedelta(0)}.get(kind, 0 if kind in "iufb" else "")
