"""Describe an empty frame by a key of its names and dtypes, to recognise operations on equal frames.

Values of frames are never accessed, so on a GPU no kernel is launched and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd

from dask_gpurt.frames.registry import LIBRARIES

#: Dtypes other than numpy's for which equality means that they are identical.
SIMPLE_DTYPES = (
    pd.BooleanDtype, pd.Int8Dtype, pd.Int16Dtype, pd.Int32Dtype, pd.Int64Dtype, pd.UInt8Dtype, pd.UInt16Dtype,
    pd.UInt32Dtype, pd.UInt64Dtype, pd.Float32Dtype, pd.Float64Dtype, pd.ArrowDtype,
)  # fmt: skip
#: Categorical dtypes with more categories have no key.
CATEGORIES_LIMIT = 1_000


def schema_of(frame: Any) -> Hashable | None:
    """Return a key that is equal only for indistinguishable empty frames or series; None if there is none.

    Parameters
    ----------
    frame
        A frame or series of a known library. Subclasses, and frames with rows, several index or column
        levels, attributes, frequencies or unknown dtypes have no key.
    """
    kind = type(frame)
    if kind.__name__ not in ("DataFrame", "Series") or kind.__module__.partition(".")[0] not in LIBRARIES:
        return None
    if len(frame) or getattr(frame, "attrs", None) or not _allows_duplicates(frame):
        return None
    columns: Hashable
    dtypes: tuple[Hashable, ...]
    index = _index_key(frame.index)
    if kind.__name__ == "Series":
        columns, dtypes = _label(frame.name), (_dtype_key(frame.dtype),)
    else:
        columns, dtypes = _columns_key(frame.columns), tuple(map(_dtype_key, frame.dtypes))
    if index is None or columns is None or None in dtypes:
        return None
    return (kind, columns, dtypes, index)


def _allows_duplicates(frame: Any) -> bool:
    flags = getattr(frame, "flags", None)
    return flags is None or bool(flags.allows_duplicate_labels)


def _columns_key(columns: pd.Index[Any]) -> Hashable | None:
    if type(columns) not in (pd.Index, pd.RangeIndex):
        return None
    names, dtype = tuple(map(_label, columns)), _dtype_key(columns.dtype)
    if dtype is None or None in names:
        return None
    return (type(columns), names, dtype, _label(columns.name))


def _index_key(index: Any) -> Hashable | None:
    kind, name = type(index), _label(index.name)
    if name is None:
        return None
    if kind.__name__ == "RangeIndex":
        return (kind, name, index.start, index.stop, index.step)
    if kind.__name__ not in ("Index", "DatetimeIndex", "TimedeltaIndex", "CategoricalIndex"):
        return None
    dtype = _dtype_key(index.dtype)
    return None if dtype is None or getattr(index, "freq", None) is not None else (kind, name, dtype)


def _label(label: Hashable) -> Hashable | None:
    """Return a key that distinguishes labels that are equal in Python, such as 1, 1.0 and True."""
    if label is None or isinstance(label, (str, int, float, bool)):
        return (type(label), label)
    return None


def _dtype_key(dtype: Any) -> Hashable | None:
    if isinstance(dtype, np.dtype) or type(dtype) in SIMPLE_DTYPES:
        return (type(dtype), dtype)
    if type(dtype) is pd.StringDtype:
        return (pd.StringDtype, dtype.storage, dtype.na_value is pd.NA)
    if type(dtype) is pd.CategoricalDtype:
        return _categories_key(dtype)
    return None


def _categories_key(dtype: pd.CategoricalDtype) -> Hashable | None:
    # Unordered dtypes are equal in pandas whatever the order of categories, but their columns differ.
    categories = dtype.categories
    if categories is None or len(categories) > CATEGORIES_LIMIT:
        return None
    key = _columns_key(categories)
    return None if key is None else (pd.CategoricalDtype, key, dtype.ordered)
