"""Make joins by columns of inner joins that look rows up by the index of the other side.

A lookup, or what a groupby returns, is a table like others then, and
``frame.merge(lookup, left_on="key", right_index=True)`` may be done earlier or later.

What it does not reason about
    Joins of two indexes, of several levels, by the index of the left side, and outer joins.
Why the result is the same
    The keys have one dtype, and joins match them by value, also nulls. What differs is labels: those of the
    left side without the change, numbers of joined rows with it. It is made only where the left side's are
    numbers of rows, of which no result of a plan is made that is independent of partitions.
    ``tests/unit/client/planning/test_join_order.py`` compares random trees of joins.
"""

from __future__ import annotations

from typing import Any

from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._merge import Merge

from dask_gpurt.client.planning.rules.dependence import numbered
from dask_gpurt.client.planning.rules.needed_columns import listed
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild_from


def by_columns(plan: Expr) -> Expr:
    """Return a plan, whose results do not depend on partitions, with joins by columns in place of some."""
    if not any(type(expr) is Merge and expr.right_index for expr in plan.walk()):
        return plan
    numbers = numbered(plan)

    def change(old: Any, new: Any) -> Any:
        is_lookup = type(old) is Merge and name_of(old.left) in numbers and _looks_up(old)
        return _by_column(new) if is_lookup else new

    return rebuild_from(plan, change)


def _looks_up(join: Any) -> bool:
    """Return whether an inner join looks up a column in the index of its right side."""
    left, right, keys = join.left, join.right, listed(join.left_on)
    if join.how != "inner" or not join.right_index or join.left_index or join.indicator or len(keys) != 1:
        return False
    index, (key,) = right._meta.index, keys
    return (
        not isinstance(key, Expr)
        and right.ndim == left.ndim == 2
        and all(len({*each.columns}) == len(each.columns) for each in (left, right, join))
        and key in list(left.columns)
        and key not in list(right.columns)  # pandas would return it thrice
        and index.nlevels == 1
        and index.name is not None
        and index.name not in list(right.columns)
        and bool(left._meta.dtypes[key] == index.dtype)
    )


def _by_column(join: Any) -> Any:
    label = "key"
    while label in [*join.left.columns, *join.right.columns]:
        label += "_"
    index: Any = _expr.ResetIndex(join.right)
    right = _expr.RenameFrame(index, {join.right._meta.index.name: label})
    method = join.shuffle_method
    keys = (listed(join.left_on), [label])
    made = Merge(join.left, right, "inner", *keys, suffixes=join.suffixes, shuffle_method=method)
    return _expr.Projection(made, list(join.columns))
