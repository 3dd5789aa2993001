"""List the operations of dask.dataframe on single rows, and what is guaranteed of each.

A plan may be changed into one that divides rows into other partitions only if its result stays the same. For
an operation on rows this takes two guarantees:

- *row by row*: the values of a row of the result follow from the values of that row of the inputs alone;
- *fixed dtypes*: the dtypes of a partition of the result follow from the dtypes of its inputs, and not from
  their values. Otherwise they *vary* from partition to partition, and later operations may have other values:
  ``where`` makes floats of integers where a row does not match, of which some large ones are not exact, and
  ``~`` of booleans with nulls, which are objects, is not their negation.

An operation that is not in this catalogue guarantees nothing, such as ``to_datetime``, which infers a format
from all values of a partition, or ``eval``, which calls functions of users. Categories are those of a
partition, so nothing is guaranteed of categorical data (:func:`has_categories`).

``tests/unit/client/planning/test_operations.py`` checks the guarantees of each entry on rows that are
divided at random.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from dask._expr import Expr
from dask.dataframe.dask_expr import _accessor, _expr, _groupby

from dask_gpurt.client.planning.catalogue.schema import known_schema

#: An operation of dask_cudf that leaves its input as it is.
_NO_OPERATION = ("dask_cudf.io.parquet", "NoOp")
#: Those that do what an operation of Dask does, by another call of the library.
_OF_CUDF: Mapping[tuple[str, str], type[Expr]] = {
    ("dask_cudf._expr.expr", "RenameAxisCudf"): _expr.RenameAxis,
    ("dask_cudf._expr.groupby", "CudfGroupbyAgg"): _groupby.GroupbyAggregation,
}
#: Values of which an operation's result has a dtype that follows from their type.
_SCALARS = (
    bool, int, float, str, np.generic, pd.Timestamp, pd.Timedelta, datetime.date, datetime.timedelta,
    decimal.Decimal,
)  # fmt: skip
#: Methods of the accessor ``str`` on each string by itself, by what they return.
_STRINGS = frozenset(
    ["__getitem__", "capitalize", "casefold", "center", "ljust", "lower", "lstrip", "pad", "removeprefix"]
    + ["removesuffix", "replace", "rjust", "rstrip", "slice", "slice_replace", "strip", "swapcase", "title"]
    + ["upper", "zfill"]
)
_TESTS_OF_STRINGS = frozenset(
    ["contains", "endswith", "fullmatch", "isalnum", "isalpha", "isdecimal", "isdigit", "islower"]
    + ["isnumeric", "isspace", "istitle", "isupper", "match", "startswith"]
)
_NUMBERS_OF_STRINGS = frozenset(["count", "find", "len", "rfind"])
#: Methods and properties of the accessor ``dt`` on each time by itself, by what they return.
_TIMES = frozenset(["as_unit", "ceil", "floor", "normalize", "round", "tz_convert"])
_OBJECTS_OF_TIMES = frozenset(["date", "time"])
_TEXTS_OF_TIMES = frozenset(["day_name", "month_name", "strftime"])
_TESTS_OF_TIMES = frozenset(
    ["is_leap_year", "is_month_end", "is_month_start", "is_quarter_end", "is_quarter_start", "is_year_end"]
    + ["is_year_start"]
)
_NUMBERS_OF_TIMES = frozenset(
    ["day", "day_of_week", "day_of_year", "dayofweek", "dayofyear", "days", "days_in_month", "daysinmonth"]
    + ["hour", "microsecond", "microseconds", "minute", "month", "nanosecond", "nanoseconds", "quarter"]
    + ["second", "seconds", "weekday", "year"]
)


class Columns(NamedTuple):
    """Describe the columns of an expression; a series has one, under its name.

    ``varying``: those whose dtype may differ from partition to partition.
    ``without_nulls``: those that have no nulls in any partition.
    ``counts``: those that are numbers of rows: ``int64`` or, beside nulls, ``float64``, which has them all.
    """

    varying: frozenset[Any] = frozenset()
    without_nulls: frozenset[Any] = frozenset()
    counts: frozenset[Any] = frozenset()

    def renamed(self, before: Iterable[Any], after: Iterable[Any]) -> Columns:
        """Return the description of columns that are renamed, or left out, by position."""
        pairs = list(zip(before, after, strict=False))
        varying = frozenset(new for old, new in pairs if old in self.varying)
        if len({old for old, _ in pairs}) < len(pairs):
            return Columns(varying)
        others = (frozenset(new for old, new in pairs if old in each) for each in self[1:])
        return Columns(varying, *others)

    def only(self, names: Iterable[Any]) -> Columns:
        """Return the description of some of the columns."""
        chosen = frozenset(names)
        return Columns(*(each & chosen for each in self))


#: Returns the description of the columns of an input.
Known = Callable[[Any], Columns]


# ---- of dtypes ------------------------------------------------------------------------------------


def is_of_pandas(expr: Any) -> bool:
    """Return whether partitions are of pandas, where dtypes of numpy have no nulls."""
    schema = known_schema(expr)
    kind = type(expr._meta) if schema is None else schema.frames
    return kind.__module__.partition(".")[0] in ("pandas", "numpy", "builtins")


def has_categories(expr: Any) -> bool:
    """Return whether an expression has categorical data, whose categories are those of a partition."""
    dtypes, index = dtypes_of(expr), index_of(expr)
    if index is not None and not callable(index):
        dtypes = [*dtypes, *getattr(index, "dtypes", [index.dtype])]
    return any(type(dtype).__name__ == "CategoricalDtype" for dtype in dtypes)


def dtypes_of(expr: Any) -> list[Any]:
    """Return the dtypes of the columns of an expression."""
    if (schema := known_schema(expr)) is not None:
        return schema.dtypes
    meta = expr._meta
    if getattr(meta, "ndim", 0) == 2:
        return list(meta.dtypes)
    return [meta.dtype] if hasattr(meta, "dtype") else []


def dtype_in(frame: Any, column: Any) -> Any:
    """Return the dtype of a column of a frame."""
    return dtypes_of(frame)[list(frame.columns).index(column)]


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two expressions have the same columns and levels of the index, in name and dtype."""
    levels = [
        (list(index.names), list(getattr(index, "dtypes", [index.dtype])))
        for index in map(index_of, (one, other))
    ]
    return bool(
        (one.ndim, list(one.columns)) == (other.ndim, list(other.columns))
        and dtypes_of(one) == dtypes_of(other)
        and levels[0] == levels[1]
    )


