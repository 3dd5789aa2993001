"""Correct what Dask computes wrongly before a plan is lowered, while the runtime is on.

``docs/reference/where-dask-is-wrong.md`` shows a program for each. What is wrong about the order and the hash
of rows is corrected where plans are lowered, by :mod:`.lowering`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
import pandas as pd
from dask.base import is_dask_collection
from dask.utils import M

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.expr import (
    GroupMean,
    MeanAggregate,
    NFirst,
    NLast,
    NUnique,
    ShuffleReduce,
    Sum,
    convert_to_list,
    dtypes_of_values,
    is_first_operand,
    is_variance,
    meta,
    reads_cast,
    replace_divisions,
    replace_means,
    replace_merge,
    replace_null_groups,
    replace_reductions,
    replace_simplified,
    replace_sort,
    replace_variances,
    with_dtypes,
)
from dask_gpurt.frames.dictionary_keys import aggregate_present, is_dictionary
from dask_gpurt.frames.distinct import combine_pairs, count_values, distinct_pairs
from dask_gpurt.frames.means import float_sum, float_sums_of_groups, sums_of_groups, wraps_around
from dask_gpurt.frames.variances import float_dtype, sum_of_floats, sum_of_squared_floats


def correct_with(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Correct joins by labels that Dask takes for none, divisions, filters, sorts, and statistics of groups.

    ``is_usable``: returns whether the runtime is on for this client.
    ``patches``: restores what Dask does.
    """
    _join_by_labels(is_usable, patches)
    _see_all_partitions(is_usable, patches)
    _drop_groups_of_nulls(is_usable, patches)
    _keep_other_operands(is_usable, patches)
    _square_floats(is_usable, patches)
    _check_after_casts(is_usable, patches)
    _begin_with_nulls(is_usable, patches)
    _count_values_of_nulls(is_usable, patches)
    _sum_floats(is_usable, patches)
    _sort_by_functions(is_usable, patches)
    _repeat_no_words(is_usable, patches)


def looks_absent(label: Any) -> bool:
    """Return whether Dask takes a label for none, asking for its truth."""
    return isinstance(label, (str, Number)) and not label


