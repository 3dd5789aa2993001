"""Compute functions that are written for single values, or rows, of pandas on whole columns.

``frame.apply(function, axis=1)`` and ``series.map(function)`` call a function of Python for each row. Here it
is called with all rows at once, in place of a value something that stands for a column and computes as each
of its values would. Where it asks whether a condition is true, and that differs from row to row, the rows are
divided, and it is called again for either part: so each branch is computed for its rows only. If values
are few, it is called once for each distinct one instead. What cannot be computed so is computed as before.

The values are those of Python. So operations that could have another result on columns are not known: powers,
functions of libm, sums of integers that float64 does not hold, divisions by zero, which are errors, and
whatever else is not named here. A few rows of each part are computed by pandas as well, which tells the dtype
of the result; if one differs, all are. The function has to be :func:`.pure_functions.pure`, as it is called
another number of times.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_list_like

from dask_gpurt.frames.pure_functions import names_used, pure

logger = logging.getLogger(__name__)

#: Partitions of fewer rows are computed as before. The most times that rows are divided, and the share of
#: distinct values, and the number of rows that are looked at first.
FEWEST, MOST_PARTS, FEW, FIRST = 300, 32, 0.2, 2_000
#: The largest integer up to which float64 has all.
_EXACT = 2**53
_PARTS_OF_TIMES = ("year", "month", "day", "hour", "minute", "second", "dayofweek", "dayofyear", "quarter")
_METHODS_OF_STRINGS = (
    *("capitalize", "count", "endswith", "find", "isalpha", "isdigit", "lower", "lstrip", "removeprefix"),
    *("removesuffix", "replace", "rstrip", "startswith", "strip", "title", "upper", "zfill"),
)


class _Unknown(Exception):
    """Something is not known to have the same result on columns."""


class _Differs(BaseException):
    """Say for which rows a condition is true. Not an exception that a function could expect."""

    def __init__(self, is_true: Any):
        self.is_true = is_true


def can_compute(function: Any, dimensions: int) -> bool:
    """Return whether a function may be computed on columns, for distinct values, or on plain rows.

    ``dimensions``: 2 for functions of rows, 1 for those of values.
    """
    if pure(function, _INSTEAD) is not None:
        return True
    return columns_taken(function) is not None if dimensions == 2 else pure(function) is not None


def columns_taken(function: Any) -> frozenset[str] | None:
    """Return the columns that a function takes from a row; None if it does more with it, or nothing."""
    names = names_used(function)
    return names if names and not any(hasattr(dict, name) for name in names) else None


def on_columns(
    rows: Any, function: Any, method: str = "map", *, is_mixed: bool | None = None, meta: Any = None
) -> Any:
    """Return what a method of a series with a function, or ``apply`` of a frame by rows, returns.

    ``is_mixed``: whether rows have had a column of times or strings besides those that are left; None if all
    columns are left. ``meta``: what is returned then for no rows, of which pandas returns all columns.
    """
    if is_mixed and not len(rows) and meta is not None:
        return meta
    whole = _by_rows(function, is_mixed) if rows.ndim == 2 else operator.methodcaller(method, function)
    if len(rows) < FEWEST or isinstance(rows.index, pd.MultiIndex):
        return whole(rows)
    for compute in (_of_distinct, partial(_computed, whole=whole, is_mixed=is_mixed)):
        try:
            if (found := compute(rows, function)) is not None:
                return found
        except Exception as error:  # pandas raises it if it is the program's
            logger.debug("%s is computed for each row: %r", function, error)
    return _of_light_rows(rows, function, is_mixed) if _takes_columns(rows, function) else whole(rows)


def _by_rows(function: Any, is_mixed: bool | None) -> Callable[[Any], Any]:
    """Return what applies a function to the rows of a frame, as if it had all columns."""
    return lambda frame: _with_all_kinds(frame, is_mixed).apply(function, axis=1)


def _with_all_kinds(frame: Any, is_mixed: bool | None) -> Any:
    """Return a frame with a string for the columns that were left out, with which rows are of objects."""
    return frame.assign(**{_LEFT_OUT: pd.array([""] * len(frame), dtype="str")}) if is_mixed else frame


_LEFT_OUT = "columns left out"


class _LightRow(dict[str, Any]):
    """Hold the values of a row. Pandas makes a series, which takes as long as ten of these."""

    __slots__ = ()
    __getattr__ = dict.__getitem__


def _takes_columns(rows: Any, function: Any) -> bool:
    """Return whether a function takes nothing but values of columns from each row."""
    if rows.ndim == 1 or rows.empty or (names := columns_taken(function)) is None:
        return False
    return names <= {*rows.columns} and not isinstance(rows.iloc[0].dtype, pd.api.extensions.ExtensionDtype)


def _of_light_rows(rows: Any, function: Any, is_mixed: bool | None) -> Any:
    """Return what ``apply`` returns: the function is called with each row once, in their order."""
    names = [*(columns_taken(function) or ())]
    dtype = _with_all_kinds(rows.iloc[:1], is_mixed).values.dtype
    columns = [rows[name].astype(dtype).array for name in names]
    found = [function(_LightRow(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
    if not is_list_like(found[0]):
        return pd.Series(dict(enumerate(found))).set_axis(rows.index)
    each = iter(found)
    return rows.apply(lambda row: next(each), axis=1)


def _computed(rows: Any, function: Any, whole: Callable[[Any], Any], is_mixed: bool | None) -> Any | None:
    """Return the result, computed on columns; None if a function is not known to do nothing else."""
    if (known := pure(function, _INSTEAD)) is None:
        return None
    stand_in = _stand_in(rows, is_mixed)
    parts: list[tuple[Any, Any]] = []
    left = [np.arange(len(rows))]
    while left:
        at = left.pop()
        try:
            parts.append((at, known(stand_in(at))))
        except _Differs as found:
            left += [at[found.is_true], at[~found.is_true]]
        if len(parts) + len(left) > MOST_PARTS:
            return None
    return _put_together(rows, parts, whole)


def _put_together(rows: Any, parts: list[tuple[Any, Any]], whole: Callable[[Any], Any]) -> Any | None:
    if not all(isinstance(value, _Column) or type(value) in _RESULTS for _, value in parts):
        return None  # what is in a tuple may be columns
    samples = np.concatenate([at[[0, len(at) // 2, -1]] for at, _ in parts])
    expected = whole(rows.iloc[samples])
    if expected.ndim != 1:
        return None
    if not any(isinstance(value, _Column) for _, value in parts):
        numbers = np.empty(len(rows), dtype=np.intp)
        for number, (at, _) in enumerate(parts):
            numbers[at] = 3 * number
        values = expected.array.take(numbers)
    elif expected.dtype in (np.float64, np.int64, np.bool_):
        values = np.empty(len(rows), dtype=expected.dtype)
        for at, value in parts:
            values[at] = _numbers(value, expected.dtype)
    elif expected.dtype == "str":
        texts = np.empty(len(rows), dtype=object)
        for at, value in parts:
            texts[at] = _texts(value)
        values = pd.array(texts, dtype=expected.dtype)
    else:
        return None
    found = pd.Series(values, index=rows.index, name=expected.name, copy=False)
    return found if found.iloc[samples].equals(expected) else None


_RESULTS = (bool, int, float, str, type(None))


def _numbers(value: Any, dtype: Any) -> Any:
    kind = value.kind if isinstance(value, _Column) else {int: "i", float: "f", bool: "b"}.get(type(value))
    if kind != dtype.kind and (kind, dtype.kind) != ("i", "f"):
        if value is not None or dtype.kind != "f":
            raise _Unknown
        return np.nan
    return value.array if isinstance(value, _Column) else value


def _texts(value: Any) -> Any:
    if not isinstance(value, _Column):
        return value
    if value.kind != "s":
        raise _Unknown
    return value.array.to_numpy(object)


def _of_distinct(rows: Any, function: Any) -> Any | None:
    """Return the result, computed for each distinct value, if these are few.

    Not of floats: zero has two signs.
    """
    if rows.ndim != 1 or (known := pure(function)) is None or _kind(rows.dtype) not in ("i", "b", "s", "M"):
        return None
    if rows.iloc[:FIRST].nunique() > FEW * min(len(rows), FIRST):
        return None
    numbers, distinct = pd.factorize(rows.array, use_na_sentinel=False)
    if len(distinct) > FEW * len(rows):
        return None
    found = pd.Series(distinct).map(known)
    if found.dtype == object and not all(isinstance(each, (str, int, float)) for each in found):
        return None  # it may be changed later, for one row
    return pd.Series(found.array.take(numbers), index=rows.index, name=rows.name, copy=False)


# ---- what stands for a value, and for a row ---------------------------------------------------------


def _kind(dtype: Any) -> str:
    """Return what values pandas passes to a function: i, f, b, M(oment), m, s(tring); "" for others."""
    if isinstance(dtype, np.dtype):
        return {"i8": "i", "f8": "f", "b1": "b"}.get(dtype.str[1:], dtype.kind if dtype.kind in "mM" else "")
    return "s" if isinstance(dtype, pd.StringDtype) else ""


def _array(column: Any) -> Any:
    return column.to_numpy() if _kind(column.dtype) in ("i", "f", "b") else column.array


def _with_integers(column: Any) -> Any:
    """Return a column whose short integers are long: as values of Python they are all alike."""
    is_short = isinstance(column.dtype, np.dtype) and column.dtype.kind in "iu" and column.dtype.itemsize < 8
    return column.astype(np.int64) if is_short else column


def _stand_in(rows: Any, is_mixed: bool | None) -> Callable[[Any], Any]:
    """Return a function that returns what stands for a value, or a row, at some positions."""
    if rows.ndim == 1:
        array = _array(_with_integers(rows))
        return lambda positions: _Column(array.take(positions))
    if not rows.columns.is_unique:
        raise _Unknown
    columns = {name: rows[name] for name in rows.columns}
    if not columns.keys().isdisjoint(_Row.__slots__):
        raise _Unknown
    dtypes = [column.dtype for column in columns.values()]
    if not is_mixed and all(isinstance(each, np.dtype) and each.kind in "iuf" for each in dtypes):
        common = np.result_type(*dtypes)  # pandas makes one array of all
        if _kind(common) not in ("i", "f"):
            raise _Unknown
        arrays = {name: column.to_numpy().astype(common) for name, column in columns.items()}
    else:
        arrays = {name: _array(_with_integers(column)) for name, column in columns.items()}
    return lambda positions: _Row(arrays, positions)


class _StandIn:
    """Refuse what every object of Python can do, or else it would be done with the stand-in itself."""

    __slots__ = ()

    def _refuse(self, *args: Any) -> Any:
        raise _Unknown

    # Without iteration, Python would take items until there is an IndexError, of any row.
    __bool__ = __iter__ = __repr__ = __str__ = __format__ = __eq__ = __ne__ = __hash__ = _refuse


class _Row(_StandIn):
    """Stand for a row of a frame."""

    __slots__ = ("_at", "_columns")

    def __init__(self, columns: Mapping[Any, Any], at: Any):
        self._columns, self._at = columns, at

    def __getitem__(self, name: Any) -> _Column:
        if not isinstance(name, str):
            raise _Unknown
        return _Column(self._columns[name].take(self._at))

    def __getattr__(self, name: str) -> _Column:
        if hasattr(pd.Series, name):
            raise _Unknown
        return self[name]


class _Column(_StandIn):
    """Stand for a value: the values of a column, on which operations are those of each value."""

    __slots__ = ("array", "kind")
    #: Scalars of numpy leave operations to the column.
    __array_ufunc__ = None

    def __init__(self, array: Any):
        self.array, self.kind = array, _kind(array.dtype)
        if not self.kind or (self.kind == "i" and _largest(array) > _EXACT):
            raise _Unknown

    def __bool__(self) -> bool:
        if self.kind not in ("i", "f", "b"):
            raise _Unknown
        is_true = self.array != 0
        if is_true.all():
            return True
        if not is_true.any():
            return False
        raise _Differs(is_true)

    def __getattr__(self, name: str) -> Any:
        if self.kind in ("m", "M") and self.array.isna().any():
            raise _Unknown
        if self.kind == "M" and name in _PARTS_OF_TIMES:
            return _Column(np.asarray(getattr(self.array, name), dtype=np.int64))
        if self.kind == "M" and name == "weekday":
            return lambda: self.dayofweek
        if self.kind == "m" and name in ("days", "seconds"):
            return _Column(np.asarray(getattr(self.array, name), dtype=np.int64))
        if self.kind == "m" and name == "total_seconds":
            return lambda: _Column(self.array.total_seconds())
        if self.kind == "s" and name in _METHODS_OF_STRINGS:
            return lambda *args: self._of_strings(operator.methodcaller(name, *args))
        raise _Unknown

    def __getitem__(self, at: Any) -> _Column:
        return self._of_strings(operator.itemgetter(at))

    def __contains__(self, text: str) -> bool:
        return bool(self._of_strings(lambda value: text in value))

    def _of_strings(self, function: Callable[[str], Any]) -> _Column:
        if self.kind != "s":
            raise _Unknown
        numbers, distinct = pd.factorize(self.array)  # of null there are no methods
        if len(numbers) and (numbers.min() < 0 or len(distinct) > max(FEWEST, FEW * len(numbers))):
            raise _Unknown  # a chain of conditions asks again for each part
        found = pd.Series([function(value) for value in distinct])
        return _Column(_array(found).take(numbers))

    def __neg__(self) -> _Column:
        return _Column(-_number(self))

    def __pos__(self) -> _Column:
        return _Column(+_number(self))

    def __abs__(self) -> _Column:
        return _Column(abs(_number(self)))


def _largest(array: Any) -> int:
    return max(int(array.max()), -int(array.min())) if array.size else 0


def _number(value: Any) -> Any:
    """Return a number, or an array of such. Booleans of pandas and numpy are added in ways of their own."""
    if isinstance(value, _Column) and value.kind in ("i", "f"):
        return value.array
    if type(value) is float or (type(value) is int and abs(value) <= _EXACT):
        return value
    raise _Unknown


def _arithmetic(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], _Column]:
    def is_in_reach(one: Any, other: Any) -> bool:
        if np.result_type(one, other).kind != "i":
            return True
        return _largest(np.asarray(one)) * _largest(np.asarray(other)) <= _EXACT

    def computed(one: Any, other: Any) -> _Column:
        if operate is operator.sub and getattr(one, "kind", "") == getattr(other, "kind", "") == "M":
            return _Column(one.array - other.array)
        one, other = _number(one), _number(other)
        if operate in _DIVISIONS and not np.all(other):
            raise _Unknown
        if operate in _WITH_REST and not (np.all(np.isfinite(one)) and np.all(np.isfinite(other))):
            raise _Unknown
        if operate is operator.mul and not is_in_reach(one, other):
            raise _Unknown
        with np.errstate(all="ignore"):
            return _Column(operate(one, other))

    return computed


_WITH_REST = (operator.floordiv, operator.mod)
_DIVISIONS = (operator.truediv, *_WITH_REST)


def _comparison(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], _Column]:
    def computed(one: _Column, other: Any) -> _Column:
        is_equality = operate in (operator.eq, operator.ne)
        kind = other.kind if isinstance(other, _Column) else _KINDS.get(type(other), "")
        if one.kind in ("i", "f") and kind in ("i", "f"):
            return _Column(operate(one.array, _number(other)))
        if one.kind != kind or (not is_equality and kind not in ("m", "M")):
            raise _Unknown
        found = operate(one.array, other.array if isinstance(other, _Column) else other)
        return _Column(np.asarray(found, dtype=bool))

    return computed


_KINDS: dict[type, str] = {
    **{int: "i", float: "f", bool: "b", str: "s"},
    **{pd.Timestamp: "M", pd.Timedelta: "m"},
}


def _logic(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], _Column]:
    def computed(one: _Column, other: Any) -> _Column:
        if one.kind != "b" or (other.kind if isinstance(other, _Column) else _KINDS.get(type(other))) != "b":
            raise _Unknown
        return _Column(operate(one.array, other.array if isinstance(other, _Column) else other))

    return computed


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    _computes = _arithmetic(getattr(operator, _name))
    setattr(_Column, f"__{_name}__", _computes)
    setattr(_Column, f"__r{_name}__", lambda one, other, computes=_computes: computes(other, one))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Column, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("and_", "or_", "xor"):
    setattr(_Column, f"__{_name.strip('_')}__", _logic(getattr(operator, _name)))


# ---- functions of Python and of libraries ---------------------------------------------------------


def _is_null(value: Any) -> Any:
    if isinstance(value, _Column):
        return _Column(np.asarray(pd.isna(value.array)))
    if type(value) not in _RESULTS:
        raise _Unknown  # columns in a list, or a row
    return pd.isna(value)


def _is_not_null(value: Any) -> Any:
    found = _is_null(value)
    return _Column(~found.array) if isinstance(found, _Column) else not found


def _is_nan(value: Any) -> Any:
    return _Column(np.isnan(_number(value)))


def _as_integer(value: Any) -> Any:
    """Return the integer part; of null and infinity Python has none."""
    if not isinstance(value, _Column):
        return int(value)
    if value.kind != "b" and not (np.abs(_number(value)) <= _EXACT).all():
        raise _Unknown
    return _Column(np.asarray(value.array).astype(np.int64))


def _as_float(value: Any) -> Any:
    return _Column(_number(value).astype(np.float64)) if isinstance(value, _Column) else float(value)


def _length(value: Any) -> Any:
    return value._of_strings(len) if isinstance(value, _Column) else len(value)


_PANDAS = SimpleNamespace(isna=_is_null, isnull=_is_null, notna=_is_not_null, notnull=_is_not_null)
#: What functions of Python, and libraries, are replaced by.
_INSTEAD: Mapping[str, Any] = {
    **{"abs": abs, "bool": bool, "max": max, "min": min},
    **{"float": _as_float, "int": _as_integer, "len": _length},
    "math": SimpleNamespace(isnan=_is_nan, nan=np.nan, pi=np.pi, inf=np.inf),
    "numpy": SimpleNamespace(isnan=_is_nan, nan=np.nan, pi=np.pi, inf=np.inf, abs=abs),
    "pandas": _PANDAS,
}