def index_of(expr: Any) -> Any:
    """Return the empty index of an expression; None if it has none."""
    schema = known_schema(expr)
    return getattr(expr._meta, "index", None) if schema is None else schema.index.value


def is_narrow(dtype: Any) -> bool:
    """Return whether a dtype of pandas has no nulls, so that a column becomes another one to have some."""
    return isinstance(dtype, np.dtype) and dtype.kind in "iub"


def has_kinds(expr: Any, kinds: str) -> bool:
    """Return whether all columns are of dtypes of numpy of some kinds."""
    return all(isinstance(dtype, np.dtype) and dtype.kind in kinds for dtype in dtypes_of(expr))


def _fits(value: Any, dtype: Any) -> bool:
    """Return whether a column keeps its dtype if values of it are replaced by another one."""
    if pd.api.types.is_bool_dtype(dtype):
        return isinstance(value, (bool, np.bool_))
    if isinstance(dtype, np.dtype):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return isinstance(value, int) and limits.min <= value <= limits.max
        return dtype.kind == "f" and (value != value or float(dtype.type(value)) == value)
    if isinstance(dtype, pd.StringDtype):
        return isinstance(value, str)
    return False


# ---- which dtypes are fixed -----------------------------------------------------------------------


def _always(expr: Any) -> bool:
    return True


def _logic(expr: Any) -> bool:
    return all(
        all(map(pd.api.types.is_bool_dtype, dtypes_of(each))) or has_kinds(each, "iu")
        for each in expr.dependencies()
    )


def _division(expr: Any) -> bool:
    """Return whether no quotient or remainder of integers is that by zero, which is a float."""
    left, right = expr.operands[:2]
    if all(has_kinds(each, "f") for each in (left, right) if isinstance(each, Expr)):
        return all(isinstance(each, (Expr, int, float)) for each in (left, right))
    return isinstance(left, Expr) and isinstance(right, (int, float)) and right not in (0, False)


