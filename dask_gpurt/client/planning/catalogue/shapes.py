"""Say of each operation how the schema of its result follows from those of its inputs.

Projections, filters, assignments, reads, joins and aggregations have rules for labels, order and sources of
columns, which hold for any library; dtypes and indexes are the library's own answers about single columns.
Operations on series have one for their names. Every other operation is asked about as a whole, once for each
schema of its inputs. Where a rule does not know, or an answer has unexpected labels, Dask is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import getattr_static
from typing import Any, TypeGuard

import numpy as np
import pandas as pd
from dask._expr import Expr
from dask.dataframe.dask_expr import _expr, _groupby, _reductions, _shuffle
from dask.dataframe.dask_expr._concat import Concat
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr.io.io import FusedIO
from dask.dataframe.dask_expr.io.parquet import ReadParquetFSSpec, ReadParquetPyarrowFS
from dask.typing import no_default

from dask_gpurt.client.planning.catalogue.asking import Library, answered, key_of
from dask_gpurt.client.planning.catalogue.joins import joined, with_row_numbers
from dask_gpurt.client.planning.catalogue.schema import (
    SCHEMA,
    Schema,
    SchemaOf,
    axis_of,
    frame_of,
    renamed_index,
    schema_of,
)
from dask_gpurt.client.planning.operations import COMPARISONS, COMPUTING
from dask_gpurt.dask_hooks.parquet_files import base_of_read

#: Derives the schema of an operation.
Rule = Callable[[Any, SchemaOf, Library], Schema | None]


def of_fused(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Return the schema of the last of several operations."""
    return of(expr.exprs[0])


