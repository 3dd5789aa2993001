"""Drop the rows of one side of a join that match no key of the other side, before they are moved.

Called a runtime filter, or sideways information passing, in databases. The filter is conservative: it keeps a
row unless it is certain that the row has no match. Keys are compared column by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_gpurt.dask_hooks.graph import concat

#: Keys of a whole side from which on looking them up is not worth their transfer to each worker.
MAX_KEYS = 4_000_000
#: Rows looked up first; if more than ``MAX_KEPT`` of them may match, all rows are kept without a look.
SAMPLE_ROWS, MAX_KEPT = 1 << 14, 0.5

#: The distinct keys of a side, by column; None if there are too many.
Keys = list[Any] | None


def can_look_up(meta: Any, on: Sequence[Any], other_meta: Any, other_on: Sequence[Any]) -> bool:
    """Return whether the keys of both sides have equal dtypes that can be looked up exactly.

    Parameters
    ----------
    meta, other_meta
        Empty frames of either side.
    on, other_on
        Their key columns.
    """
    pairs = zip(on, other_on, strict=True)
    return all(_are_plain(meta.dtypes[one], other_meta.dtypes[other]) for one, other in pairs)


def _are_plain(dtype: Any, other: Any) -> bool:
    # Floats are left out: NaN and the two zeros.
    return isinstance(dtype, np.dtype) and dtype == other and dtype.kind in "biumM"


def distinct_keys(frame: Any, on: Sequence[Any]) -> Keys:
    """Return the distinct values of each key column of a partition."""
    if len(frame) > MAX_KEYS:
        return None
    return [frame[name].drop_duplicates() for name in on]


def all_keys(*parts: Keys) -> Keys:
    """Return the distinct values of each key column of all partitions."""
    if any(part is None for part in parts):
        return None
    columns = list(zip(*(part for part in parts if part is not None), strict=True))
    if any(sum(map(len, column)) > MAX_KEYS for column in columns):
        return None
    return [concat(column, ignore_index=True).drop_duplicates() for column in columns]


def rows_with_keys(frame: Any, on: Sequence[Any], keys: Keys) -> Any:
    """Return the rows whose keys may occur among ``keys``, in their order.

    All rows are returned if a sample shows that most of them may.
    """
    if keys is None or not len(frame):
        return frame
    if len(frame) > 4 * SAMPLE_ROWS:
        sample = frame[list(on)].iloc[:: len(frame) // SAMPLE_ROWS | 1]  # odd: keys often have an even period
        if float(_may_occur(sample, on, keys).mean()) > MAX_KEPT:
            return frame
    return frame[_may_occur(frame, on, keys)]


def _may_occur(frame: Any, on: Sequence[Any], keys: Sequence[Any]) -> Any:
    found: Any = None
    for name, among in zip(on, keys, strict=True):
        # A missing value matches a missing value in a join, in cudf not in isin.
        occurs = frame[name].isin(among) | frame[name].isna()
        found = occurs if found is None else found & occurs
    return found