def _join_by_labels(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Have collections joined by keys labelled "" or 0. Dask sees none, and takes all common columns.

    Nor does cudf see such a key, unless it is in a list.
    """

    def merge(
        original: Callable[..., Any],
        left: Any,
        right: Any,
        how: str = "inner",
        on: Any = None,
        left_on: Any = None,
        right_on: Any = None,
        left_index: bool = False,
        right_index: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        keys = [on, left_on, right_on]
        # Dask takes keys for a label where it sets the index of a frame that is no collection.
        can_list = not (left_index or right_index) or (is_dask_collection(left) and is_dask_collection(right))
        if is_usable() and can_list and any(map(looks_absent, keys)):
            keys = list(map(convert_to_list, keys))
        return original(left, right, how, *keys, left_index, right_index, *args, **kwargs)

    replace_merge(patches, merge)


def _see_all_partitions(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Have rows sorted where Dask has not seen each partition.

    Dask looks at the least and the greatest value of each partition, in order to leave rows where they are
    if they are sorted already. Where only one of many columns of Parquet files is read, it reads several
    files as one partition. Then it has seen fewer ranges than there are partitions, and they may be sorted
    although the partitions are not; or it labels partitions with ranges that are not theirs, and joins lose
    rows.
    """

    def divisions(original: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
        chosen, least, greatest, is_sorted = original(frame, *args, **kwargs)
        if is_sorted and is_usable():
            is_sorted = len(least) == frame.npartitions
        return chosen, least, greatest, is_sorted

    replace_divisions(patches, divisions)


def _drop_groups_of_nulls(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Leave out the groups whose key is null in means, variances and standard deviations.

    Dask passes on ``dropna=None`` where the user said nothing, which pandas takes for False.
    """

    def keywords(original: Callable[..., Any], expr: Any) -> Any:
        found = original(expr)
        return {**found, "dropna": True} if found["dropna"] is None and is_usable() else found

    replace_null_groups(patches, keywords)


def _keep_other_operands(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Leave a filter as it is where it is not the first operand, as on the right side of a join.

    Dask takes what the parts of a condition with ``|`` have in common out of it. It puts the new filter in
    the place of the first operand, whichever the old one was: a join then has the right side on both.
    """

    def simplified(original: Callable[..., Any], expr: Any, parent: Any, dependents: Any) -> Any:
        if is_usable() and not is_first_operand(expr, parent):
            return None
        return original(expr, parent, dependents)

    replace_simplified(patches, "Filter", simplified)


def _square_floats(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Have variances and covariances of groups of integers computed in floats, as pandas does.

    Dask squares integers, and their sums, in their own dtype, which wrap around.
    """

    def lower(original: Callable[..., Any], expr: Any) -> Any:
        if is_variance(expr) and is_usable() and (dtypes := _float_dtypes(expr)):
            return with_dtypes(expr, dtypes)
        return original(expr)

    def aggregation(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return _in_floats(found) if is_usable() else found

    replace_variances(patches, lower, aggregation)


def _check_after_casts(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Leave a filter after the cast of a column that its condition reads.

    Dask checks the condition before: ``"7"`` is no integer, and 1.5 is not equal to 1.
    """

    def simplified(original: Callable[..., Any], cast: Any, parent: Any, dependents: Any) -> Any:
        return None if reads_cast(parent, cast) and is_usable() else original(cast, parent, dependents)

    replace_simplified(patches, "AsType", simplified)


def _first(df: Any, columns: Any, n: Any, ascending: Any) -> Any:
    return df.sort_values(by=columns, ascending=ascending, na_position="first").head(n)


def _last(df: Any, columns: Any, n: Any, ascending: Any) -> Any:
    return df.sort_values(by=columns, ascending=ascending, na_position="first").tail(n)


class HeadOfNulls(NFirst):
    """Take the first rows of a sort in which nulls come first."""

    reduction_chunk = reduction_aggregate = staticmethod(_first)


class TailAfterNulls(NLast):
    """Take the last rows of a sort in which nulls come first."""

    reduction_chunk = reduction_aggregate = staticmethod(_last)


def _begin_with_nulls(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Have nulls come first in the first and last rows of a sort, where a program says so.

    Dask forgets that it does. Partitions of a sort are corrected by :mod:`.lowering`.
    """
    kinds: dict[type, Callable[..., Any]] = {NFirst: HeadOfNulls, NLast: TailAfterNulls}

    def simplified(original: Callable[..., Any], sort: Any, parent: Any, dependents: Any) -> Any:
        found = original(sort, parent, dependents)
        if type(found) not in kinds or sort.na_position != "first" or not is_usable():
            return found
        return kinds[type(found)](*found.operands)

    replace_simplified(patches, "SortValues", simplified)


class NUniqueWithNulls(NUnique):
    """Count the distinct values by group, also of the group whose key is null."""

    chunk = staticmethod(distinct_pairs)  # type: ignore[assignment]
    combine = staticmethod(combine_pairs)  # type: ignore[assignment]
    aggregate = staticmethod(count_values)  # type: ignore[assignment]


def _count_values_of_nulls(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Have ``nunique`` count in the group of nulls where ``dropna=False`` says so, which Dask forgets."""

    def lower(original: Callable[..., Any], expr: Any) -> Any:
        if type(expr) is NUnique and expr.dropna is False and is_usable() and _is_of_pandas(expr.frame):
            expr = NUniqueWithNulls(*expr.operands)
        return original(expr)

    replace_reductions(patches, lower)


def _is_of_pandas(frame: Any) -> bool:
    return isinstance(meta(frame), (pd.DataFrame, pd.Series))


class FloatSum(Sum):
    """Sum up integers in floats."""

    reduction_chunk = staticmethod(float_sum)
    reduction_aggregate = Sum.reduction_chunk


def _sums_and_counts(rows: Any, *by: Any, **options: Any) -> Any:
    return float_sums_of_groups(GroupMean.chunk(rows, *by, **options), rows, *by, **options)


class MeanOfFloatSums(GroupMean):
    """Compute means by groups from sums in floats."""

    chunk = staticmethod(_sums_and_counts)  # type: ignore[assignment]


def _sum_floats(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Have means of integers computed from sums in floats, as pandas does.

    Dask divides sums of integers, which wrap around: already for five times in nanoseconds.
    """

    def lower(original: Callable[..., Any], expr: Any) -> Any:
        found = original(expr)
        if type(found) is not MeanAggregate or type(found.frame) is not Sum or not is_usable():
            return found
        if not _sums_wrap(expr):
            return found
        total = FloatSum(*found.frame.operands)
        return MeanAggregate(total, found.counter)

    def lower_groups(original: Callable[..., Any], expr: Any) -> Any:
        if type(expr) is GroupMean and is_usable() and wraps_around(meta(expr.frame)):
            expr = MeanOfFloatSums(*expr.operands)
        return original(expr)

    def aggregation(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return _from_float_sums(found) if is_usable() else found

    replace_means(patches, lower, aggregation)
    replace_reductions(patches, lower_groups)


def _sums_wrap(mean: Any) -> bool:
    """Return whether sums of a series, or of a frame of nothing but numbers, may wrap around."""
    of = meta(mean.frame)
    if of.ndim == 1 or not wraps_around(of):
        return wraps_around(of)
    summed = of.select_dtypes(["number", "bool"]) if mean.numeric_only else of
    return of.columns.is_unique and all(
        isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in summed.dtypes
    )


def _from_float_sums(steps: dict[str, Any]) -> dict[str, Any]:
    """Return the steps of a mean with sums in floats, beside which those of integers may be wanted."""
    (total, _, of_total), count = steps["chunk_funcs"]
    (_, add, of_sums), *others = steps["aggregate_funcs"]
    label, finish, names = steps["finalizer"]
    floats = f"{total}-of-mean"
    return {
        "chunk_funcs": [(floats, sums_of_groups, {"column": of_total["column"]}), count],
        "aggregate_funcs": [(floats, add, {**of_sums, "column": floats}), *others],
        "finalizer": (label, finish, {**names, "sum_column": floats}),
    }


def _sort_by_functions(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Have rows sorted by what ``key`` returns for their columns. Dask takes it for an option of shuffles.

    The function is one of whole columns, so that there is one partition.
    """

    def sort(
        original: Callable[..., Any], frame: Any, by: Any, *args: Any, key: Any = None, **kwargs: Any
    ) -> Any:
        unlike = {"sort_function", "sort_function_kwargs"} & kwargs.keys()
        if key is None or args or unlike or not is_usable() or not isinstance(meta(frame), pd.DataFrame):
            return original(frame, by, *args, **({} if key is None else {"key": key}), **kwargs)
        original(frame, by, **kwargs)  # raises what Dask raises
        order = {
            name: kwargs[name] for name in ("ascending", "na_position", "ignore_index") if name in kwargs
        }
        return frame.repartition(npartitions=1).map_partitions(
            M.sort_values, by=by, key=key, meta=meta(frame), **order
        )

    replace_sort(patches, sort)


def _repeat_no_words(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Have groups by a dictionary of Arrow once where their keys are shuffled.

    To pandas each word of a dictionary is a group, with rows or without, and each partition has all words.
    """

    def lower(original: Callable[..., Any], expr: Any) -> Any:
        lowered = original(expr)
        if type(lowered) is not ShuffleReduce or not is_usable() or not is_dictionary(meta(lowered)):
            return lowered
        present = partial(aggregate_present, lowered.aggregate)
        return lowered.substitute_parameters({"aggregate": present})

    replace_reductions(patches, lower)


def _float_dtypes(variance: Any) -> Any:
    """Return the dtypes of floats for the integers that are no keys; empty or None if there are none."""
    of_values = dtypes_of_values(variance)
    if not isinstance(of_values, dict):
        return float_dtype(of_values)
    found = {label: float_dtype(dtype) for label, dtype in of_values.items()}
    return {label: dtype for label, dtype in found.items() if dtype is not None}


def _in_floats(steps: dict[str, Any]) -> dict[str, Any]:
    """Return the steps of a variance with sums of floats, beside which those of integers may be wanted."""
    (total, _, of_total), count, (squares, _, of_squares) = steps["chunk_funcs"]
    label, finish, names = steps["finalizer"]
    floats = f"{total}-floats"
    chunks = [(floats, sum_of_floats, {"column": of_total["column"]}), count]
    first, *others = steps["aggregate_funcs"]
    return {
        "chunk_funcs": [*chunks, (squares, sum_of_squared_floats, of_squares)],
        "aggregate_funcs": [(floats, first[1], {**first[2], "column": floats}), *others],
        "finalizer": (label, finish, {**names, "sum_column": floats}),
    }
