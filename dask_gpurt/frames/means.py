"""Sum up integers in floats, for means.

Dask divides sums of integers by counts. Sums of 64 bits wrap around: that of five times in nanoseconds
does. It is then off by a multiple of 2**64, which the mean of pandas tells, who sums up floats. Sums below
2**53 are the same in floats. Tasks of :mod:`dask_gpurt.client.corrections` call these functions.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from pandas.api.types import is_integer_dtype

from dask_gpurt.dask_hooks.types import group_aligned

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
    return _unwrapped(totals, numbers, rows) if wraps_around(rows) else totals


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
