"""Compute statistics of rows and groups of pandas where Dask's own functions are wrong.

Tasks of :mod:`dask_gpurt.client.statistics` and :mod:`dask_gpurt.client.chosen_rows` call these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add, ge, le, mul
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pandas.api.types import is_integer_dtype

from dask_gpurt.dask_hooks.types import add_totals_before, concat, group_aligned, sum_of_squares

# ---- sums of integers in floats, for means and variances -------------------------------------------

# Dask divides sums of integers by counts. Sums of 64 bits wrap around: that of five times in nanoseconds
# does. It is then off by a multiple of 2**64, which the mean of pandas tells, who sums up floats. Sums below
# 2**53 are the same in floats.
_WRAP = 2.0**64


def wraps_around(rows: Any) -> bool:
    """Return whether sums of a series, or of some columns of a frame, may wrap around; only for pandas."""
    if isinstance(rows, pd.DataFrame):
        return any(map(_is_wide, rows.dtypes))
    return isinstance(rows, pd.Series) and _is_wide(rows.dtype)


def float_sum(rows: Any, **options: Any) -> Any:
    """Return the sum of a series, or those of the columns of a frame."""
    totals = rows.sum(**options)
    if rows.ndim == 1:
        return _float_sum(rows, totals)
    return pd.Series({label: _float_sum(rows[label], each) for label, each in totals.items()})


def sums_of_groups(grouped: Any, column: Any) -> Any:
    """Return the sums of a column by group; of a series if the column is None."""
    numbers, rows = (grouped, grouped.obj) if column is None else (grouped[column], grouped.obj[column])
    totals = numbers.sum()
    return _unwrapped(totals, numbers, rows) if is_integer_dtype(rows.dtype) else totals


def float_sums_of_groups(sums: Any, rows: Any, *by: Any, **options: Any) -> Any:
    """Return sums and counts by group with the sums in floats."""
    frame = rows.to_frame() if rows.ndim == 1 else rows
    groups = group_aligned(frame, by=by, **options)
    labels = sums.columns[: len(sums.columns) // 2] if frame.columns.is_unique else []
    for at, label in enumerate(labels):
        if _is_wide(frame.dtypes[label]):
            sums.isetitem(at, _unwrapped(sums.iloc[:, at], groups[label], frame[label]))
    return sums


def _is_wide(dtype: Any) -> bool:
    return is_integer_dtype(dtype) and dtype.itemsize == 8


def _unwrapped(totals: Any, groups: Any, rows: Any) -> Any:
    floats = totals / 1  # Arrow refuses to cast integers above 2**53
    if not _may_wrap(rows):
        return floats
    times = ((groups.mean() * groups.count() - floats) / _WRAP).round()
    return floats + times.fillna(0) * _WRAP


def _float_sum(rows: Any, total: Any) -> Any:
    if not _is_wide(rows.dtype) or pd.isna(total):
        return total
    times = round((rows.mean() * rows.count() - float(total)) / _WRAP) if _may_wrap(rows) else 0
    return float(total) + times * _WRAP


def _may_wrap(rows: Any) -> bool:
    """Return whether any sum of some of the integers may not be one of 64 bits."""
    least, greatest = rows.min(), rows.max()
    return not pd.isna(least) and max(abs(int(least)), abs(int(greatest))) * len(rows) >= 2**63


# ---- sums of squares in floats, for variances ------------------------------------------------------

# Dask squares integers, and the sums of integers of a group, as the integers that they are, which wrap
# around: a group of whose values the sum is 3.1e9 has a variance that is off by a factor.


def float_dtype(dtype: Any) -> Any:
    """Return the dtype of floats in which integers of a dtype are summed up; None for other dtypes."""
    if not is_integer_dtype(dtype):
        return None
    return np.dtype("float64") if isinstance(dtype, np.dtype) else (pd.Series([], dtype=dtype) * 1.0).dtype


def sum_of_squared_floats(grouped: Any, column: Any) -> Any:
    """Return the sums of the squares of a column by group; of a series if the column is None."""
    if float_dtype((grouped.obj if column is None else grouped.obj[column]).dtype) is None:
        return sum_of_squares(grouped, column)
    numbers = grouped if column is None else grouped[column]
    mean = numbers.mean()
    return numbers.count() * (numbers.var(ddof=0) + mean * mean)


# ---- distinct values -------------------------------------------------------------------------------

# Dask's functions for ``groupby(..., dropna=False)[column].nunique()`` leave out the group whose key is null.


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


# ---- running values: those of groups, and of all rows -----------------------------------------------------


def add_known_totals(
    part: Any, totals: Any, by: Any, columns: Any, add: Callable[..., Any], initial: Any
) -> Any:
    """Go on with the running values of groups, whose total is null where they had no values before."""
    return add_totals_before(part, totals.fillna(initial), by, columns, add, initial)


def last_row(values: Any, skipna: bool = True) -> Any:
    """Return the last running values of a partition as a frame or series of one row; empty if it has none."""
    return (values.ffill() if skipna else values).tail(1)


def go_on(values: Any, total: Any, kind: str, skipna: bool) -> Any:
    """Return the running values of a partition, going on after ``total``: one row, or none."""
    if not len(values) or not len(total):
        return values
    if values.ndim == 1:
        return _go_on(values, total.iloc[0], kind, skipna=skipna)
    columns = [
        _go_on(values.iloc[:, at], total.iloc[0, at], kind, skipna=skipna) for at in range(values.shape[1])
    ]
    return pd.concat(columns, axis=1).set_axis(values.columns, axis=1)


def total_so_far(last: Any, before: Any, kind: str, skipna: bool) -> Any:
    """Return the last running values of all partitions so far, of which ``last`` has those of one alone."""
    return last_row(pd.concat([before, go_on(last, before, kind, skipna)]), skipna)


def _go_on(values: Any, total: Any, kind: str, *, skipna: bool) -> Any:
    if pd.isna(total):
        return values if skipna else values.where(np.zeros(len(values), bool))
    if kind in ("sum", "prod"):
        return (add if kind == "sum" else mul)(total, values)  # text has an order
    keeps: Callable[..., Any] = le if kind == "min" else ge
    return values.where(keeps(values, total) | values.isna(), total)


# ---- labels of the least and greatest values of groups ------------------------------------------------

# Dask takes the label that the first partition with rows of a group has found. Here partitions return pairs
# of columns, values and their labels, of which the extreme ones are found again.


def labels_of_groups(rows: Any, *by: Any, names: list[Any], least: bool, **options: Any) -> pd.DataFrame:
    """Return the extreme value of some columns in each group, and its label, indexed by the keys.

    Raises ValueError for a null with ``skipna=False``, as pandas does.
    """
    frame = rows.to_frame() if rows.ndim == 1 else rows
    keys = [key if hasattr(key, "dtype") else frame[key] for key in by]
    columns = [(frame[name], frame.index) for name in names]
    return _extremes(columns, keys, least=least, **options)


def combine_labels(parts: list[Any], levels: Any, least: bool, **options: Any) -> pd.DataFrame:
    """Return the extreme values of groups of several partitions, and their labels."""
    rows = concat(parts)
    keys = [
        rows.index.get_level_values(level) for level in (levels if isinstance(levels, list) else [levels])
    ]
    columns = [(rows.iloc[:, at], rows.iloc[:, at + 1]) for at in range(0, rows.shape[1], 2)]
    return _extremes(columns, keys, least=least, **options)


def choose_labels(parts: list[Any], names: list[Any], name: Any, is_frame: bool, **options: Any) -> Any:
    """Return the labels of the extreme values of each group.

    Raises ValueError if a group has no values, as pandas does.
    """
    pairs = combine_labels(parts, **options)
    if pairs.iloc[:, ::2].isna().any(axis=None):
        raise ValueError("a group has no values of which one could be the least or greatest")
    found = pairs.iloc[:, 1::2].infer_objects().set_axis(names, axis=1)
    return found if is_frame else found.iloc[:, 0].rename(name)


def _extremes(
    columns: list[Any], keys: list[Any], *, least: bool, skipna: bool = True, **options: Any
) -> pd.DataFrame:
    of_all = [pd.Series(key.array) for key in keys]
    groups = pd.Series(0, of_all[0].index).groupby(of_all, **options).size().index
    found = []
    for at, (values, labels) in enumerate(columns):
        here = np.flatnonzero(values.notna()) if skipna else np.arange(len(values))
        grouped = pd.Series(values.array[here]).groupby(
            [pd.Series(key.array[here]) for key in keys], **options
        )
        chosen = grouped.idxmin(skipna=skipna) if least else grouped.idxmax(skipna=skipna)
        places = here[chosen.to_numpy()]
        pair = {f"value-{at}": values.array[places], f"label-{at}": labels.array[places]}
        pairs = pd.DataFrame(pair, index=chosen.index)
        if len(pairs) < len(groups):
            pairs = pairs.astype({f"label-{at}": object}).reindex(groups)
        found.append(pairs)
    return pd.concat(found, axis=1).rename_axis(index=[key.name for key in keys])


# ---- groups by a dictionary of Arrow, of which pandas makes one for each word ----------------------


def is_dictionary(rows: Any) -> bool:
    """Return whether the index of rows of pandas is a dictionary of Arrow."""
    dtype = rows.index.dtype if isinstance(rows, (pd.DataFrame, pd.Series)) else None
    return isinstance(dtype, pd.ArrowDtype) and pa.types.is_dictionary(dtype.pyarrow_dtype)


def aggregate_present(aggregate: Callable[..., Any], parts: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Aggregate parts of groups, whose dictionaries lose the words that are not there."""
    return aggregate(
        [_encoded_again(part) if is_dictionary(part) else part for part in parts], *args, **kwargs
    )


def _encoded_again(part: Any) -> Any:
    keys = part.index
    words = keys.astype(pd.ArrowDtype(keys.dtype.pyarrow_dtype.value_type))
    return part.set_axis(words.astype(keys.dtype), axis=0)
