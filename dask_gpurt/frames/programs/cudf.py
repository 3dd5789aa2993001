"""Operate on columns of cudf: by pylibcudf where dtypes are plain, else by cudf's columns and series.

What cudf's frames do around a column is left out: labels, alignment, copies, and an index for each result.
Everything runs on the default stream, as cudf does.

Decisions and their figures: ``docs/decisions/programs.md``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import cudf
import numpy as np
import pandas as pd
import pyarrow as pa
import pylibcudf as plc
from cudf import testing
from cudf.core.column import ColumnBase, as_column
from cudf.core.column.column import column_empty
from cudf.core.column_accessor import ColumnAccessor
from cudf.utils.dtypes import cudf_dtype_from_pa_type, dtype_to_pylibcudf_type, find_common_type
from pandas.api.types import is_scalar

from dask_gpurt.frames.programs.values import Domain, Refused, Rows, Values

_BINARY = plc.binaryop.BinaryOperator
_COMPARISONS = {
    "lt": _BINARY.LESS,
    "le": _BINARY.LESS_EQUAL,
    "gt": _BINARY.GREATER,
    "ge": _BINARY.GREATER_EQUAL,
    "eq": _BINARY.EQUAL,
    "ne": _BINARY.NOT_EQUAL,
}
_ARITHMETIC = {"add": _BINARY.ADD, "sub": _BINARY.SUB, "mul": _BINARY.MUL}
_LOGIC = {"and_": _BINARY.BITWISE_AND, "or_": _BINARY.BITWISE_OR}
_NULLIFY, _DONT_CHECK = plc.copying.OutOfBoundsPolicy.NULLIFY, plc.copying.OutOfBoundsPolicy.DONT_CHECK
_BOOL = np.dtype(bool)
_INT64, _FLOAT64 = np.dtype("int64"), np.dtype("float64")
#: The options with which cudf has other rules, or buffers that move.
_OTHER_RULES = ("mode.pandas_compatible", "spill")
#: The indexes of which the rows that a mask keeps are an index of the same class, or numbers.
_INDEXES = (cudf.RangeIndex, cudf.Index, cudf.DatetimeIndex)
_AGGREGATIONS = {
    "sum": plc.aggregation.sum,
    "min": plc.aggregation.min,
    "max": plc.aggregation.max,
    "count": lambda: plc.aggregation.count(plc.types.NullPolicy.EXCLUDE),
}


class Column:
    """Hold a column of pylibcudf and its dtype in cudf, and cudf's column once it is needed."""

    __slots__ = ("_made", "dtype", "plc")

    def __init__(self, column: plc.Column, dtype: Any, made: ColumnBase | None = None):
        self.plc, self.dtype, self._made = column, dtype, made

    @classmethod
    def of(cls, made: ColumnBase) -> Column:
        """Return a column of cudf."""
        return cls(made.plc_column, made.dtype, made)

    @property
    def made(self) -> ColumnBase:
        """Return the column as cudf's. Nobody else may have it: what changes one in place changes all."""
        if self._made is None:
            self._made = ColumnBase.create(self.plc, self.dtype)
            self.plc = self._made.plc_column
        return self._made

    def copy(self) -> ColumnBase:
        """Return a column for a frame: it shares memory, of which cudf makes a copy on the first write."""
        return ColumnBase.create(self.made.plc_column, self.dtype)

    @property
    def kind(self) -> str:
        """Return the kind of the dtype; that of dtypes which are not numpy's is ``-``."""
        return self.dtype.kind if isinstance(self.dtype, np.dtype) else "-"

    @property
    def is_known(self) -> bool:
        """Return whether cudf computes with the dtype as with those of numpy: not decimals or categories."""
        return self.kind in "biufmM" or _is_text(self.dtype)