def _power(expr: Any) -> bool:
    left, right = expr.operands[:2]
    return isinstance(left, Expr) and isinstance(right, (int, float)) and has_kinds(left, "f")


def _replacement(expr: Any) -> bool:
    """Return whether values are replaced by others of the same dtype, or by nulls of it."""
    other = expr.other
    dtypes = dtypes_of(expr.frame)
    if isinstance(other, Expr):
        return all(dtypes == dtypes_of(other) and not _is_object(dtype) for dtype in dtypes)
    if isinstance(other, float) and other != other:
        return not any(map(is_narrow, dtypes))  # by nulls
    return all(_fits(other, dtype) for dtype in dtypes)


def _is_object(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind == "O"


def _filling(expr: Any) -> bool:
    value, meta = expr.value, expr.frame._meta
    if isinstance(value, Expr):
        return dtypes_of(expr.frame) == dtypes_of(value) and not any(map(_is_object, dtypes_of(value)))
    if isinstance(value, Mapping):
        dtypes = meta.dtypes.to_dict() if meta.ndim == 2 else {}
        return all(name in dtypes and _fits(each, dtypes[name]) for name, each in value.items())
    return all(is_narrow(dtype) or _fits(value, dtype) for dtype in dtypes_of(expr.frame))


def _bounds(expr: Any) -> bool:
    bounds = [bound for bound in (expr.lower, expr.upper) if bound is not None]
    return all(_fits(bound, dtype) for bound in bounds for dtype in dtypes_of(expr.frame))


def _conversion(expr: Any) -> bool:
    """Return whether values are converted by themselves: to numbers or times.

    Categories would be those of a partition, and so would the format of times as text.
    """
    chosen = expr.operand("dtypes")
    dtypes = chosen.values() if isinstance(chosen, Mapping) else [chosen]
    try:
        return all(getattr(pd.api.types.pandas_dtype(each), "kind", "O") in "iufbmM" for each in dtypes)
    except TypeError:  # a dtype that pandas does not know
        return False


def _method(expr: Any) -> bool:
    return expr.name in _ARITHMETIC_METHODS and expr.fill_value is None


def _accessor_method(expr: Any) -> bool:
    """Return whether a method of an accessor is on single values that are strings or times."""
    if is_of_pandas(expr) and any(map(_is_object, dtypes_of(expr.frame))):
        return False  # what it returns is inferred from all values
    if expr.accessor == "str":
        if expr.attr in _TESTS_OF_STRINGS:  # what they return for nulls may be given
            return type(expr) is _accessor.PropertyMap or (len(expr.args) <= 1 and "na" not in expr.kwargs)
        return expr.attr in _STRINGS | _NUMBERS_OF_STRINGS
    known = _TIMES | _OBJECTS_OF_TIMES | _TEXTS_OF_TIMES | _TESTS_OF_TIMES | _NUMBERS_OF_TIMES
    return expr.accessor == "dt" and expr.attr in known


def _changes_with_nulls(expr: Any) -> bool:
    """Return whether the dtype of what an accessor returns depends on nulls.

    Numbers are integers where there is no null, and else floats. Dates and times of day are objects, but
    times where all are null.
    """
    if expr.attr in _OBJECTS_OF_TIMES:
        return any(map(_is_object, dtypes_of(expr)))
    return expr.attr in _NUMBERS_OF_STRINGS | _NUMBERS_OF_TIMES and has_kinds(expr, "iu")


def has_fixed_dtypes(expr: Any, *, without_nulls: bool = False) -> bool:
    """Return whether the dtypes of what an operation of :data:`COMPUTING` returns with pandas are fixed.

    Then they follow from the dtypes of its inputs, whichever values and nulls these have; or which values, if
    it is on columns without nulls.
    """
    kind = type(expr)
    return COMPUTING[kind](expr) and (
        without_nulls or kind not in _ACCESSORS or not _changes_with_nulls(expr)
    )


#: The operators that compare values.
COMPARISONS = (
    *(_expr.LT, _expr.LE, _expr.GT, _expr.GE, _expr.EQ, _expr.NE),
    *(_expr.LTSeries, _expr.LESeries, _expr.GTSeries, _expr.GESeries, _expr.EQSeries, _expr.NESeries),
)
_ARITHMETIC_METHODS = frozenset(["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"])
_DIVISIONS = frozenset([_expr.FloorDiv, _expr.Mod])
_ACCESSORS = (_accessor.FunctionMap, _accessor.PropertyMap)
#: The operations that compute values, each with a function that returns whether its dtypes are fixed with
#: pandas. With cudf, where any column may have nulls, those of all are but of divisions.
COMPUTING: dict[type, Callable[[Any], bool]] = {
    **dict.fromkeys(COMPARISONS, _always),
    **dict.fromkeys([_expr.And, _expr.Or, _expr.XOr, _expr.Invert], _logic),
    **dict.fromkeys([_expr.Add, _expr.Sub, _expr.Mul, _expr.Div, _expr.Neg, _expr.Pos], _always),
    **dict.fromkeys([_expr.FloorDiv, _expr.Mod], _division),
    **dict.fromkeys([_expr.Where, _expr.Mask], _replacement),
    **dict.fromkeys(_ACCESSORS, _always),
    _expr.Abs: _always,
    _expr.ArrowStringConversion: _always,
    _expr.AsType: _always,
    _expr.Between: _always,
    _expr.Clip: _bounds,
    _expr.Fillna: _filling,
    _expr.IsNa: _always,
    _expr.Isin: _always,
    _expr.MethodOperator: _always,
    _expr.NotNull: _always,
    _expr.Pow: _power,
    _expr.Round: _always,
}
#: Those that are row by row for some arguments only.
_ONLY_IF = {
    _expr.AsType: _conversion,
    _expr.MethodOperator: _method,
    **dict.fromkeys(_ACCESSORS, _accessor_method),
}
#: Those that make no nulls of times and strings.
_MAKING_NO_NULLS = frozenset([_expr.Add, _expr.Sub, _expr.Mul, _expr.Round, *_ACCESSORS])
#: Those whose result does not depend on the dtype of the input.
_BLIND = frozenset([_expr.IsNa, _expr.NotNull])
#: Those that give the columns of a frame other names, in the same order.
RENAMING = (_expr.RenameFrame, _expr.ColumnsSetter, _expr.AddPrefix, _expr.AddSuffix)
#: The same, and those that do so with a series.
RELABELLING = (*RENAMING, _expr.RenameSeries, _expr.ToFrame)
#: The operations that choose, move or name columns and rows, whose values and dtypes stay the same.
KEEPING: dict[type, Callable[[Any, Known], Columns]] = {
    **dict.fromkeys([_expr.Projection, _expr.Drop], lambda expr, known: known(expr.frame).only(expr.columns)),
    **dict.fromkeys(
        RELABELLING,
        lambda expr, known: known(expr.frame).renamed(expr.frame.columns, expr.columns),
    ),
    **dict.fromkeys(
        [_expr.Filter, _expr.DropnaFrame, _expr.DropnaSeries], lambda expr, known: known(expr.frame)
    ),
    _expr.RenameAxis: lambda expr, known: known(expr.frame),
    # The levels of the index come before the columns.
    _expr.ResetIndex: lambda expr, known: known(expr.frame).renamed(
        reversed(expr.frame.columns), reversed(expr.columns)
    ),
    _expr.Assign: lambda expr, known: _assigned(expr, known),
}


def _assigned(expr: Any, known: Known) -> Columns:
    before = known(expr.frame)
    values = dict(zip(expr.keys, expr.vals, strict=True))
    of_values = {
        name: known(value).renamed(value.columns, [name]) if isinstance(value, Expr) else Columns()
        for name, value in values.items()
        if not isinstance(value, Expr) or value.ndim
    }
    return Columns(
        *(
            frozenset(before[at] - values.keys()).union(*(each[at] for each in of_values.values()))
            for at in range(len(before))
        )
    )


# ---- the guarantees -------------------------------------------------------------------------------


def is_no_operation(expr: Any) -> bool:
    """Return whether an expression is dask_cudf's that leaves its input as it is."""
    return (type(expr).__module__, type(expr).__name__) == _NO_OPERATION


def kind_of(expr: Any) -> type[Expr]:
    """Return the class of an expression, by which rules know it; Dask's own for some of dask_cudf."""
    kind: type[Expr] = type(expr)
    return _OF_CUDF.get((kind.__module__, kind.__name__), kind)


def is_on_rows(expr: Any) -> bool:
    """Return whether an operation is row by row, with arguments for which that is known."""
    if is_no_operation(expr):
        return True
    kind = kind_of(expr)
    if kind is _expr.Assign:
        return all(map(_is_plain, expr.vals))
    if kind in KEEPING:  # columns are chosen and named by values, and not by a function
        return not any(callable(each) and not isinstance(each, (type, Expr)) for each in expr.operands)
    if kind in _ONLY_IF and not _ONLY_IF[kind](expr):
        return False
    return kind in COMPUTING and all(map(_is_plain, expr.operands))


def after_operation(expr: Any, known: Known) -> Columns | None:
    """Describe the columns of the result of an operation on rows; None if its values depend on partitions.

    ``expr``: an operation for which :func:`is_on_rows` holds.
    ``known``: describes the columns of its inputs.
    """
    kind = kind_of(expr)
    if is_no_operation(expr):
        return known(expr.frame)
    if kind in KEEPING:
        chooses_by = [expr.predicate] if kind is _expr.Filter else []
        return None if any(known(each).varying for each in chooses_by) else KEEPING[kind](expr, known)
    if kind not in _BLIND and any(known(each).varying for each in expr.dependencies()):
        return _after_counts(expr, known)
    are_fixed = COMPUTING[kind](expr) if is_of_pandas(expr) or kind in _DIVISIONS else True
    inputs = [each for each in expr.dependencies() if getattr(each, "ndim", 0)]
    have_no_nulls = all(known(each).without_nulls >= set(each.columns) for each in inputs)
    if kind in _ACCESSORS and is_of_pandas(expr) and _changes_with_nulls(expr):
        are_fixed = have_no_nulls
    # Floats without nulls may become NaN, as infinity times zero.
    makes_no_nulls = kind in _MAKING_NO_NULLS and not has_kinds(expr, "fc")
    names = frozenset(expr.columns) if expr.ndim else frozenset[Any]()
    nothing = frozenset[Any]()
    return Columns(
        nothing if are_fixed else names,
        names if are_fixed and have_no_nulls and makes_no_nulls else nothing,
    )


def _after_counts(expr: Any, known: Known) -> Columns | None:
    """Describe what is made of numbers of rows, which are floats in partitions where some are null.

    Both have the same values, and so has what is computed of these alone, whichever dtype they have.
    """
    kind, columns = type(expr), known(expr.operands[0]) if isinstance(expr.operands[0], Expr) else Columns()
    are_counts = all(known(each).varying <= known(each).counts for each in expr.dependencies())
    if not are_counts or not is_of_pandas(expr):
        return None
    if kind is _expr.Fillna:
        given = expr.value if isinstance(expr.value, Mapping) else {name: expr.value for name in expr.columns}
        is_known = given.keys() <= columns.counts and all(map(_is_count, given.values()))
        return columns if is_known else None
    if kind is _expr.AsType:
        return (
            Columns() if expr.operand("dtypes") in (int, float, "int64", "float64", "int", "float") else None
        )
    if kind in COMPARISONS and len(expr.operands) == 2:
        return Columns() if _is_count(expr.operands[1]) else None
    return Columns() if kind is _expr.Div and all(_is_number(each) for each in expr.operands) else None


def _is_count(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 2**53


def _is_number(operand: Any) -> bool:
    return has_kinds(operand, "if") if isinstance(operand, Expr) else _is_count(operand)


def _is_plain(operand: Any) -> bool:
    """Return whether the dtypes of a result are known to follow from those of an operand."""
    if isinstance(operand, (list, tuple, set, frozenset)):
        return all(map(_is_plain, operand))
    if isinstance(operand, Mapping):
        return all(map(_is_plain, operand.values()))
    if isinstance(operand, str):
        return operand != "infer"  # from neighbours whether a local time is that of summer
    if isinstance(operand, slice):
        return True
    is_dtype = isinstance(operand, (type, np.dtype, pd.api.extensions.ExtensionDtype))
    return operand is None or is_dtype or isinstance(operand, (Expr, *_SCALARS))
