"""Aggregate groups in one task where Dask would shuffle their rows into one partition.

For a median, Dask brings all rows of a group together: it sets the keys as an index, resets it, hashes the
keys, splits every partition by them, and sets the index again. But unless a program asks for more, or there
are many partitions, all groups are in a single partition, which gets all rows in any case. Here the
partitions are put together as they are, and aggregated by the same functions.

What it does not reason about
    Aggregations that Dask decomposes, results in several partitions, and groups that are sorted. Frames of
    cudf, which were not measured.
Why the result is the same
    A shuffle by ``tasks`` into one partition has all rows in their order, as putting them together has. Each
    group has the same rows in the same order, and groups the order in which they appear. Two kinds of keys
    are left to Dask: it adds categories without rows to each partition, and short integers are int64 if
    those of a partition are a range, as an index of pandas is then.
The figure
    Median and deviation of a million rows in 10,000 groups take 0.45 instead of 0.95 s of all processors, and
    1.1 with ``tasks`` (``docs/decisions/planning.md``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from dask.dataframe.dask_expr._groupby import GroupbyAggregation, HolisticGroupbyAggregation
from dask.dataframe.dask_expr._repartition import Repartition

from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.dask_hooks.planning import Expr, metadata, name_of, rebuild


class InOnePartition(HolisticGroupbyAggregation):
    """Aggregate the groups of a frame in one partition."""

    should_shuffle = False


class WholeGroups:
    """Put the partitions of a frame together for medians of its groups."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan that shuffles no rows into one partition to aggregate groups."""

        def change(expr: Any) -> Any:
            physical = expr._lower() if type(expr) is GroupbyAggregation else None
            if type(physical) is not HolisticGroupbyAggregation:
                return expr
            if (reason := _why_shuffled(physical)) is not None:
                facts.note(self, name_of(expr), f"shuffles the rows of groups, since {reason}")
                return expr
            facts.note(self, name_of(expr), "aggregates groups in one task, which has all rows", done=True)
            changed = {"frame": Repartition(physical.frame, 1), "split_out": 1}
            given = physical.substitute_parameters(changed).operands
            return InOnePartition(*given)  # type: ignore[no-untyped-call]

        return rebuild(plan, change)


def _why_shuffled(expr: Any) -> str | None:
    """Return why rows of groups are left to a shuffle; None if they need none."""
    rows = metadata(expr.frame)
    if not isinstance(rows, pd.DataFrame):
        return "they are not of a frame of pandas"
    if not rows.columns.is_unique or any(isinstance(k, Expr) or k not in rows.columns for k in expr.by):
        return "they are grouped by other than columns"
    if any(isinstance(dtype, pd.CategoricalDtype) for dtype in rows.dtypes):
        return "there are categories"
    if any(_is_short(rows.dtypes[key]) for key in expr.by):
        return "a key is of short integers"
    if expr.sort:
        return "groups are sorted"
    if expr.split_out != 1 or expr.frame.npartitions == 1:
        return f"{expr.frame.npartitions} partitions become {expr.split_out}"
    return None if expr.need_to_shuffle else "partitions have whole groups already"


def _is_short(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind == "i" and dtype.itemsize < np.dtype("int64").itemsize