class CudfColumns:
    """Operate on columns of cudf; see :class:`~dask_gpurt.frames.programs.values.Engine`."""

    def opened(self, value: Any) -> Rows | Values | None:
        if type(value) not in (cudf.DataFrame, cudf.Series) or any(map(cudf.get_option, _OTHER_RULES)):
            return None
        if type(value) is cudf.DataFrame:
            data = value._data
            if not data or data.multiindex or data.rangeindex or _is_odd(value, data.level_names):
                return None
            if not all(type(label) is str for label in data) or not _is_plain(data.label_dtype):
                return None
            columns = {label: Column.of(column) for label, column in data.items()}
            return Rows(columns, Domain(len(value), value.index), value)
        if not _is_odd(value, (None,)):
            return Values(value.name, Column.of(value._column), Domain(len(value), value.index), value)
        return None

    def closed(self, value: Rows | Values) -> Any:
        index = _index(value.domain)
        if isinstance(value, Values):
            return cudf.Series._from_column(value.column.copy(), name=value.name, index=index)
        columns = {label: column.copy() for label, column in value.columns.items()}
        return cudf.DataFrame._from_data(ColumnAccessor(columns, verify=False), index=index)

    def difference(self, found: Any, expected: Any, *, in_order: bool) -> str | None:
        if not in_order and len(expected) and found.ndim == expected.ndim:
            found, expected = map(_sorted, (found, expected))
        same = testing.assert_frame_equal if expected.ndim == 2 else testing.assert_series_equal
        try:
            same(found, expected, check_exact=False, rtol=1e-9, atol=0.0)
        except AssertionError as error:
            return str(error)
        return None

    def is_same(self, left: Domain, right: Domain) -> bool:
        if left is right:
            return True
        if left.index is None or right.index is None:
            return False
        both_numbered = all(type(each.index) is cudf.RangeIndex for each in (left, right))
        return left.index is right.index or (both_numbered and left.index.equals(right.index))

    def range(self, length: int) -> Domain:
        return Domain(length, cudf.RangeIndex(length))

    def keyed(self, keys: Sequence[Column], names: Sequence[Any], length: int) -> Domain:
        columns = [key.copy() for key in keys]
        if len(columns) == 1:
            return Domain(length, cudf.Index._from_column(columns[0], name=names[0]))
        index = cudf.MultiIndex._from_data(dict(enumerate(columns)))
        index.names = list(names)
        return Domain(length, index)

    def levels(self, domain: Domain) -> dict[str, Column]:
        index = domain.index
        if type(index) not in (cudf.Index, cudf.DatetimeIndex, cudf.MultiIndex):
            raise Refused("index")
        names = list(index.names)
        if not all(type(name) is str for name in names) or len(set(names)) < len(names):
            raise Refused("names")
        return {name: Column.of(column) for name, column in zip(names, index._columns, strict=True)}

    def mean(self, total: Column, count: Column) -> Column:
        # cudf then looks for infinite quotients whose sign is wrong, which those by a count do not have.
        if total.kind not in "if" or count.dtype != _INT64:
            raise Refused("mean")
        if total.kind == "i":
            total = Column.of(total.made.astype(_FLOAT64))
        dtype = find_common_type((total.dtype, count.dtype))
        kind = dtype_to_pylibcudf_type(dtype)
        return Column(plc.binaryop.binary_operation(total.plc, count.plc, _BINARY.TRUE_DIV, kind), dtype)

    def is_boolean(self, column: Column) -> bool:
        return bool(column.dtype == _BOOL)

    def can_filter(self, domain: Domain) -> bool:
        return type(_root(domain).index) in _INDEXES

    def is_named(self, domain: Domain) -> bool:
        return any(name is not None for name in _root(domain).index.names)

    def kept(self, columns: Sequence[Column], mask: Column) -> tuple[list[Column], int]:
        table = plc.stream_compaction.apply_retention_mask(plc.Table([c.plc for c in columns]), mask.plc)
        kept = [Column(new, old.dtype) for new, old in zip(table.columns(), columns, strict=True)]
        return kept, table.num_rows()

    def binary(self, name: str, left: Any, right: Any) -> Column:
        found = _plain_binary(name, left, right)
        if found is not None:
            return found
        for each in (left, right):
            is_known = each.is_known if isinstance(each, Column) else is_scalar(each)
            if not is_known or (each is left and isinstance(each, np.generic)):  # numpy would compute it
                raise Refused(name)
        operands = [each.made if isinstance(each, Column) else each for each in (left, right)]
        result = getattr(operator, name)(*operands)
        if not isinstance(result, ColumnBase):
            raise Refused(name)
        return Column.of(result)

    def inverted(self, column: Column) -> Column:
        if column.kind not in "biu":
            raise Refused("~")
        return Column.of(~column.made)

    def constant(self, value: Any, length: int) -> Column:
        return Column.of(as_column(value, length=length))

    def by_rows(self, call: Callable[..., Any], values: Sequence[Values]) -> tuple[Any, Column]:
        index = cudf.RangeIndex(values[0].domain.length)
        series = [cudf.Series._from_column(v.column.made, name=v.name, index=index) for v in values]
        result = call(*series)
        if type(result) is not cudf.Series or not index.equals(result.index):
            raise Refused("other rows")
        if type(result.index) is not cudf.RangeIndex or _is_odd(result, (None,)):
            raise Refused("other rows")
        return result.name, Column.of(result._column)

    def joined(
        self, how: str, keys: tuple[list[Column], list[Column]], columns: tuple[list[Column], list[Column]]
    ) -> tuple[list[Column], int]:
        if any(left.dtype != right.dtype for left, right in zip(*keys, strict=True)):
            raise Refused("keys")  # cudf casts them
        if any(isinstance(each.dtype, cudf.CategoricalDtype) for side in (*keys, *columns) for each in side):
            raise Refused("categories")
        tables = [plc.Table([each.plc for each in side]) for side in keys]
        equal = plc.types.NullEquality.EQUAL
        if how == "leftsemi":
            maps = [plc.join.left_semi_join(*tables, equal)]
        elif how == "left":
            maps = list(plc.join.left_join(*tables, equal))
        else:
            maps = list(plc.join.inner_join(*tables, equal))
        length = maps[0].size()
        if not length:
            raise Refused("no rows")
        found = _gathered(columns[0], maps[0], _DONT_CHECK)
        if columns[1]:
            found += _gathered(columns[1], maps[1], _NULLIFY if how == "left" else _DONT_CHECK)
        if how == "left" and any(_is_narrow(each) for each in columns[1]) and _has_unmatched(maps[1]):
            start = len(columns[0])
            found[start:] = [_widened(each) for each in found[start:]]
        return found, length

    def grouped(
        self,
        keys: Sequence[Column],
        requests: Mapping[Any, tuple[Column, Collection[str]]],
        *,
        dropna: bool,
    ) -> tuple[list[Column], dict[tuple[Any, str], Column], int]:
        if not all(each.is_known and each.kind != "f" for each in keys):
            raise Refused("keys")  # in floats, cudf takes NaN for null
        if not dropna and any(each.plc.null_count() == each.plc.size() for each in keys):
            raise Refused("keys")  # of text they become floats
        for column, wanted in requests.values():
            if column.kind not in "iuf" and not (column.is_known and set(wanted) <= {"count"}):
                raise Refused("aggregations")
        policy = plc.types.NullPolicy.EXCLUDE if dropna else plc.types.NullPolicy.INCLUDE
        groupby = plc.groupby.GroupBy(plc.Table([each.plc for each in keys]), policy)
        once = _Requests(requests)
        found, tables = groupby.aggregate(
            [
                plc.groupby.GroupByRequest(column.plc, [_AGGREGATIONS[each]() for each in wanted])
                for column, wanted in once.wanted.values()
            ]
        )
        if not found.num_rows():
            raise Refused("no groups")  # cudf keeps the dtypes of the input
        named = [Column(new, old.dtype) for new, old in zip(found.columns(), keys, strict=True)]
        return named, once.results([table.columns() for table in tables]), found.num_rows()


