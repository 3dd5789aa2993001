"""Describe empty frames by values: the classes, labels, dtypes and index that Dask's metadata consist of.

Equal schemas mean indistinguishable frames. A schema is derived from others without calling the library of
its frames, and becomes a frame only where Dask asks for one. What has no schema is left to Dask: subclasses,
frames with rows, labels that are not text, attributes, frequencies, unknown dtypes.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dask_gpurt.frames.empty import assembled, copied, dtype_of, dtype_of_cudf, dtypes_of, values_at
from dask_gpurt.frames.registry import LIBRARIES

#: The attribute of an expression that holds its schema.
SCHEMA = "_gpurt_schema"
#: Dtypes other than numpy's for which equality means that they are identical.
SIMPLE_DTYPES = (
    pd.BooleanDtype, pd.Int8Dtype, pd.Int16Dtype, pd.Int32Dtype, pd.Int64Dtype, pd.UInt8Dtype, pd.UInt16Dtype,
    pd.UInt32Dtype, pd.UInt64Dtype, pd.Float32Dtype, pd.Float64Dtype, pd.ArrowDtype,
)  # fmt: skip
#: Categorical dtypes with more categories have no key.
CATEGORIES_LIMIT = 1_000
#: The frames that are kept, of which each use gets a shallow copy.
FRAMES_LIMIT = 2_048
#: The columns and indexes that are kept of those that other processes have pickled.
PARTS_LIMIT = 1_024


class Part:
    """Hold a column, or an index, of empty frames. Parts with equal keys are the same for any frame.

    ``key``: describes it completely; plain values, dtypes and classes.
    ``value``: the column's values, or the index.
    """

    __slots__ = ("_hash", "_pickled", "key", "value")

    def __init__(self, key: tuple[Any, ...], value: Any):
        self.key, self.value, self._hash = key, value, hash(key)
        self._pickled: bytes | None = None

    def __reduce__(self) -> Any:  # once: on cudf, each array is copied to the host
        if self._pickled is None:
            self._pickled = pickle.dumps((self.key, self.value), protocol=5)
        return _part_of, (self._pickled,)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Part) and self.key == other.key)


@lru_cache(PARTS_LIMIT)
def _part_of(pickled: bytes) -> Part:
    return Part(*pickle.loads(pickled))


class Axis(NamedTuple):
    """Describe the index of a frame's labels, which are text.

    ``text``: the storage of the dtype for text, and whether its nulls are ``pd.NA``; None for objects.
    ``name``: its name.
    """

    text: tuple[str, bool] | None
    name: str | None


class Schema(NamedTuple):
    """Describe an empty frame or series.

    ``frames``: the class of the library's frames.
    ``labels``: the labels of the columns; of a series its name.
    ``columns``: the columns.
    ``index``: the index.
    ``axis``: the index of the labels; None for a series. Labels with levels are a part of their own, which
    does not follow from other labels.
    """

    frames: type
    labels: tuple[Any, ...]
    columns: tuple[Part, ...]
    index: Part  # type: ignore[assignment]  # not the method of tuples
    axis: Axis | Part | None

    @property
    def dtypes(self) -> list[Any]:
        """Return the dtypes of the columns."""
        return [dtype_of(each.value) for each in self.columns]

    @property
    def is_frame(self) -> bool:
        """Return whether this is a frame, and not a series."""
        return self.axis is not None

    @property
    def has_levels(self) -> bool:
        """Return whether labels have levels, as those of several aggregates of a column."""
        return isinstance(self.axis, Part)

    @property
    def key(self) -> Hashable:
        """Return what describes the schema completely, without the parts."""
        axis = self.axis.key if isinstance(self.axis, Part) else self.axis and tuple(self.axis)
        return (self.frames, self.labels, tuple(each.key for each in self.columns), self.index.key, axis)

    def at(self, label: Any) -> Part:
        """Return the column of a label, of which there is one."""
        return self.columns[self.labels.index(label)]

    def select(self, labels: Sequence[Any]) -> Schema | None:
        """Return the schema of some columns; None if a label is not that of exactly one column."""
        if not all(self.labels.count(label) == 1 for label in labels):
            return None
        return self._replace(labels=tuple(labels), columns=tuple(map(self.at, labels)))

    def series(self, label: Any) -> Schema | None:
        """Return the schema of a column as a series; None if there is not exactly one of this label."""
        found = self.select([label])
        return None if found is None else found._replace(axis=None)

    def one(self, label: str) -> Schema:
        """Return the schema with one column alone, of integers where they are known, under another label."""
        column = _COLUMNS.get((self.columns[0].key[0], _INT64), self.columns[0])
        return self._replace(labels=(label,), columns=(column,))


#: Returns the schema of an input; None if it has none.
SchemaOf = Callable[[Any], Schema | None]


def frame_of(schema: Schema) -> Any:
    """Return an empty frame or series of its own: Dask's users may set the name of its index in place."""
    return copied(_frame_of(schema))


