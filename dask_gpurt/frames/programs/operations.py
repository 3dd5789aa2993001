"""List the operations of programs: what each does to columns and domains.

Each takes the arguments of Dask's call, with frames as :class:`Rows` and series as :class:`Values`, and
returns one of these, or raises :class:`Refused`. The rules for dtypes and nulls are those of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from dask_gpurt.frames.programs.values import Domain, Engine, Refused, Rows, Values

Result = Rows | Values

#: Methods of series whose result has the same rows, and depends on the index of none of their operands.
_BY_ROWS = frozenset(
    [".abs", ".astype", ".between", ".fillna", ".isin", ".isna", ".isnull", ".mask", ".notna", ".notnull"]
    + [".round", ".where"]
)
#: Those of them that take other series.
_OF_SEVERAL = frozenset([".mask", ".where"])
_ACCESSORS = ("str.", "dt.")


def apply(engine: Engine, name: str, function: Callable[..., Any], args: list[Any], kwargs: Any) -> Result:
    """Apply an operation by its name.

    Raises Refused if it is not known, or not for these operands.
    """
    if (operation := _OPERATIONS.get(name)) is not None:
        return operation(engine, *args, **kwargs)
    if name in _BY_ROWS or name.startswith(_ACCESSORS):
        return _by_rows(engine, name, function, args, kwargs)
    raise Refused(name)


# ---- columns ---------------------------------------------------------------------------------------


def _getitem(engine: Engine, frame: Any, key: Any) -> Result:
    if isinstance(key, Values):
        return _filtered(engine, frame, key)
    if not isinstance(frame, Rows):
        raise Refused("getitem")
    if isinstance(key, str) and key in frame.columns:
        return Values(key, frame.columns[key], frame.domain)
    if type(key) is list and key and len(set(_labels(key))) == len(key) and set(key) <= frame.columns.keys():
        return Rows({label: frame.columns[label] for label in key}, frame.domain)
    raise Refused("getitem")


def _labels(key: list[Any]) -> list[str]:
    if not all(type(label) is str for label in key):
        raise Refused("labels")
    return key


def _filtered(engine: Engine, frame: Any, mask: Values) -> Result:
    if not isinstance(frame, (Rows, Values)) or not engine.is_same(frame.domain, mask.domain):
        raise Refused("another index")
    if not engine.is_boolean(mask.column) or not engine.can_filter(frame.domain):
        raise Refused("filter")
    columns = [frame.column] if isinstance(frame, Values) else list(frame.columns.values())
    kept, length = engine.kept(columns, mask.column)
    domain = Domain(length, None, frame.domain, mask.column)
    if isinstance(frame, Values):
        return Values(frame.name, kept[0], domain)
    return Rows(dict(zip(frame.columns, kept, strict=True)), domain)


def _assign(engine: Engine, frame: Any, *pairs: Any) -> Rows:
    if not isinstance(frame, Rows) or not frame.domain.length:  # an empty frame takes the index of a series
        raise Refused("assign")
    columns = dict(frame.columns)
    for label, value in zip(_labels(list(pairs[::2])), pairs[1::2], strict=True):
        if isinstance(value, Values) and engine.is_same(value.domain, frame.domain):
            columns[label] = value.column
        elif type(value) in (bool, int, float, str) and value == value:
            columns[label] = engine.constant(value, frame.domain.length)
        else:
            raise Refused("assign")
    return Rows(columns, frame.domain)


def _rename(engine: Engine, frame: Any, columns: Any) -> Rows:
    if not isinstance(frame, Rows) or type(columns) is not dict:
        raise Refused("rename")
    labels = _labels([columns.get(label, label) for label in frame.columns])
    if len(set(labels)) < len(labels):
        raise Refused("labels")
    return Rows(dict(zip(labels, frame.columns.values(), strict=True)), frame.domain)


def _reset_index(engine: Engine, frame: Any, *, drop: Any = False, **others: Any) -> Result:
    if not isinstance(frame, (Rows, Values)) or not isinstance(drop, bool) or others:
        raise Refused("reset_index")
    domain = engine.range(frame.domain.length)
    if drop and isinstance(frame, Values):
        return Values(frame.name, frame.column, domain)
    if isinstance(frame, Values):
        columns = {label: frame.column for label in _labels([frame.name])}
    else:
        columns = frame.columns
    if drop:
        return Rows(columns, domain)
    levels = engine.levels(frame.domain)
    if not levels.keys().isdisjoint(columns):
        raise Refused("labels")
    return Rows(levels | columns, domain)


def _to_frame(engine: Engine, series: Any, **named: Any) -> Rows:
    if not isinstance(series, Values) or type(label := named.get("name", series.name)) is not str:
        raise Refused("to_frame")
    return Rows({label: series.column}, series.domain)


# ---- values ----------------------------------------------------------------------------------------


def _binary(name: str, engine: Engine, left: Any, right: Any) -> Values:
    series = [each for each in (left, right) if isinstance(each, Values)]
    if not series or any(isinstance(each, Rows) for each in (left, right)):
        raise Refused(name)
    if len(series) == 2 and not engine.is_same(left.domain, right.domain):
        raise Refused("another index")
    label = series[0].name if all(each.name == series[0].name for each in series) else None
    operands = [each.column if isinstance(each, Values) else each for each in (left, right)]
    return Values(label, engine.binary(name, *operands), series[0].domain)


def _inverted(engine: Engine, series: Any) -> Values:
    if not isinstance(series, Values):
        raise Refused("~")
    return Values(series.name, engine.inverted(series.column), series.domain)


def _by_rows(
    engine: Engine, name: str, function: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any]
) -> Values:
    """Call a method with series of numbered rows, since the result does not depend on the index."""
    positions = [at for at, each in enumerate(args) if isinstance(each, Values)]
    others: list[Any] = [each for at, each in enumerate(args) if at not in positions] + list(kwargs.values())
    if not positions or positions[0] or not all(_is_plain(each, name) for each in others):
        raise Refused(name)
    series = [args[at] for at in positions]
    if len(series) > 1 and name not in _OF_SEVERAL:
        raise Refused(name)
    if not all(engine.is_same(each.domain, series[0].domain) for each in series):
        raise Refused("another index")

    def call(*made: Any) -> Any:
        given = list(args)
        for at, each in zip(positions, made, strict=True):
            given[at] = each
        return function(*given, **kwargs)

    label, column = engine.by_rows(call, series)
    return Values(label, column, series[0].domain)


def _is_plain(argument: Any, name: str = "") -> bool:
    """Return whether an argument of a method has no labels of rows: values, dtypes, lists, and keywords."""
    if isinstance(argument, (list, tuple, set, frozenset)):
        return all(map(_is_plain, argument))
    if isinstance(argument, dict) and name.startswith(_ACCESSORS):
        return all(map(_is_plain, argument.values()))
    is_dtype = isinstance(argument, (type, np.dtype, pd.api.extensions.ExtensionDtype))
    return is_dtype or isinstance(argument, np.ndarray) or bool(pd.api.types.is_scalar(argument))


# ---- joins -----------------------------------------------------------------------------------------


def _merged(
    engine: Engine,
    left: Any,
    right: Any,
    *,
    how: Any = "inner",
    left_on: Any = None,
    right_on: Any = None,
    left_index: Any = False,
    right_index: Any = False,
    suffixes: Any = ("_x", "_y"),
    indicator: Any = False,
    result_meta: Any = None,
) -> Rows:
    """Join two frames on columns, as Dask does. Empty ones, which keep dtypes, are left to the library."""
    if not isinstance(left, Rows) or not isinstance(right, Rows) or left_index or right_index or indicator:
        raise Refused("merge")
    if how not in ("inner", "left", "leftsemi") or not left.domain.length or not right.domain.length:
        raise Refused("merge")
    keys, others = _keys(left, left_on), _keys(right, right_on)
    if len(keys) != len(others) or any(map(engine.is_named, (left.domain, right.domain))):
        raise Refused("keys")
    once = {key for key, other in zip(keys, others, strict=True) if key == other}
    of_right = [] if how == "leftsemi" else [label for label in right.columns if label not in once]
    suffixed = (left.columns.keys() & right.columns.keys()) - once if of_right else set[str]()
    labels = [
        f"{label}{suffix}" if label in suffixed and suffix is not None else label
        for names, suffix in ((left.columns, suffixes[0]), (of_right, suffixes[1]))
        for label in names
    ]
    if len(set(labels)) < len(labels):
        raise Refused("labels")
    columns, length = engine.joined(
        how,
        ([left.columns[key] for key in keys], [right.columns[key] for key in others]),
        (list(left.columns.values()), [right.columns[label] for label in of_right]),
    )
    return Rows(dict(zip(labels, columns, strict=True)), engine.range(length))


def _keys(frame: Rows, on: Any) -> list[str]:
    keys = _labels([on] if isinstance(on, str) else list(on) if isinstance(on, (list, tuple)) else [])
    if not keys or not set(keys) <= frame.columns.keys():
        raise Refused("keys")
    return keys


# ---- groups ----------------------------------------------------------------------------------------

#: The aggregations of a partition from which dask_cudf computes each aggregation.
_PARTIAL = {"sum": ["sum"], "count": ["count"], "min": ["min"], "max": ["max"], "mean": ["count", "sum"]}

#: The aggregation of partial ones.
_AGAIN = {"sum": "sum", "count": "sum", "min": "min", "max": "max"}


def _grouped(
    engine: Engine,
    frame: Any,
    *by: Any,
    gb_cols: Any,
    aggs: Any,
    dropna: Any,
    sort: Any,
    sep: str,
    columns: Any = None,
) -> Rows:
    """Aggregate the groups of a partition, with the columns that dask_cudf makes: ``label___sum``, sorted."""
    if not isinstance(frame, Rows) or not frame.domain.length or sort or type(gb_cols) is not list:
        raise Refused("groupby")
    wanted = {label: {one for each in found for one in _partial(each)} for label, found in aggs.items()}
    labels = [*_labels(gb_cols), *_labels(list(wanted))]
    if len(set(labels)) < len(labels) or not set(labels) <= frame.columns.keys() or not gb_cols:
        raise Refused("groupby")
    requests = {label: (frame.columns[label], sorted(found)) for label, found in wanted.items()}
    keys, found, length = engine.grouped(
        [frame.columns[label] for label in gb_cols], requests, dropna=bool(dropna)
    )
    made = dict(zip(gb_cols, keys, strict=True))
    made |= {f"{label}{sep}{aggregation}": column for (label, aggregation), column in found.items()}
    return Rows({label: made[label] for label in sorted(made)}, engine.range(length))


def _grouped_by_index(
    aggregation: str,
    engine: Engine,
    frame: Any,
    *by: Any,
    chunk: Any,
    columns: Any,
    dropna: Any = None,
    observed: Any = None,
    **options: Any,
) -> Result:
    """Aggregate the groups of a partition as ``groupby(by)[columns].sum()`` does, with the keys as index."""
    if not isinstance(frame, Rows) or not frame.domain.length or any(options.values()):
        raise Refused("groupby")
    keys = _keys(frame, by)
    others = [label for label in frame.columns if label not in keys]
    chosen = others if columns is None else [columns] if isinstance(columns, str) else list(columns)
    if len(set(keys)) < len(keys) or not set(_labels(chosen)) <= set(others) or not chosen:
        raise Refused("groupby")
    found, values, length = engine.grouped(
        [frame.columns[key] for key in keys],
        {label: (frame.columns[label], [aggregation]) for label in chosen},
        dropna=dropna is None or bool(dropna),
    )
    domain = engine.keyed(found, keys, length)
    if isinstance(columns, str):
        return Values(columns, values[columns, aggregation], domain)
    return Rows({label: values[label, aggregation] for label in chosen}, domain)


def _grouped_again(engine: Engine, frame: Any, *, gb_cols: Any, dropna: Any, sort: Any, sep: str) -> Rows:
    """Aggregate the groups of several partitions, from what :func:`_grouped` has made of each."""
    if not isinstance(frame, Rows) or not frame.domain.length or sort or type(gb_cols) is not list:
        raise Refused("groupby")
    values = [label for label in frame.columns if label not in gb_cols]
    if not _labels(gb_cols) or not set(gb_cols) <= frame.columns.keys():
        raise Refused("groupby")
    requests = {label: (frame.columns[label], [_again(label.split(sep)[-1])]) for label in values}
    keys, found, length = engine.grouped(
        [frame.columns[label] for label in gb_cols], requests, dropna=bool(dropna)
    )
    made = dict(zip(gb_cols, keys, strict=True)) | {label: column for (label, _), column in found.items()}
    return Rows({label: made[label] for label in sorted(made)}, engine.range(length))


def _finished(
    engine: Engine,
    frame: Any,
    *,
    gb_cols: Any,
    aggs: Any,
    columns: Any,
    final_columns: Any,
    as_index: Any,
    dropna: Any,
    sort: Any,
    sep: str,
    str_cols_out: Any,
    aggs_renames: Any,
) -> Result:
    """Aggregate the groups of all partitions, and finish: means, the keys as index, the names of columns."""
    if not str_cols_out or not as_index or aggs_renames or any(sep in label for label in _labels(columns)):
        raise Refused("labels")
    groups = _grouped_again(engine, frame, gb_cols=gb_cols, dropna=dropna, sort=sort, sep=sep)
    found: dict[str, Any] = {}
    for label in columns:
        (aggregation,) = aggs.get(label, ("",))
        if aggregation == "mean":
            total, count = (groups.columns[f"{label}{sep}{each}"] for each in ("sum", "count"))
            found[label] = engine.mean(total, count)
        elif aggregation:
            found[label] = groups.columns[f"{label}{sep}{aggregation}"]
    domain = engine.keyed([groups.columns[key] for key in gb_cols], gb_cols, groups.domain.length)
    if isinstance(final_columns, str):
        return Values(final_columns, found[final_columns], domain)
    return Rows({label: found[label] for label in _labels(list(final_columns))}, domain)


def _again(aggregation: str) -> str:
    if aggregation not in _AGAIN:
        raise Refused("groupby")
    return _AGAIN[aggregation]


def _partial(aggregation: Any) -> list[str]:
    if not isinstance(aggregation, str) or aggregation not in _PARTIAL:
        raise Refused("groupby")
    return _PARTIAL[aggregation]


#: Binary operations.
BINARY = (
    *("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
)
_OPERATIONS: dict[str, Callable[..., Result]] = {
    "getitem": _getitem,
    "assign": _assign,
    "rename": _rename,
    ".reset_index": _reset_index,
    ".to_frame": _to_frame,
    "inv": _inverted,
    "groupby": _grouped,
    "groupby-again": _grouped_again,
    "groupby-end": _finished,
    **{f"groupby-{name}": partial(_grouped_by_index, name) for name in ("sum", "count", "min", "max")},
    "merge": _merged,
    **{name: partial(_binary, name) for name in BINARY},
}
