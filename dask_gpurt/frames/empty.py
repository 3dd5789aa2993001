"""Take empty frames apart, and put others together of their columns, without calling a kernel.

A frame without rows is its labels, its index, and for each column an array of a dtype. All columns of a dtype
are alike, so one of each is enough for any number of frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd


def dtypes_of(frame: Any) -> list[Any]:
    """Return the dtypes of the columns of a frame, which cudf would make a series of pandas of."""
    return list(frame.dtypes) if isinstance(frame, pd.DataFrame) else [each.dtype for each in frame._columns]


def values_at(frame: Any, position: int) -> Any:
    """Return the values of a column of an empty frame, or of a series, for :func:`assembled`."""
    series = frame if frame.ndim == 1 else frame.iloc[:, position]
    return series.array if isinstance(series, pd.Series) else series._column


def dtype_of(values: Any) -> Any:
    """Return the dtype of a column with these values; an array of pandas may have another one."""
    return values.to_numpy().dtype if isinstance(values, pd.arrays.NumpyExtensionArray) else values.dtype


def dtype_of_cudf(values: Any) -> tuple[Any, ...] | None:
    """Return what identifies the dtype of a column of cudf that is none of numpy's or pandas'.

    The categories of a dtype are copied to the host.
    """
    dtype = values.dtype
    kind: type = type(dtype)
    if not kind.__module__.startswith("cudf."):
        return None
    if kind.__name__.startswith("Decimal"):
        return (kind, dtype.precision, dtype.scale)
    if kind.__name__ in ("ListDtype", "StructDtype"):
        return (kind, str(dtype.to_arrow()))
    if kind.__name__ != "CategoricalDtype":
        return None
    categories = dtype.categories.to_pandas()
    return (kind, values.codes.dtype, pd.CategoricalDtype(categories, ordered=bool(dtype.ordered)))


def assembled(kind: type, labels: pd.Index[Any], values: Sequence[Any], index: Any) -> Any:
    """Return the empty frame of a class that has these columns, under these labels.

    ``kind``: the class of frames of a library.
    """
    if issubclass(kind, pd.DataFrame):
        frame: Any = kind(dict(enumerate(values)), index=index)
    else:  # its constructor would align columns and index
        frame = kind._from_data(dict(zip(labels.tolist(), values, strict=True)), index)  # type: ignore[attr-defined]
    frame.columns = labels
    return frame


def copied(frame: Any) -> Any:
    """Return an empty frame or series of its own, whose labels and index may be changed in place.

    cudf would copy each column, in most of the time; those of frames of here are shared in any case.
    """
    if isinstance(frame, (pd.DataFrame, pd.Series)):
        return frame.copy(deep=False)
    columns = frame._data._from_columns_like_self(frame._data.columns, verify=False)
    # Made of each label's text: a tenth of a millisecond. Users may set the name of their own.
    vars(columns)["to_pandas_index"] = frame._data.to_pandas_index.copy()
    return type(frame)._from_data(columns, frame.index.copy(deep=False))