def of_fused_read(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Return the schema of a read, of which several files are put together."""
    return of(expr.operand("_expr"))


def of_read(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Return the schema of the columns that are read."""
    columns = expr.operand("columns")
    base = _schema_of_files(base_of_read(expr))
    if base is None or columns is None or not base.is_frame:
        return base if columns is None and not expr.operand("_series") else None
    chosen = columns if isinstance(columns, list) else [columns]
    return base.series(chosen[0]) if expr.operand("_series") else base.select(chosen)


def _schema_of_files(frame: Any) -> Schema | None:
    """Return the schema of a frame that all reads of some files share, and nobody changes in place."""
    known = vars(frame)
    if SCHEMA not in known:
        known[SCHEMA] = schema_of(frame)
    found: Schema | None = known[SCHEMA]
    return found


def asked(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Ask the library about the operation as a whole."""
    inputs = [of(each) for each in expr.operands if isinstance(each, Expr)]
    if any(each is None for each in inputs):
        return None
    schemas = iter(inputs)
    return library.ask(
        type(expr), [next(schemas) if isinstance(each, Expr) else each for each in expr.operands]
    )


def same(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Return the schema of the input."""
    return of(expr.frame)


def of_series(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Describe an operation on series, of whose names only counts which are equal."""
    inputs = [of(each) if isinstance(each, Expr) else each for each in expr.operands]
    series = [each for each in inputs if isinstance(each, Schema)]
    if any(each.is_frame for each in series) or _lacks_schemas(inputs, expr):
        return asked(expr, of, library)
    names = dict.fromkeys(each.labels[0] for each in series if each.labels[0] is not None)
    aliases = {name: f"n{number}" for number, name in enumerate(names)}
    operands = [
        each._replace(labels=(aliases.get(each.labels[0]),)) if isinstance(each, Schema) else each
        for each in inputs
    ]
    if type(expr) in COMPARISONS and not isinstance(inputs[1], Schema):
        operands[1] = _compared(inputs[1], series[0].dtypes[0])
    found = library.ask(type(expr), operands)
    if found is not None and found.is_frame:  # whose labels may be of the names
        return asked(expr, of, library)
    if found is None or found.labels[0] not in (None, *aliases.values()):
        return None
    by_alias = {alias: name for name, alias in aliases.items()}
    return found._replace(labels=(by_alias.get(found.labels[0]),))


def cast(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Give values another dtype, which a dict has by the name of a series."""
    by_name = isinstance(expr.operand("dtypes"), dict)
    return asked(expr, of, library) if by_name else of_series(expr, of, library)


def _compared(value: Any, dtype: Any) -> Any:
    """Return a value whose comparison with a column is of the same dtype: mostly any of its type."""
    if type(value) is str and type(dtype) is pd.StringDtype:
        return "a"
    if not isinstance(dtype, np.dtype):
        return value
    if type(value) in (int, float) and dtype.kind in "iuf" and dtype.itemsize >= 4 and abs(value) < 1 << 31:
        return type(value)(1)
    if type(value) is pd.Timestamp and dtype.kind == "M" and value.tz is None and 1700 < value.year < 2200:
        return pd.Timestamp(2000, 1, 1).as_unit(value.unit)
    return value


def _lacks_schemas(inputs: Sequence[Any], expr: Any) -> bool:
    return sum(isinstance(each, Schema) for each in inputs) < len(expr.dependencies())


# ---- columns and rows that are chosen or named ----------------------------------------------------


def projection(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Choose columns of a frame."""
    frame, chosen = of(expr.frame), expr.operand("columns")
    if frame is None or not frame.is_frame:
        return None
    if frame.has_levels or (isinstance(chosen, list) and not chosen):
        return asked(expr, of, library)
    if isinstance(chosen, list) and all(isinstance(label, str) for label in chosen):
        if len({*chosen}) < len(chosen) and frame.frames is not pd.DataFrame:
            return None  # cudf refuses
        return frame.select(chosen)
    return frame.series(chosen) if isinstance(chosen, str) else None


def filtered(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Choose rows: the index may become another one, the columns stay."""
    frame, predicate = of(expr.frame), of(expr.predicate)
    if frame is None or predicate is None or predicate.is_frame or not frame.columns:
        return None
    if frame.has_levels:
        return asked(expr, of, library)
    one = frame.one("a")
    found = library.ask(type(expr), [one, predicate._replace(labels=("p",))])
    return _like(frame, found, ("a",), one.columns)


def _like(frame: Schema, found: Schema | None, labels: tuple[str, ...], columns: Any) -> Schema | None:
    """Return a schema with the index of an answer, if that has the expected columns."""
    if found is None or found.labels != labels or found.columns != columns:
        return None
    return frame._replace(index=found.index) if found.axis is None or found.axis == frame.axis else None


def assigned(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Set columns: the others stay, and new ones follow them in order."""
    frame, names = of(expr.frame), expr.operands[1::2]
    values = [of(each) if isinstance(each, Expr) else each for each in expr.operands[2::2]]
    if frame is None or not (frame.is_frame and frame.columns and _are_labels(frame.labels)):
        return asked(expr, of, library)
    if not _are_labels(names) or _lacks_schemas([frame, *values], expr):
        return asked(expr, of, library)
    replaced = (value for name, value in zip(names, values, strict=True) if name in frame.labels)
    if not all(isinstance(value, Schema) for value in replaced):  # cudf sets no text in place of no rows
        return asked(expr, of, library)
    one = frame.one("a")
    parts = [key_of(_unnamed(value) or value) for value in values]
    if None in parts or not parts or any(isinstance(each, Schema) and each.is_frame for each in values):
        return asked(expr, of, library)
    by_part = dict(zip(parts, values, strict=True))
    distinct = list(by_part)

    def answer(missing: list[int]) -> list[Schema | None]:
        labels = [f"v{number}" for number in range(len(missing))]
        given = (by_part[distinct[position]] for position in missing)
        found = answered(
            type(expr), [one, *(each for pair in zip(labels, given, strict=True) for each in pair)]
        )
        if found is None or found.labels != ("a", *labels) or found.columns[0] != one.columns[0]:
            return [None] * len(missing)
        return [found.select([label]) for label in labels]

    found = library.ask_parts(type(expr), [one], distinct, answer)
    if found is None:
        return None
    of_parts = {part: each.columns[0] for part, each in zip(distinct, found, strict=True)}
    columns = dict(zip(frame.labels, frame.columns, strict=True))
    columns |= zip(names, map(of_parts.__getitem__, parts), strict=True)
    new = found[0]._replace(labels=tuple(columns), columns=tuple(columns.values()))
    return new if new.axis == frame.axis else None


def _unnamed(value: Any) -> Schema | None:
    """Return a series without its name, which an assignment gives another one; None for anything else."""
    return value._replace(labels=(None,)) if isinstance(value, Schema) and not value.is_frame else None


def renamed(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Give columns other names, where these are labels of the same kind."""
    frame, names = of(expr.frame), expr.operand("columns")
    if frame is None or not frame.is_frame or type(names) is not dict or not _are_labels([*names]):
        return asked(expr, of, library)
    return library.derived(_renamed, expr, (frame,), names) or asked(expr, of, library)


def _renamed(expr: Any, frame: Schema, library: Library) -> Schema | None:
    labels = [expr.operand("columns").get(label, label) for label in frame.labels]
    if not _are_labels(labels) or axis_of(labels, frame.axis) != frame.axis:
        return None
    return frame._replace(labels=tuple(labels))


def numbered(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Reset the index, of which the levels, if they are kept, become the first columns."""
    frame = of(expr.frame)
    if frame is None or not (frame.is_frame and frame.columns and _are_labels(frame.labels)):
        return asked(expr, of, library)
    levels = list(frame.index.value.names)
    names = [] if expr.operand("drop") is True else levels
    if not _are_labels([*names, "a"]) or {*names} & {*frame.labels}:
        return asked(expr, of, library)
    aliases = {name: f"k{number}" for number, name in enumerate(levels) if type(name) is str}
    index = renamed_index(frame.index, aliases)
    if index is None:
        return asked(expr, of, library)
    one = frame.one("a")._replace(index=index)
    found = library.ask(type(expr), [one, *expr.operands[1:]])
    if found is None or found.labels != (*map(aliases.get, names), "a"):
        return None
    if found.columns[-1] != one.columns[0] or found.axis != frame.axis:
        return None
    labels, columns = (*names, *frame.labels), (*found.columns[:-1], *frame.columns)
    return found._replace(labels=labels, columns=columns)


def shuffled(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Return the schema of the rows that are shuffled; Dask says it where their index is dropped."""
    rows = of(expr.frame)
    return rows if _is_frame(rows) and not (expr.ignore_index and expr.method == "tasks") else None


def shuffled_here(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Leave out the column of targets, and the index where row numbers follow."""
    rows = of(expr.rows)
    if rows is None or not (_is_frame(rows) and _are_labels(rows.labels)):
        return None
    kept = rows.select([label for label in rows.labels if label != expr.partitioning_index])
    if kept is None or not kept.columns or not expr._drops_index:
        return kept
    return with_row_numbers(kept, library)


def targeted(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Add the column of targets, whose dtype does not depend on that of the keys."""
    frame, name = of(expr.frame), expr.operand("index_name")
    if frame is None or not (_is_frame(frame) and frame.columns and _are_labels([*frame.labels, name])):
        return None
    one = frame.one("a")
    found = library.ask_parts(type(expr), [one], [None], lambda _: [_with_targets(type(expr), one)])
    if found is None or found[0].labels != ("a", "b") or found[0].axis != frame.axis:
        return None
    labels, columns = (*frame.labels, name), (*frame.columns, found[0].columns[1])
    return frame._replace(labels=labels, columns=columns)


def _with_targets(kind: type, one: Schema) -> Schema | None:
    return answered(kind, [one, ["a"], "b", 2, frame_of(one), False])


def with_named_index(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Name the index; the columns stay."""
    frame = of(expr.frame)
    others = {expr.operand("mapper"), expr.operand("columns")} if frame is not None else set()
    if not _is_frame(frame) or frame.has_levels or not frame.columns or others != {no_default}:
        return asked(expr, of, library)
    one = frame.one("a")
    found = library.ask(type(expr), [one, *expr.operands[1:]])
    return _like(frame, found, ("a",), one.columns)


def _is_frame(rows: Schema | None) -> TypeGuard[Schema]:
    return rows is not None and rows.is_frame


def _has_na(dtype: Any) -> bool:
    """Return whether this is the dtype of text in which pd.NA stands for no value."""
    return isinstance(dtype, pd.StringDtype) and dtype.na_value is pd.NA


def _are_labels(names: Sequence[Any]) -> bool:
    return all(type(name) is str for name in names) and len({*names}) == len(names)


def first_rows(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Choose the first rows by some columns: the index may become another one, the columns stay."""
    frame, by = of(expr.frame), expr.operand("_columns")
    keys = by if isinstance(by, list) else [by]
    if not (_is_frame(frame) and _are_labels(frame.labels) and _are_labels(keys)):
        return asked(expr, of, library)
    if frame.frames is not pd.DataFrame and any(map(_has_na, frame.dtypes)):
        return asked(expr, of, library)  # where cudf sorts, it gives such text another dtype
    if not keys or not {*keys} <= {*frame.labels} or {*keys} & {*frame.index.value.names}:
        return asked(expr, of, library)  # a name of a column and of a level is ambiguous
    names = [f"k{number}" for number in range(len(keys))]
    bare = frame._replace(labels=tuple(names), columns=tuple(map(frame.at, keys)))
    count, rest = expr.operand("n"), expr.operands[3:]
    if type(expr) is _reductions.NFirst and type(count) is int and count > 1:
        count = 2  # as many rows as Dask's example has
        if type(rest[0]) is bool or [*map(type, rest[0] or ())] == [bool] * len(keys):
            rest = [True]  # in whichever order
    found = library.ask(type(expr), [bare, count, names, *rest])
    return _like(frame, found, bare.labels, bare.columns)


def isin(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Look for values, which do not count for Dask."""
    series = of(expr.frame)
    if series is None or series.is_frame:
        return None
    alias = (None,) if series.labels == (None,) else ("n",)
    found = library.ask(type(expr), [series._replace(labels=alias), None])
    return None if found is None or found.labels != alias else found._replace(labels=series.labels)


# ---- groups ---------------------------------------------------------------------------------------


def aggregated(expr: Any, of: SchemaOf, library: Library) -> Schema | None:
    """Aggregate columns by columns, each by one function that is named."""
    frame, by, functions = of(expr.frame), list(expr.by), expr.operand("arg")
    if frame is None:
        return None
    if not _is_plain(frame, by, functions) or expr.operand("_slice") is not None:
        kind = type(expr._lower() if isinstance(expr, _groupby.GroupbyAggregation) else expr)
        return _aggregated_as_a_whole(expr, kind, frame, of, library)
    kind = _kind_of(expr, frozenset(functions.values()))
    names = {f"k{number}": label for number, label in enumerate(by)}
    keys = frame._replace(labels=tuple(names), columns=tuple(map(frame.at, by)))
    options = [*_options(expr), None]
    parts = list(dict.fromkeys((frame.at(label), function) for label, function in functions.items()))

    def answer(missing: list[int]) -> list[Schema | None]:
        values = {f"v{number}": parts[position] for number, position in enumerate(missing)}
        given = keys._replace(
            labels=(*keys.labels, *values),
            columns=(*keys.columns, *(column for column, _ in values.values())),
        )
        wanted = {label: function for label, (_, function) in values.items()}
        found = answered(kind, [given, wanted, *options, *names])
        if found is None or found.labels != tuple(values):
            return [None] * len(missing)
        return [found.select([label]) for label in values]

    named = [(column.key, function) for column, function in parts]
    found = library.ask_parts(kind, [keys, *options, *names], named, answer)
    if found is None:
        return None
    columns = {part: each.columns[0] for part, each in zip(parts, found, strict=True)}
    index = renamed_index(found[0].index, names)
    if index is None:
        return None
    of_labels = tuple(columns[frame.at(label), function] for label, function in functions.items())
    return found[0]._replace(labels=tuple(functions), columns=of_labels, index=index)


#: The class that an aggregation is lowered to, by its class and functions.
_LOWERED: dict[tuple[type, frozenset[str]], type] = {}


def _kind_of(expr: Any, functions: frozenset[str]) -> type:
    """Return the class of an aggregation as it is computed, which its functions, by name, decide."""
    if not isinstance(expr, _groupby.GroupbyAggregation):
        return type(expr)
    if (found := _LOWERED.get((type(expr), functions))) is None:
        found = _LOWERED[type(expr), functions] = type(expr._lower())
    return found


def _aggregated_as_a_whole(
    expr: Any, kind: type, frame: Schema, of: SchemaOf, library: Library
) -> Schema | None:
    """Ask about all aggregates at once, with those columns alone that they are made of."""
    functions, chosen = expr.operand("arg"), expr.operand("_slice")
    values = [] if chosen is None else chosen if isinstance(chosen, list) else [chosen]
    if isinstance(functions, dict):
        values = [*values, *functions]
    needed = [*expr.by, *values]
    if values and frame.is_frame and not frame.has_levels and all(type(each) is str for each in needed):
        frame = frame.select(list(dict.fromkeys(needed))) or frame
    by = [of(each) if isinstance(each, Expr) else each for each in expr.by]
    schemas = [frame, functions, *_options(expr), chosen, *by]
    return None if _lacks_schemas(schemas, expr) else library.ask(kind, schemas)


def _options(expr: Any) -> list[Any]:
    """Return the options of an aggregation, but for those that say how it is computed."""
    return [expr.operand("observed"), expr.operand("dropna"), 8, None, expr.operand("sort"), None]


def _is_plain(frame: Schema, by: list[Any], functions: Any) -> bool:
    """Return whether distinct columns are aggregated by others, each by one function that has a name."""
    if not frame.is_frame or frame.has_levels or not isinstance(functions, dict) or not functions:
        return False
    if not all(type(each) is str for each in (*by, *functions, *functions.values())):
        return False
    return not {*by} & {*functions} and frame.select([*by, *functions]) is not None and len({*by}) == len(by)


# ---- the table ------------------------------------------------------------------------------------

_OF_COLUMNS = (_expr.ColumnsSetter, _expr.Drop)
_OF_GROUPS = (
    _groupby.Count, _groupby.First, _groupby.GroupByChunk, _groupby.Last, _groupby.Max, _groupby.Mean,
    _groupby.Min, _groupby.NUnique, _groupby.Prod, _groupby.Size, _groupby.Std, _groupby.Sum, _groupby.Var,
)  # fmt: skip
#: The first is lowered to one of the others, of which it has the metadata; so is that of dask_cudf.
_AGGREGATIONS = (
    _groupby.GroupbyAggregation, _groupby.DecomposableGroupbyAggregation, _groupby.HolisticGroupbyAggregation,
)  # fmt: skip
_OF_ROWS = (
    Concat, _expr.AddPrefix, _expr.AddSuffix, _expr.DropDuplicatesBlockwise, _expr.DropnaFrame,
    _expr.DropnaSeries, _expr.ToFrame, _reductions.Chunk, _reductions.DropDuplicates,
)  # fmt: skip
_OF_ORDER = (_reductions.NFirst, _reductions.NLargest, _reductions.NSmallest)
#: The rule of each operation, by its exact class.
SCHEMAS: dict[type, Rule] = {
    **dict.fromkeys(COMPUTING.keys() - {_expr.ArrowStringConversion}, of_series),
    **dict.fromkeys((*_OF_COLUMNS, *_OF_GROUPS, *_OF_ROWS), asked),
    **dict.fromkeys(_AGGREGATIONS, aggregated),
    **dict.fromkeys((ReadParquetFSSpec, ReadParquetPyarrowFS), of_read),
    _expr.AsType: cast,
    _expr.Assign: assigned,
    **dict.fromkeys(_OF_ORDER, first_rows),
    _expr.Filter: filtered,
    _expr.Fused: of_fused,
    _expr.Isin: isin,
    _expr.Projection: projection,
    _expr.RenameAxis: with_named_index,
    _expr.RenameFrame: renamed,
    **dict.fromkeys((_shuffle.Shuffle, _shuffle.RearrangeByColumn), shuffled),
    _shuffle.AssignPartitioningIndex: targeted,
    _expr.ResetIndex: numbered,
    FusedIO: of_fused_read,
}

#: Those of classes of other packages, by name.
OTHERS: dict[str, Rule] = {
    "dask_cudf._expr.groupby:CudfGroupbyAgg": aggregated,
    "dask_cudf._expr.groupby:DecomposableCudfGroupbyAgg": aggregated,
    "dask_cudf.io.parquet:NoOp": same,
}
#: Those of the runtime's own classes, by name: they are made of what is here.
OURS: dict[str, Rule] = {
    "dask_gpurt.client.expressions:GpurtShuffle": shuffled_here,
}


@lru_cache(None)
def rule_of(kind: Any) -> Rule | None:
    """Return the rule of a class of operations; None if Dask has to describe them."""
    # Joins are lowered to subclasses of Dask and of the runtime, which have the same metadata.
    if issubclass(kind, Merge):  # but for those by the last row before, which lack their operands
        return joined if getattr_static(kind, "_meta") is getattr_static(Merge, "_meta") else None
    ours = OURS.get(f"{kind.__module__}:{kind.__name__}")
    return (
        SCHEMAS.get(kind) or ours or other_rule_of(kind) or (same if _has_that_of_its_frame(kind) else None)
    )


def _has_that_of_its_frame(kind: type) -> bool:
    """Return whether Dask computes the metadata of an operation as just those of its input."""
    code = getattr(getattr(getattr_static(kind, "_meta", None), "func", None), "__code__", None)
    known = _meta_of_frame.__code__
    return code is not None and (code.co_code, code.co_names) == (known.co_code, known.co_names)


def _meta_of_frame(self: Any) -> Any:
    return self.frame._meta


@lru_cache(None)  # looked up for each expression that is made
def other_rule_of(kind: Any) -> Rule | None:
    """Return the rule of a class of another package."""
    return OTHERS.get(f"{kind.__module__}:{kind.__name__}")