@lru_cache(FRAMES_LIMIT)
def _frame_of(schema: Schema) -> Any:
    axis = schema.axis or Axis(None, None)
    names = schema.labels if schema.is_frame else ("series",)
    if isinstance(axis, Part):
        labels = axis.value
    else:
        labels = pd.Index(list(names), dtype=_dtype_of_labels(axis), name=axis.name)
    values = [each.value for each in schema.columns]
    frame = assembled(schema.frames, labels, values, schema.index.value)
    if schema.is_frame:
        return frame
    series = frame["series"]
    series.name = schema.labels[0]
    return series


def reduced_frames() -> dict[type, Callable[[Any], Any]]:
    """Return how frames and series of each library are pickled: empty ones by their schemas.

    cudf copies each column to the host, and from there to the device.
    """
    libraries = (vars(sys.modules[name]) for name in LIBRARIES if name in sys.modules)
    kinds = (library.get(name) for library in libraries for name in ("DataFrame", "Series"))
    return {kind: _reduced for kind in kinds if kind is not None}


def _reduced(frame: Any) -> Any:
    schema = schema_of(frame)
    return frame.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if schema is None else (frame_of, (schema,))


def _dtype_of_labels(axis: Axis) -> Any:
    if axis.text is None:
        return object
    storage, is_na = axis.text
    return pd.StringDtype(storage, na_value=pd.NA if is_na else np.nan)


def known_schema(expr: Any) -> Schema | None:
    """Return the schema of an expression, if it follows from those of its inputs; None otherwise."""
    if "_meta" not in vars(expr):
        expr.ndim  # noqa: B018  # which describes it
    found: Schema | None = vars(expr).get(SCHEMA)
    return found


# ---- the schema of a frame ------------------------------------------------------------------------


def schema_of(frame: Any) -> Schema | None:
    """Return the schema of an empty frame or series of a known library; None if it has none."""
    kind = type(frame)
    if kind.__name__ not in ("DataFrame", "Series") or kind.__module__.partition(".")[0] not in LIBRARIES:
        return None
    if len(frame) or getattr(frame, "attrs", None) or not _allows_duplicates(frame):
        return None
    index = _index(frame.index)
    if index is None:
        return None
    if kind.__name__ == "Series":
        column = _column(frame, 0, frame.dtype)
        if column is None or not (frame.name is None or type(frame.name) is str):
            return None
        frames = vars(sys.modules[kind.__module__.partition(".")[0]])["DataFrame"]
        return Schema(frames, (frame.name,), (column,), index, None)
    of_labels = frame.columns
    axis, labels = _axis(of_labels), tuple(of_labels)
    if axis is None or not (isinstance(axis, Part) or all(type(label) is str for label in labels)):
        return None
    columns = [_column(frame, position, dtype) for position, dtype in enumerate(dtypes_of(frame))]
    if any(each is None for each in columns):
        return None
    return Schema(kind, labels, tuple(filter(None, columns)), index, axis)


def _allows_duplicates(frame: Any) -> bool:
    flags = getattr(frame, "flags", None)
    return flags is None or bool(flags.allows_duplicate_labels)


#: The key of this dtype.
_INT64 = (type(np.dtype("int64")), np.dtype("int64"))
#: By library and dtype. Not many: those of categories are kept with the frames that have them.
_COLUMNS: dict[Hashable, Part] = {}


