"""Shrink the right side of a semi join before Dask joins it.

pandas has no semi join: Dask removes the duplicates of the right side, and makes an inner join. Where the
right side is a single partition, each task on a partition of the left side does so for the whole of it.
Looking up its keys among the few of a left partition takes a small part of that time. cudf has a semi join,
and its frames stay as they are.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

#: Rows of the right side for each row of the left side from which on looking up its keys takes less time than
#: it saves, whether its keys are unique or not.
WORTH_A_LOOKUP = 2


def rows_that_may_match(right: Any, left: Any, right_on: Sequence[Any], left_on: Sequence[Any]) -> Any:
    """Return the right side of a semi join on columns, without rows that match no row of the left side.

    The join has the same result, since it only asks whether a key occurs: rows are dropped only where both
    sides have the same dtypes, and the right side has no columns but its keys, so that neither categories
    nor the comparison of keys depend on the dropped rows. Otherwise the right side is returned as it is.

    Parameters
    ----------
    right, left
        Partitions of either side.
    right_on, left_on
        The key columns of each side.
    """
    if not isinstance(right, pd.DataFrame) or not isinstance(left, pd.DataFrame):
        return right
    if len(right) < WORTH_A_LOOKUP * len(left) or not _are_keys(right, left, right_on, left_on):
        return right
    for name, other in zip(right_on, left_on, strict=True):
        found = _occur(right[name], left[other])
        if found is not None:
            right = right[found]
    return right


def _are_keys(
    right: pd.DataFrame, left: pd.DataFrame, right_on: Sequence[Any], left_on: Sequence[Any]
) -> bool:
    """Return whether the right side consists of its keys, of the same dtypes as those of the left side."""
    if list(right.columns) != list(right_on) or len(right_on) != len(left_on):
        return False
    if not left.columns.is_unique or not set(left_on) <= set(left.columns):
        return False
    pairs = zip(right_on, left_on, strict=True)
    return all(right.dtypes[name] == left.dtypes[other] for name, other in pairs)


def _occur(values: pd.Series[Any], among: pd.Series[Any]) -> np.ndarray | None:
    """Return which values occur in another series of the same dtype; None for other dtypes.

    As in a join, a missing value occurs if any is missing.
    """
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "biufmM":
        return values.isin(among).to_numpy()
    if isinstance(values.dtype, pd.StringDtype) and values.dtype.storage == "pyarrow":
        # pandas would convert the values of `among` to Python strings.
        looked_up = pc.is_in(pa.array(values), value_set=pa.array(among))
        return np.asarray(looked_up)
    return None
