"""Go on with running sums, products, least and greatest values from one partition of pandas to the next.

Tasks of :mod:`dask_gpurt.client.running_values` call these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add, ge, le, mul
from typing import Any

import numpy as np
import pandas as pd


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
