"""Divide rows by the values of their keys: keys that are equal go together, whatever their dtypes.

Dask hashes numbers as float64, and all else as it is stored, so that equal keys of two tables have different
hashes where one has dates in nanoseconds and the other in microseconds, or Booleans of Arrow and of numpy,
and a join of these loses rows. Here the hash depends on the value alone: of numbers as float64, of times and
durations in nanoseconds, of text by its characters, and all that are missing are alike.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from numbers import Number
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pandas.core.util.hashing import combine_hash_arrays  # type: ignore[attr-defined]

from dask_gpurt.frames.registry import library_of

#: Nanoseconds in the units of times. Larger products wrap around, in the same way for equal times.
NANOSECONDS = {"D": 86_400_000_000_000, "s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
#: The hash of what is missing.
_MISSING = np.uint64(0xFFFFFFFFFFFFFFFF)
#: What ``infer_dtype`` finds in columns of text.
_TEXT = ("string", "empty")


def partitions_by_value(keys: Any, npartitions: int) -> Any:
    """Return the output partition of each row.

    ``keys``: a frame with the keys.
    """
    if (library := library_of(keys)) is not None and library.hashes:
        return library.load().partitions_by_value(keys, npartitions)
    hashes = [_hashes(keys.iloc[:, at]) for at in range(keys.shape[1])]
    return (combine_hash_arrays(iter(hashes), len(hashes)) % np.uint64(npartitions)).astype(np.int64)


def _hashes(values: pd.Series[Any]) -> np.ndarray:
    """Return the hash of each value."""
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        known = _hashes(pd.Series(dtype.categories))
        return np.append(known, _MISSING)[values.cat.codes.to_numpy()]  # -1 is missing
    missing = values.isna().to_numpy()
    hashes = _hashes_of_known(values, missing)
    hashes[missing] = _MISSING
    return hashes


def _hashes_of_known(values: pd.Series[Any], missing: np.ndarray) -> np.ndarray:
    """Return the hash of each value that is not missing, and any for the others."""
    dtype: Any = values.dtype
    if dtype.kind == "c":
        return _of_floats(values.to_numpy().real)
    if pd.api.types.is_bool_dtype(dtype) or pd.api.types.is_numeric_dtype(dtype):
        return _of_floats(values.to_numpy(np.float64, na_value=np.nan))
    if (unit := unit_of(dtype)) is not None:
        return _of_integers(_integers(values), unit)
    if isinstance(dtype, pd.IntervalDtype):
        return _hashes(pd.Series(values.array.left))
    if isinstance(dtype, pd.StringDtype) or str(dtype) in ("string[pyarrow]", "large_string[pyarrow]"):
        return _of_text(values.to_numpy(object))
    return _of_objects(values.to_numpy(object), missing)


def _of_floats(numbers: np.ndarray) -> np.ndarray:
    return np.array(pd.util.hash_array(numbers + 0.0))


def _of_integers(numbers: np.ndarray, unit: str) -> np.ndarray:
    """Return the hashes of times or durations, given in a unit."""
    with np.errstate(over="ignore"):
        return np.array(pd.util.hash_array(numbers * np.int64(NANOSECONDS[unit])))


def _of_text(values: np.ndarray) -> np.ndarray:
    return np.array(pd.util.hash_array(values))


def unit_of(dtype: Any) -> str | None:
    """Return the unit of times, dates or durations; None for other dtypes."""
    if isinstance(dtype, pd.ArrowDtype):
        kind = dtype.pyarrow_dtype
        if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
            return str(kind.unit)
        return "D" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else None
    if isinstance(dtype, pd.DatetimeTZDtype):
        return str(dtype.unit)
    return np.datetime_data(dtype)[0] if isinstance(dtype, np.dtype) and dtype.kind in "mM" else None


def _integers(values: pd.Series[Any]) -> np.ndarray:
    """Return times, dates or durations as integers of their unit."""
    if not isinstance(values.dtype, pd.ArrowDtype):
        return np.asarray(values.array.asi8)
    stored = pa.array(values.array)
    narrow = stored.cast(pa.int32()) if pa.types.is_date32(stored.type) else stored
    return np.asarray(narrow.cast(pa.int64()).fill_null(0))


def _of_objects(values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Return the hashes of Python objects, each by its own type."""
    if pd.api.types.infer_dtype(values, skipna=True) in _TEXT:
        return _of_text(values)
    hashes, places = np.zeros(len(values), np.uint64), defaultdict[type, list[int]](list)
    for at in np.flatnonzero(~missing).tolist():
        places[type(values[at])].append(at)
    for kind, found in places.items():
        hashes[found] = _of_kind(kind, values[found])
    return hashes


def _of_kind(kind: type, values: np.ndarray) -> np.ndarray:
    """Return the hashes of objects of a type."""
    is_time = issubclass(kind, (datetime.date, np.datetime64))
    if is_time or issubclass(kind, (datetime.timedelta, np.timedelta64)):
        times = [(pd.Timestamp(each) if is_time else pd.Timedelta(each)).asm8 for each in values]
        return np.concatenate(
            [
                _of_integers(each.astype(np.int64).reshape(1), np.datetime_data(each.dtype)[0])
                for each in times
            ]
        )
    if issubclass(kind, pd.Interval):
        return _hashes(pd.Series([value.left for value in values]))
    if issubclass(kind, (Number, np.bool_)):
        return _of_floats(np.array([float(value.real) for value in values]))
    if issubclass(kind, (tuple, frozenset)):
        return _of_collections(values, in_order=issubclass(kind, tuple))
    return _of_text(np.array([str(value) for value in values], object))


def _of_collections(values: np.ndarray, *, in_order: bool) -> np.ndarray:
    """Return the hashes of tuples or sets: (1, 2) and (1.0, 2) are equal, and a set has no order."""
    items = _hashes(pd.Series([item for value in values for item in value], dtype=object))
    of_each = np.split(items, np.cumsum([len(value) for value in values])[:-1])
    return _of_text(
        np.array([str((each if in_order else np.sort(each)).tolist()) for each in of_each], object)
    )
