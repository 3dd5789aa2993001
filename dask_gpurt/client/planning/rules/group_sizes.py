"""Have sizes of groups computed beside their sums on a GPU, as sums of ones.

dask_cudf computes an ``agg`` of sums, means and the like with one groupby of cudf for each partition, but
leaves it to Dask if one of them is ``size``. Dask calls cudf's groupby for each aggregate of each column, and
each call sorts the keys into groups anew.

What it does not reason about
    Anything but an ``agg`` of one aggregate for each column, by columns. Aggregates that dask_cudf leaves to
    Dask in any case, and those that it computes in another way, such as variances.
Why the result is the same
    The size of a group is the sum of a one in each of its rows, with nulls in other columns or without. The
    column whose size is asked for is no key, and has no other aggregate. The rule is refused where the names
    or dtypes of what dask_cudf returns would be others.
The figure
    Q1 of TPC-H with ``agg({..., "l_orderkey": "size"})`` takes 3.4 times as long as with ``count``: 0.68 and
    0.20 s (1 x H200, scale 30).
"""

from __future__ import annotations

from typing import Any

from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._groupby import GroupbyAggregation

from dask_gpurt.client.planning.operations import dtypes_of, is_of_pandas
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.dask_hooks.planning import Expr, collection_of, name_of, rebuild

#: Those of the aggregates that dask_cudf computes with one groupby whose values are Dask's.
_AT_ONCE = frozenset(["count", "mean", "sum", "min", "max"])


class GroupSizes:
    """Compute sizes of groups with the other aggregates."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan in which groups of cudf are aggregated at once."""

        def change(expr: Any) -> Any:
            if type(expr) is not GroupbyAggregation or is_of_pandas(expr) or not has_sizes(expr):
                return expr
            changed = with_sums(expr)
            if list(changed.columns) != list(expr.columns) or dtypes_of(changed) != dtypes_of(expr):
                facts.note(self, name_of(expr), "has its sizes computed by Dask: dask_cudf names others")
                return expr
            facts.note(self, name_of(expr), "has its sizes computed beside other aggregates", done=True)
            return changed

        return rebuild(plan, change)


def has_sizes(groups: Any) -> bool:
    """Return whether sizes and other aggregates of groups by columns can be computed at once."""
    if not isinstance(groups.arg, dict) or any(isinstance(key, Expr) for key in groups.by):
        return False
    aggregates = {each if isinstance(each, str) else None for each in groups.arg.values()}
    sizes = {column for column, each in groups.arg.items() if each == "size"}
    return bool(sizes) and aggregates <= _AT_ONCE | {"size"} and sizes.isdisjoint(groups.by)


def with_sums(groups: Any) -> Any:
    """Return an aggregation with sums of ones for sizes."""
    sizes = [column for column, each in groups.arg.items() if each == "size"]
    ones = _expr.Assign(groups.frame, *(each for column in sizes for each in (column, 1)))
    chosen = {
        name: value for name in ("sort", "dropna", "observed") if (value := groups.operand(name)) is not None
    }
    aggregates = {column: "sum" if each == "size" else each for column, each in groups.arg.items()}
    how = {name: groups.operand(name) for name in ("split_every", "split_out", "shuffle_method")}
    return collection_of(ones).groupby(list(groups.by), **chosen).agg(aggregates, **how).expr