class _Requests:
    """Ask for each aggregation once: programs name columns twice, and count several without nulls.

    ``wanted``: columns and their aggregations, by the identity of the column.
    """

    def __init__(self, requests: Mapping[Any, tuple[Column, Collection[str]]]) -> None:
        self.wanted: dict[int, tuple[Column, list[str]]] = {}
        self._places: dict[tuple[Any, str], tuple[int, str]] = {}
        counted: int | None = None
        for label, (column, aggregations) in requests.items():
            for aggregation in aggregations:
                at = id(column.plc)
                if aggregation == "count" and not column.plc.null_count():
                    at = counted = at if counted is None else counted
                asked = self.wanted.setdefault(at, (column, []))[1]
                if aggregation not in asked:
                    asked.append(aggregation)
                self._places[label, aggregation] = at, aggregation

    def results(self, found: Sequence[Sequence[plc.Column]]) -> dict[tuple[Any, str], Column]:
        """Return the results of the requests by label and aggregation."""
        made = {
            (at, aggregation): _aggregated(aggregation, result)
            for (at, (_, asked)), results in zip(self.wanted.items(), found, strict=True)
            for aggregation, result in zip(asked, results, strict=True)
        }
        return {named: made[place] for named, place in self._places.items()}


def _sorted(value: Any) -> Any:
    if value.ndim == 1:
        value = value.to_frame("value" if value.name is None else value.name)
    if type(value.index) is not cudf.RangeIndex:
        value = value.reset_index()
    return value.sort_values(list(value.columns), ignore_index=True)


def _gathered(columns: list[Column], rows: plc.Column, policy: Any) -> list[Column]:
    table = plc.copying.gather(plc.Table([each.plc for each in columns]), rows, policy)
    return [Column(new, old.dtype) for new, old in zip(table.columns(), columns, strict=True)]


def _has_unmatched(rows: plc.Column) -> bool:
    """Return whether a left join has a row without a match, of which the number is negative."""
    least = plc.reduce.reduce(rows, plc.aggregation.min(), rows.type())
    return bool(least.to_py() < 0)


def _is_narrow(column: Column) -> bool:
    return column.kind in "iu"


