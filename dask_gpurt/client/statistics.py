"""Correct statistics: means, variances, distinct values, groups of nulls and of words, running values.

:mod:`.corrections` installs this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _cumulative
from dask.dataframe.dask_expr._groupby import Cov, NUnique, Var
from dask.dataframe.dask_expr._groupby import Mean as GroupMean
from dask.dataframe.dask_expr._reductions import MeanAggregate, ShuffleReduce, Sum

from dask_gpurt.dask_hooks.types import add_totals_before
from dask_gpurt.frames import statistics


def _drop_groups_of_nulls(original: Callable[..., Any], expr: Any) -> Any:
    """Leave out the groups whose key is null in means, variances and standard deviations.

    Dask passes on ``dropna=None`` where the user said nothing, which pandas takes for False.
    """
    found = original(expr)
    return {**found, "dropna": True} if found["dropna"] is None else found


def _square_floats(original: Callable[..., Any], expr: Any) -> Any:
    """Compute variances and covariances of groups of integers in floats, as pandas does.

    Dask squares integers, and their sums, in their own dtype, which wrap around.
    """
    if isinstance(expr, (Var, Cov)) and (dtypes := _float_dtypes(expr)):
        return type(expr)(expr.frame.astype(dtypes), *expr.operands[1:])
    return original(expr)


def _float_dtypes(variance: Any) -> Any:
    """Return the dtypes of floats for the integers that are no keys; empty or None if there are none."""
    meta = variance.frame._meta
    if meta.ndim == 1:
        return statistics.float_dtype(meta.dtype)
    values = ((label, dtype) for label, dtype in meta.dtypes.items() if label not in variance._by_columns)
    return {label: found for label, dtype in values if (found := statistics.float_dtype(dtype)) is not None}


def _square_floats_of_steps(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    steps = _sum_floats_of_steps(original, *args, **kwargs)
    *others, (squares, _, of_squares) = steps["chunk_funcs"]
    return {**steps, "chunk_funcs": [*others, (squares, statistics.sum_of_squared_floats, of_squares)]}


class NUniqueWithNulls(NUnique):
    """Count the distinct values by group, also of the group whose key is null."""

    chunk = staticmethod(statistics.distinct_pairs)  # type: ignore[assignment]
    combine = staticmethod(statistics.combine_pairs)  # type: ignore[assignment]
    aggregate = staticmethod(statistics.count_values)  # type: ignore[assignment]


def _count_values_of_nulls(original: Callable[..., Any], expr: Any) -> Any:
    """Have ``nunique`` count in the group of nulls where ``dropna=False`` says so, which Dask forgets."""
    if (
        type(expr) is NUnique
        and expr.dropna is False
        and isinstance(expr.frame._meta, (pd.DataFrame, pd.Series))
    ):
        expr = NUniqueWithNulls(*expr.operands)
    return original(expr)


def _begin_after_nulls(original: Callable[..., Any], expr: Any) -> Any:
    """Have running values of groups begin with the first value, after partitions with nothing but nulls.

    Dask adds the null that is the total of these.
    """
    changed = {add_totals_before: statistics.add_known_totals}
    return {
        key: (changed[task[0]], *task[1:]) if task[0] in changed else task
        for key, task in original(expr).items()
    }


class FloatSum(Sum):
    """Sum up integers in floats."""

    reduction_chunk = staticmethod(statistics.float_sum)
    reduction_aggregate = Sum.reduction_chunk


def _sums_and_counts(rows: Any, *by: Any, **options: Any) -> Any:
    return statistics.float_sums_of_groups(GroupMean.chunk(rows, *by, **options), rows, *by, **options)


class MeanOfFloatSums(GroupMean):
    """Compute means by groups from sums in floats."""

    chunk = staticmethod(_sums_and_counts)  # type: ignore[assignment]


def _sum_floats(original: Callable[..., Any], expr: Any) -> Any:
    """Compute means of integers from sums in floats, as pandas does.

    Dask divides sums of integers, which wrap around: already for five times in nanoseconds.
    """
    found = original(expr)
    if type(found) is not MeanAggregate or type(found.frame) is not Sum or not _sums_wrap(expr):
        return found
    return MeanAggregate(FloatSum(*found.frame.operands), found.counter)


def _sum_floats_of_groups(original: Callable[..., Any], expr: Any) -> Any:
    if type(expr) is GroupMean and statistics.wraps_around(expr.frame._meta):
        expr = MeanOfFloatSums(*expr.operands)
    return original(expr)


def _sum_floats_of_steps(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the steps of a mean or variance with sums in floats, beside which a program may want others."""
    steps = original(*args, **kwargs)
    (total, _, of_total), *chunks = steps["chunk_funcs"]
    (_, add, of_sums), *others = steps["aggregate_funcs"]
    label, finish, names = steps["finalizer"]
    floats = f"{total}-floats"
    return {
        "chunk_funcs": [(floats, statistics.sums_of_groups, {"column": of_total["column"]}), *chunks],
        "aggregate_funcs": [(floats, add, {**of_sums, "column": floats}), *others],
        "finalizer": (label, finish, {**names, "sum_column": floats}),
    }


