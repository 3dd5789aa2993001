"""Sum numbers of groups, and their squares, in floats, for variances of integers.

Dask squares integers, and the sums of integers of a group, as the integers that they are, which wrap around:
a group of whose values the sum is 3.1e9 has a variance that is off by a factor. Tasks of
:mod:`dask_gpurt.client.corrections` call these functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_integer_dtype

from dask_gpurt.dask_hooks.types import sum_of_squares


def float_dtype(dtype: Any) -> Any:
    """Return the dtype of floats in which integers of a dtype are summed up; None for other dtypes."""
    if not is_integer_dtype(dtype):
        return None
    return np.dtype("float64") if isinstance(dtype, np.dtype) else (pd.Series([], dtype=dtype) * 1.0).dtype


def sum_of_floats(grouped: Any, column: Any) -> Any:
    """Return the sums of a column by group; of a series if the column is None."""
    numbers = grouped if column is None else grouped[column]
    if float_dtype((grouped.obj if column is None else grouped.obj[column]).dtype) is None:
        return numbers.sum()
    return numbers.count() * numbers.mean()  # sums of large integers wrap around, too


def sum_of_squared_floats(grouped: Any, column: Any) -> Any:
    """Return the sums of the squares of a column by group; of a series if the column is None."""
    if float_dtype((grouped.obj if column is None else grouped.obj[column]).dtype) is None:
        return sum_of_squares(grouped, column)
    numbers = grouped if column is None else grouped[column]
    mean = numbers.mean()
    return numbers.count() * (numbers.var(ddof=0) + mean * mean)
