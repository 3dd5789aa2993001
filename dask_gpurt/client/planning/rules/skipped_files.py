"""Leave out files none of whose rows can fulfil the conditions of a query, as their footers tell.

Tables are often written in the order of a date or of a number. A condition on such a column is false for all
rows of most files, which the least and the largest value in their footers tell. Dask looks at these only for
filters that are passed to a read, and for some of those above reads through Arrow's file systems.

What it does not reason about
    Groups of rows within a file. Comparisons with anything but constants. Columns of strings, whose
    statistics may be cut off, of floats, whose statistics leave out NaN, and of times with time zones. Tables
    of which the first, the last and the middle file may all have rows: these are probably not sorted, and
    reading their footers takes 0.3 ms each. Tables of more than 500 files, or in object storage.
Why the result is the same
    Only files are left out for which one of the conditions that all users of the rows check is false for all
    values between the least and the largest, and for null. The conditions stay in the plan. Results that may
    depend on how rows are divided keep all files (:mod:`.dependence`).
The figure
    ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr.io.io import FusedIO

from dask_gpurt.client.planning.footers import Footer
from dask_gpurt.client.planning.operations import is_of_pandas
from dask_gpurt.client.planning.reads import files_of_partitions, parquet_reads
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.dependence import independent_part, labels_shown
from dask_gpurt.client.planning.rules.filters import conditions_on_reads
from dask_gpurt.client.planning.table_facts import MOST_FILES
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild

#: The largest integer up to which all are exact as floats, which pandas makes of integers beside nulls.
_EXACT = 2**53
#: Compares the end of a range with a constant: whether any value in it may be less, greater and so on.
_COMPARISONS: dict[type, Callable[[Any, Any, Any], bool]] = {
    _expr.LT: lambda low, high, value: low < value,
    _expr.LE: lambda low, high, value: low <= value,
    _expr.GT: lambda low, high, value: high > value,
    _expr.GE: lambda low, high, value: high >= value,
    _expr.EQ: lambda low, high, value: low <= value <= high,
}


class SkipFiles:
    """Leave out files whose rows no condition lets through."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan that reads the files that may have rows for its result."""
        if not any(type(expr) is _expr.Filter for expr in plan.walk()):
            return plan
        bare, dependent = facts.bare(plan)
        part, kept = independent_part(bare) if dependent else (bare, frozenset[str]())
        conditions, reads = conditions_on_reads(part), parquet_reads(part)
        shown = labels_shown(part, reads)
        chosen: dict[str, Expr] = {}
        for name, read in reads.items():
            if name in kept or name not in conditions:
                continue
            if name in shown:
                facts.note(self, name, "is read as a whole: the result has numbers of its rows")
                continue
            try:
                needed = _needed(read.read, conditions[name], facts.tables.footer)
            except OSError as error:  # Dask finds out as it reads it
                facts.note(self, name, f"is read as a whole: {error!r}")
                continue
            if needed is not None:
                number = len(read.read._partitions) - len(needed)
                text = f"is read without {number} parts, whose footers say that conditions are false"
                facts.note(self, name, text, done=True)
                chosen[name] = _of_parts(read.expr, needed)
        if not chosen:
            return plan
        changed = rebuild(bare, lambda expr: chosen.get(name_of(expr), expr))
        if not dependent:
            facts.note_bare(changed)
        return changed


def _of_parts(expr: Any, parts: list[int]) -> Expr:
    if isinstance(expr, FusedIO):
        changed: Expr = expr.substitute_parameters({"_expr": _of_parts(expr.operand("_expr"), parts)})
    else:
        changed = expr.substitute_parameters({"_partitions": parts})
    return changed


def _needed(read: Any, users: list[list[Any]], footer_of: Callable[[str], Footer]) -> list[int] | None:
    """Return the partitions of a read that may have rows for one of its users; None if all may, or most."""
    files = files_of_partitions(read)
    if not files or len(set(files)) > MOST_FILES:
        return None
    is_needed: dict[str, bool] = {}

    def may_have_rows(path: str) -> bool:
        if path not in is_needed:
            footer = footer_of(path)
            is_needed[path] = any(all(_may_hold(each, footer) for each in user) for user in users)
        return is_needed[path]

    if all(map(may_have_rows, (files[0], files[len(files) // 2], files[-1]))):
        return None
    needed = [at for at, path in zip(read._partitions, files, strict=True) if may_have_rows(path)]
    return needed or list(read._partitions[:1])


def _may_hold(condition: Any, footer: Footer) -> bool:
    """Return whether a condition on a table may be true of a row of a file."""
    kind, operands = type(condition), condition.operands
    if kind in (_expr.And, _expr.Or):
        return (all if kind is _expr.And else any)(_may_hold(each, footer) for each in operands)
    if kind is _expr.Between and condition.inclusive == "both":
        column, *limits = operands[:3]
        pairs = zip((_expr.GE, _expr.LE), limits, strict=True)
        return all(_compares(column, each, limit, footer) for each, limit in pairs)
    return kind not in _COMPARISONS or _compares(operands[0], kind, operands[1], footer)


def _compares(column: Any, kind: type, value: Any, footer: Footer) -> bool:
    """Return whether a column may have a value in a file for which a comparison with a constant is true."""
    if type(column) is not _expr.Projection or isinstance(value, Expr):
        return True
    name = column.operand("columns")
    if (bounds := footer.bounds_of(name)) is None:
        return True
    if not bounds:
        return False
    constant = _exact(value) if isinstance(bounds[0], int) else _time(value, column)
    if constant is None or (isinstance(bounds[0], int) and max(map(abs, bounds)) > _EXACT):
        return True
    return _COMPARISONS[kind](*bounds, constant)


def _exact(value: Any) -> int | float | None:
    """Return a number that is the same as a float; None for any other."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return value if is_number and abs(value) <= _EXACT else None


def _time(value: Any, column: Any) -> pd.Timestamp | None:
    """Return a constant as a time that the column may have, too; None if it is none, or a text for cudf."""
    dtype = column._meta.dtype
    if not isinstance(dtype, np.dtype) or dtype.kind != "M" or pd.isna(value):
        return None
    is_text = isinstance(value, str) and is_of_pandas(column)
    if not is_text and not isinstance(value, (datetime.datetime, np.datetime64)):
        return None
    try:
        found = pd.Timestamp(value)
        rounded = found.to_numpy().astype(dtype)
    except ValueError:
        return None
    return found if found.tz is None and found == pd.Timestamp(rounded) else None