def _sums_wrap(mean: Any) -> bool:
    """Return whether sums of a series, or of a frame of nothing but numbers, may wrap around."""
    of = mean.frame._meta
    if of.ndim == 1 or not statistics.wraps_around(of):
        return statistics.wraps_around(of)
    summed = of.select_dtypes(["number", "bool"]) if mean.numeric_only else of
    return of.columns.is_unique and all(
        isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in summed.dtypes
    )


def _repeat_no_words(original: Callable[..., Any], expr: Any) -> Any:
    """Have groups by categories, or a dictionary of Arrow, once where their keys are shuffled.

    To pandas each word is a group, with rows or without. All are made before the shuffle, so that those which
    come to a partition are those that belong there; Dask makes all of them again in each.
    """
    lowered = original(expr)
    if type(lowered) is not ShuffleReduce:
        return lowered
    if statistics.is_dictionary(lowered._meta):
        return lowered.substitute_parameters(
            {"aggregate": partial(statistics.aggregate_present, lowered.aggregate)}
        )
    options = lowered.aggregate_kwargs
    if options.get("observed") is False and not isinstance(expr, NUnique):  # which makes those with rows only
        return lowered.substitute_parameters({"aggregate_kwargs": {**options, "observed": True}})
    return lowered


_KINDS: dict[type, str] = {
    _cumulative.CumSum: "sum",
    _cumulative.CumProd: "prod",
    _cumulative.CumMin: "min",
    _cumulative.CumMax: "max",
}


class LastRow(_cumulative.TakeLast):
    """Take the last running values of each partition as one row, or none."""

    operation = staticmethod(statistics.last_row)


class GoOn(_cumulative.CumulativeFinalize):
    """Go on in each partition with the running values of those before it."""

    _parameters = ["frame", "previous_partitions", "kind", "skipna"]

    def _layer(self) -> dict[Any, Any]:
        values, last, how = self.frame._name, self.previous_partitions._name, (self.kind, self.skipna)
        tasks: dict[Any, Any] = {(self._name, 0): (values, 0)}
        total: Any = (last, 0)
        for number in range(1, self.frame.npartitions):
            if number > 1:
                before, total = total, (f"{self._name}-total", number)
                tasks[total] = (statistics.total_so_far, (last, number - 1), before, *how)
            tasks[self._name, number] = (statistics.go_on, (values, number), total, *how)
        return tasks


def _go_on_after_nothing(original: Callable[..., Any], expr: Any) -> Any:
    """Go on after partitions without rows, as filters leave them, or without values in a column.

    Running sums of frames become null there with Dask, and least and greatest values too, or they raise.
    """
    kind = _KINDS.get(type(expr))
    if kind is None or not isinstance(expr.frame._meta, (pd.DataFrame, pd.Series)):
        return original(expr)
    values = _cumulative.CumulativeBlockwise(expr.frame, expr.axis, expr.skipna, expr.chunk_operation)
    make, take = cast(Any, GoOn), cast(Any, LastRow)
    return make(values, take(values, expr.skipna), kind, expr.skipna)


#: What each corrects, by its name in Dask. Of several for one, the last one calls those before it.
STATISTICS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("CumulativeAggregations._lower", _go_on_after_nothing),
    ("GroupByReduction.chunk_kwargs", _drop_groups_of_nulls),
    ("GroupByReduction.combine_kwargs", _drop_groups_of_nulls),
    ("GroupByReduction.aggregate_kwargs", _drop_groups_of_nulls),
    ("ApplyConcatApply._lower", _square_floats),
    ("_build_agg_args_var", _square_floats_of_steps),
    ("ApplyConcatApply._lower", _count_values_of_nulls),
    ("Mean._lower", _sum_floats),
    ("_build_agg_args_mean", _sum_floats_of_steps),
    ("ApplyConcatApply._lower", _sum_floats_of_groups),
    ("GroupByCumulativeFinalizer._layer", _begin_after_nulls),
    ("ApplyConcatApply._lower", _repeat_no_words),
)
