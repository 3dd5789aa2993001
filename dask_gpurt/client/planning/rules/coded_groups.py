"""Group rows by the numbers that their keys have in files, or could have.

Of a key of strings, Parquet files have each value once, and its number in each row. Dask makes a string for
each row, and pandas finds out for each which number it has. Here strings that are only keys are read as
categories, and pandas gets the numbers, also of integers that lie close together, and of combinations of keys
(:mod:`dask_gpurt.frames.coded_groups`). Tables whose groups are made so are put together from several files
as Arrow tables, before they become a frame.

What it does not reason about
    Keys other than columns of integers and of strings, groups of nulls, and aggregations by functions of
    users. Strings that a condition uses, or another part of the plan; those of which most differ; files
    that Dask does not read with pandas, or in object storage.
Why the result is the same
    Each group has the same rows, in their order, and pandas computes the same of them. Groups are in the same
    order, with the keys that they had: what comes next gets what it got before. Partitions are Dask's.
    Nothing is relied on: whatever strings a file has, they can be read as a dictionary.
The figure
    Groups of 5 million rows by two strings take 0.34 instead of 0.97 CPU seconds, by one 0.25 instead of
    0.42, by integers 0.41 and 0.48 instead of 0.49 and 0.68 (``docs/decisions/planning.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _expr, _groupby, _reductions
from dask.dataframe.dask_expr.io.parquet import ReadParquetFSSpec

from dask_gpurt.client.planning.reads import CodedRead, is_local, read_of
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.needed_columns import listed, users_of
from dask_gpurt.client.planning.table_facts import TableFacts
from dask_gpurt.dask_hooks.dictionary_reads import reads_all
from dask_gpurt.dask_hooks.planning import Expr, metadata, name_of, rebuild
from dask_gpurt.frames.coded_groups import grouped_by_codes

#: Aggregations that need nothing of a frame but the groups of its rows, by themselves and in ``agg``.
SINGLE = frozenset(
    [_groupby.Sum, _groupby.Prod, _groupby.Min, _groupby.Max, _groupby.First, _groupby.Last]
    + [_groupby.Count, _groupby.Size, _groupby.Mean]
)
BY_NAME = frozenset(
    ["sum", "prod", "min", "max", "first", "last", "count", "size", "mean", "var", "std"]
)  # fmt: skip
#: Rows for each value of a key whose strings are read as a dictionary.
ROWS_OF_A_WORD = 3


class CodedChunk(_groupby.GroupByChunk):
    """Group the rows of each partition by numbers."""

    @property
    def operation(self) -> Any:  # type: ignore[override]
        """Return the function that is called with the rows of a partition."""
        return partial(grouped_by_codes, aggregate=self.chunk, order=bool(self._kwargs.get("sort", True)))


class CodedGroups:
    """Group rows of pandas by numbers in place of keys."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan that groups rows by numbers where that saves looking for keys."""
        users = users_of(plan.walk())

        def change(expr: Any) -> Any:
            physical = expr._lower() if type(expr) is _groupby.GroupbyAggregation else expr
            if not isinstance(physical, _groupby.GroupByBase) or not isinstance(
                physical, _reductions.ApplyConcatApply
            ):
                return expr
            if (reason := _why_by_keys(physical)) is not None:
                facts.note(self, name_of(expr), f"is grouped by its keys, since {reason}")
                return expr
            frame, words = physical.frame, _strings(physical)
            root = _root(frame, words)
            coded = _coded(root, words, facts.tables) if _is_own(root, expr, users) else None
            if coded is None and words == physical.by and len(words) == 1:
                facts.note(
                    self, name_of(expr), f"is grouped by its keys, since {words[0]} is read as strings"
                )
                return expr
            lowered: Any = physical._lower()  # type: ignore[no-untyped-call]
            read = frame if coded is None else frame.substitute(root, coded)
            how = "" if coded is None else f", read as {coded.npartitions} tables"
            facts.note(self, name_of(expr), f"is grouped by numbers for its keys{how}", done=True)
            # Others may come behind it, where groups are grouped again.
            found: Any = next(each for each in lowered.walk() if type(each) is _groupby.GroupByChunk)
            return lowered.substitute(found, CodedChunk(read, *found.operands[1:]))  # type: ignore[no-untyped-call]

        return rebuild(plan, change)


def _why_by_keys(expr: Any) -> str | None:
    """Return why groups are left to Dask; None if numbers can take the place of their keys."""
    rows = metadata(expr.frame)
    if not isinstance(rows, pd.DataFrame):
        return "its rows are not of a frame of pandas"
    if type(expr)._lower is not _reductions.ApplyConcatApply._lower:
        return "Dask groups in another way"
    keys = expr.by
    if not rows.columns.is_unique or any(isinstance(key, Expr) or key not in rows.columns for key in keys):
        return "they are other than columns"
    if len(set(keys)) < len(keys) or not all(_is_known(rows.dtypes[key]) for key in keys):
        return "they are other than integers and strings"
    if not expr.chunk_kwargs.get("dropna", True):
        return "nulls are a group"
    if isinstance(expr, _groupby.DecomposableGroupbyAggregation):
        used = [column for *_, column in expr.spec]
        is_known = all(isinstance(name, str) and name in BY_NAME for _, name, _ in expr.spec)
    else:
        is_known = type(expr) in SINGLE
        used = listed(expr.operand("_slice")) if is_known else []  # variances have no such operand
    if not is_known:
        return "an aggregation may use other than groups"
    return "a key is aggregated" if set(used) & set(keys) else None


def _is_known(dtype: Any) -> bool:
    return isinstance(dtype, pd.StringDtype) or (isinstance(dtype, np.dtype) and dtype.kind == "i")


def _strings(expr: Any) -> list[Any]:
    dtypes = metadata(expr.frame).dtypes
    return [key for key in expr.by if isinstance(dtypes[key], pd.StringDtype)]


def _root(frame: Any, words: list[Any]) -> Any | None:
    """Return the read that rows are from; None if there is another, or if a condition uses some columns."""
    names = {name_of(frame)}
    conditions = []
    while type(frame) in (_expr.Projection, _expr.Filter):
        conditions += [frame.predicate] if type(frame) is _expr.Filter else []
        frame = frame.frame
        names.add(name_of(frame))
    for condition in conditions:
        for expr in condition.walk():
            for rows in expr.dependencies():
                if name_of(rows) in names and not (
                    type(expr) is _expr.Projection and set(words).isdisjoint(listed(expr.operand("columns")))
                ):
                    return None
    return frame if isinstance(read_of(frame), ReadParquetFSSpec) else None


def _is_own(root: Any, groups: Any, users: Mapping[str, list[Any]]) -> bool:
    """Return whether only these groups are made of a read, which is read once in any case."""
    inside = {name_of(expr) for expr in groups.frame.walk()}
    using = {name_of(user) for name in inside for user in users.get(name, ())}
    return root is not None and using <= inside | {name_of(groups)}


def _coded(root: Any, words: list[Any], tables: TableFacts) -> Any | None:
    """Return a read of strings as dictionaries; None if Dask's is as good."""
    read: Any = read_of(root)
    if not is_local(read) or not reads_all(read) or isinstance(root, CodedRead):
        return None
    if any(isinstance(dtype, pd.CategoricalDtype) for dtype in metadata(read).dtypes):
        return None
    repeated = []
    for word in words:
        values = tables.values(read, word)
        if values is not None and values.distinct * ROWS_OF_A_WORD <= values.rows:
            repeated.append(word)
    is_of_several = root is not read
    return CodedRead(root, repeated) if repeated or is_of_several else None  # type: ignore[no-untyped-call]
