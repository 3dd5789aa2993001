"""Keep filters by ``!=`` out of reads through Arrow's file systems, which would lose rows.

With ``filesystem="arrow"`` Dask makes a filter right above a read the ``filters`` of the read. NaN is unequal
to any value in pandas, but null in Arrow, which drops it: of 400 floats with 58 NaN, ``x != 3`` keeps 399,
and Dask's plan 341. As the negation of ``==`` such a condition stays above the read.

What it does not reason about
    Comparisons that Arrow does alike: all others, those of cudf, and of dtypes for which a comparison with
    null is null.
Why the result is the same
    A value of these dtypes is either equal or unequal to another one, and NaN is unequal.
The figure
    Rows, not seconds (``docs/reference/where-dask-is-wrong.md``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr.io.parquet import ReadParquetPyarrowFS

from dask_gpurt.client.planning.operations import is_of_pandas
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild, with_operand


class Unequal:
    """Say ``!=`` as the negation of ``==`` where tables are read through Arrow's file systems."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan whose filters by ``!=`` stay above reads."""
        if not any(isinstance(expr, ReadParquetPyarrowFS) for expr in plan.walk()):
            return plan

        def change(expr: Any) -> Any:
            if type(expr) is not _expr.Filter:
                return expr
            if (predicate := rebuild(expr.predicate, _negated)) is not expr.predicate:
                text = "has a condition by !=, which stays above reads: Arrow drops NaN"
                facts.note(self, name_of(expr), text, done=True)
            return with_operand(expr, "predicate", predicate)

        return rebuild(plan, change)


def _negated(expr: Any) -> Any:
    if type(expr) is not _expr.NE or isinstance(expr.right, Expr) or not _takes_nan(expr.left):
        return expr
    is_equal: Any = _expr.EQ
    return _expr.Invert(is_equal(expr.left, expr.right))


def _takes_nan(column: Any) -> bool:
    """Return whether a column of pandas has NaN for null."""
    if not is_of_pandas(column):
        return False
    dtype = column._meta.dtype
    return isinstance(dtype, np.dtype) or getattr(dtype, "na_value", None) is np.nan