def _column(frame: Any, position: int, dtype: Any) -> Part | None:
    if (of_dtype := _dtype_key(dtype) or _foreign_key(frame, position)) is None:
        return None
    key = (type(frame).__module__.partition(".")[0], of_dtype)
    if (found := _COLUMNS.get(key)) is None:
        found = Part(key, values_at(frame, position))
        if not hasattr(dtype, "categories"):
            _COLUMNS[key] = found
    return found


def _foreign_key(frame: Any, position: int) -> Hashable | None:
    if isinstance(frame, (pd.DataFrame, pd.Series)):
        return None
    parts = dtype_of_cudf(values_at(frame, position))
    if parts is None or not isinstance(parts[-1], pd.CategoricalDtype):
        return parts
    categories = _categories_key(parts[-1])
    return None if categories is None else (*parts[:-1], categories)


def axis_of(labels: Sequence[str], like: Axis | Part | None) -> Axis | Part | None:
    """Return what pandas makes of labels, with the name of another axis."""
    return None if like is None or isinstance(like, Part) else _axis(pd.Index(list(labels), name=like.name))


def _axis(columns: Any) -> Axis | Part | None:
    if type(columns) is pd.MultiIndex:
        return _axis_of_levels(columns)
    dtype, name = columns.dtype, columns.name
    if type(columns) is not pd.Index or not (name is None or type(name) is str):
        return None
    if type(dtype) is pd.StringDtype:
        return Axis((dtype.storage, dtype.na_value is pd.NA), name)
    return Axis(None, name) if dtype == np.dtype(object) else None


def _axis_of_levels(columns: Any) -> Part | None:
    levels, codes = [_level_key(level) for level in columns.levels], [tuple(each) for each in columns.codes]
    if None in levels or any(code < 0 for each in codes for code in each):
        return None
    return Part((pd.MultiIndex, tuple(levels), tuple(codes), columns.sortorder), columns)


def _level_key(level: pd.Index[Any]) -> Hashable | None:
    axis = _axis(level)
    if not isinstance(axis, Axis) or not all(type(label) is str for label in level):
        return None
    return (*axis, tuple(level))


# ---- keys -----------------------------------------------------------------------------------------


def _index(index: Any) -> Part | None:
    key = _index_key(index) if getattr(index, "nlevels", 1) == 1 else _levels_key(index)
    return None if key is None else Part(key, index)


def _index_key(index: Any) -> tuple[Any, ...] | None:
    kind, name = type(index), _label(index.name)
    if name is None:
        return None
    if kind.__name__ == "RangeIndex":
        return (kind, name, index.start, index.stop, index.step)
    if kind.__name__ not in ("Index", "DatetimeIndex", "TimedeltaIndex", "CategoricalIndex"):
        return None
    dtype = _dtype_key(index.dtype)
    return None if dtype is None or getattr(index, "freq", None) is not None else (kind, name, dtype)


def _levels_key(index: Any) -> tuple[Any, ...] | None:
    frame = index.to_frame(index=False, name=list(range(index.nlevels)))
    names, dtypes = tuple(map(_label, index.names)), tuple(map(_dtype_key, frame.dtypes))
    return None if None in (*names, *dtypes) else (type(index), names, dtypes)


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
    if (
        categories is None
        or len(categories) > CATEGORIES_LIMIT
        or type(categories) not in (pd.Index, pd.RangeIndex)
    ):
        return None
    names, of_categories = tuple(map(_label, categories)), _dtype_key(categories.dtype)
    if None in names or of_categories is None:
        return None
    return (
        pd.CategoricalDtype,
        type(categories),
        names,
        of_categories,
        _label(categories.name),
        dtype.ordered,
    )


def renamed_index(index: Part, names: dict[Any, Any]) -> Part | None:
    """Return an index with other names of its levels, by the old ones."""
    return _named(index, tuple(names.get(name, name) for name in index.value.names))


@lru_cache(PARTS_LIMIT)  # on cudf, names are set and dtypes read by calls that take a millisecond
def _named(index: Part, names: tuple[Any, ...]) -> Part | None:
    return _index(index.value.set_names(list(names)))