def _widened(column: Column) -> Column:
    """Return integers with nulls as floats, which pandas makes of them where a join adds nulls."""
    if not _is_narrow(column) or not column.plc.null_count():
        return column
    return Column.of(column.made.astype(_FLOAT64))


def _is_odd(value: Any, level_names: Sequence[Any]) -> bool:
    """Return whether a frame has what its columns and its index do not tell."""
    return bool(value.attrs) or not value.flags.allows_duplicate_labels or tuple(level_names) != (None,)


def _is_plain(label_dtype: Any) -> bool:
    """Return whether labels have the dtype that pandas gives to strings."""
    return label_dtype is None or (isinstance(label_dtype, pd.StringDtype) and str(label_dtype) == "str")


def _is_text(dtype: Any) -> bool:
    return isinstance(dtype, pd.StringDtype) or (isinstance(dtype, np.dtype) and dtype.kind == "O")


def _root(domain: Domain) -> Domain:
    while domain.index is None:
        assert domain.parent is not None
        domain = domain.parent
    return domain


def _index(domain: Domain) -> Any:
    """Return the index of a domain, as cudf makes it where it filters a frame."""
    if domain.index is None:
        assert domain.parent is not None
        parent = _index(domain.parent)
        bare = cudf.DataFrame._from_data({}, index=parent)
        table = plc.stream_compaction.apply_retention_mask(
            plc.Table([each.plc_column for each in parent._columns]), domain.mask.plc
        )
        kept = [
            ColumnBase.create(new, old.dtype)
            for new, old in zip(table.columns(), parent._columns, strict=True)
        ]
        domain.index = bare._from_columns_like_self(kept, [], list(parent.names)).index
        domain.parent = domain.mask = None
    return domain.index


def _aggregated(aggregation: str, result: plc.Column) -> Column:
    if aggregation == "count":
        return Column(plc.unary.cast(result, dtype_to_pylibcudf_type(_INT64)), _INT64)
    made = ColumnBase.from_pylibcudf(result)
    return Column.of(made)


# ---- binary operations on plain dtypes -------------------------------------------------------------


def _plain_binary(name: str, left: Any, right: Any) -> Column | None:
    """Return a binary operation by pylibcudf alone; None if cudf has rules of its own for the operands."""
    column = left if isinstance(left, Column) else right
    other = right if column is left else left
    if any(each.kind == "M" and each.plc.null_count() for each in (left, right) if isinstance(each, Column)):
        return None  # compared times have no nulls in cudf: they are false, or true for ``!=``
    if isinstance(other, Column):
        dtypes, operands = (left.dtype, right.dtype), (left.plc, right.plc)
        kinds = left.kind + right.kind
    else:
        if type(other) not in (int, float, pd.Timestamp) or other != other:
            return None
        if column.kind not in ("M" if type(other) is pd.Timestamp else "if"):
            return None
        if type(other) is int and column.kind == "i" and not _fits(other, column.dtype):
            return None
        scalar, dtype = _scalar(column.dtype, repr(other), other)
        dtypes, operands = (
            (column.dtype, dtype),
            (left.plc, scalar) if column is left else (scalar, right.plc),
        )
        kinds = 2 * column.kind
    found = _rule(name, kinds, *dtypes)
    if found is None:
        return None
    operation, dtype = found
    return Column(plc.binaryop.binary_operation(*operands, operation, dtype_to_pylibcudf_type(dtype)), dtype)


def _rule(name: str, kinds: str, left: Any, right: Any) -> tuple[Any, Any] | None:
    """Return the operation and the dtype of its result."""
    are_numbers = set(kinds) <= {"i", "f"}
    if name in _COMPARISONS:
        if are_numbers or kinds == "MM":
            return _COMPARISONS[name], _BOOL
    elif name in _ARITHMETIC and are_numbers:
        return _ARITHMETIC[name], find_common_type((left, right))
    elif name in _LOGIC and kinds == "bb":
        return _LOGIC[name], _BOOL
    return None


def _fits(value: int, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return limits.min <= value <= limits.max


@lru_cache(maxsize=1024)
def _scalar(dtype: np.dtype[Any], written: str, value: Any) -> tuple[plc.Scalar, Any]:
    """Return a scalar as cudf takes it beside a column, on the device, and its dtype.

    `written` tells values apart that are equal, such as 1 and 1.0, or 0.0 and -0.0.
    """
    scalar = column_empty(0, dtype)._normalize_binop_operand(value)
    if not isinstance(scalar, pa.Scalar):
        raise Refused("scalar")
    return plc.Scalar.from_arrow(scalar), cudf_dtype_from_pa_type(scalar.type)
