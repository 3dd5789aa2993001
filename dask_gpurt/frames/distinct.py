"""Count distinct values by groups, among them the group whose key is null.

Dask's own functions for ``groupby(..., dropna=False)[column].nunique()`` leave that group out. Tasks of
:mod:`dask_gpurt.client.corrections` call these.
"""

from __future__ import annotations

from typing import Any

from dask_gpurt.dask_hooks.types import concat, group_aligned


def distinct_pairs(rows: Any, *by: Any, name: Any, **_: Any) -> Any:
    """Return the distinct values of a column in each group, indexed by the keys: labels, or series."""
    if rows.ndim == 1:
        rows = rows.to_frame()
        name = rows.columns[0]
    if all(not hasattr(key, "dtype") and key in rows.columns and key != name for key in by):
        return rows[[*by, name]].drop_duplicates().set_index(list(by))
    groups = group_aligned(rows, by=by, observed=True, dropna=False)
    return groups[name].unique().explode().to_frame()


def combine_pairs(parts: list[Any], levels: Any) -> Any:
    """Return the distinct pairs of several partitions."""
    rows = concat(parts)
    groups = rows.groupby(level=levels, sort=False, observed=True, dropna=False)
    return groups[rows.columns[0]].unique().explode().to_frame()


def count_values(parts: list[Any], levels: Any, name: Any) -> Any:
    """Return the number of distinct values in each group."""
    rows = concat(parts)
    groups = rows.groupby(level=levels, sort=False, observed=True, dropna=False)
    return (groups if rows.ndim == 1 else groups[name]).nunique()
