"""Have functions for single values and rows computed on columns, and read only the columns that they take.

``frame.apply(function, axis=1)`` takes some ten microseconds for each row, and Dask reads all columns for it.
Most such functions choose between some values by comparing columns, or do arithmetic. Their tasks compute
them on whole columns (:mod:`dask_gpurt.frames.row_functions`), and where the code of a function shows which
columns it takes from a row, the others are left out below. Functions that cannot be computed so get a plain
dictionary in place of a series for each row.

What it does not reason about
    Arguments besides the value or the row, ``na_action``, an index, frames of cudf, which compiles such
    functions. What a function returns: for other rules the result depends on partitions, as Dask's does.
Why the result is the same
    Only functions whose code cannot change anything are called another number of times. Operations on
    columns are those that have the same values as with Python's numbers; all others, and errors, leave the
    partition to pandas. Rows of strings or times beside numbers stay rows of objects if the former are left
    out, so numbers are those of Python or numpy as before.
    ``tests/unit/frames/test_row_functions.py`` compares random functions.
The figure
    A condition on each of 50,000 rows takes 4 ms instead of 440, a function with ``round`` 80 ms
    (``docs/decisions/planning.md``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _expr

from dask_gpurt.client.planning.operations import dtypes_of, is_of_pandas
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild
from dask_gpurt.dask_hooks.types import Task, TaskRef
from dask_gpurt.frames.row_functions import can_compute, columns_taken, on_columns


class ApplyOnColumns(_expr.Elemwise):
    """Compute a function for each value, or row, on columns where it can be.

    The last two operands: which method calls the function for each, and whether rows have had strings or
    times besides the columns that are left.
    """

    _parameters = ["frame", "function", "meta", "method", "is_mixed"]

    @functools.cached_property
    def _meta(self) -> Any:
        return self.operands[2]

    def _task(self, name: Any, index: int) -> Any:
        rows = TaskRef((name_of(self.frame), index))
        return Task(
            name, on_columns, rows, self.function, self.method, is_mixed=self.is_mixed, meta=self._meta
        )


class RowFunctions:
    """Compute functions of users on columns."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan in which functions that only compute do so for all rows at once."""

        def change(expr: Any) -> Any:
            if type(expr) not in (_expr.Apply, _expr.Map):
                return expr
            function = expr.function if type(expr) is _expr.Apply else expr.arg
            if (reason := _why_left(expr, function)) is not None:
                facts.note(self, name_of(expr), f"is computed for each row, since {reason}")
                return expr
            frame, is_mixed = expr.frame, None
            if frame.ndim == 2 and (taken := columns_taken(function)) and _are_objects(dtypes_of(frame)):
                names = [name for name in frame.columns if name in taken]
                if len(names) == len(taken):
                    frame, is_mixed = frame[names], True
            facts.note(self, name_of(expr), "computes a function on columns where it can be", done=True)
            made: Any = ApplyOnColumns
            method = "map" if type(expr) is _expr.Map else "apply"
            return made(frame, function, expr._meta, method, is_mixed)

        return rebuild(plan, change)


def _why_left(expr: Any, function: Any) -> str | None:
    """Return why a function is left to be called for each row; None if it need not be."""
    frame = expr.frame
    if not isinstance(function, FunctionType):
        return "it is no function of Python"
    if not is_of_pandas(frame) or type(frame) is _expr.Index or not frame.ndim:
        return "it is of an index, or of cudf"
    if type(expr) is _expr.Map:
        has_more = expr.na_action is not None
    else:
        has_more = bool(expr.args) or expr.kwargs != ({"axis": 1} if frame.ndim == 2 else {})
    if has_more:
        return "there are other arguments"
    if frame.ndim == 2 and len({*frame.columns}) < len(frame.columns):
        return "columns have the same name"
    return None if can_compute(function, frame.ndim) else "its code may do more than compute"


def _are_objects(dtypes: Iterable[Any]) -> bool:
    """Return whether values of a row are objects whichever of its columns are left beside one of strings.

    So they are if strings or times are beside numbers. Rows of times alone have one unit.
    """

    def kind_of(dtype: Any) -> str:
        kind = dtype.kind if isinstance(dtype, np.dtype) else "s" * isinstance(dtype, pd.StringDtype)
        return "n" if kind in ("i", "u", "f", "b") else kind

    return len({"n", "M", "s"} & {*map(kind_of, dtypes)}) > 1
