"""Correct what Dask computes wrongly before a plan is lowered, while the runtime is on.

``docs/reference/where-dask-is-wrong.md`` shows a program for each. What is wrong about the order and the hash
of rows is corrected where plans are lowered, by :mod:`.lowering`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from numbers import Number
from typing import Any

import pandas as pd
from dask.base import is_dask_collection
from dask.dataframe import Series
from dask.dataframe.dask_expr import _expr
from dask.dataframe.dask_expr._groupby import GroupByApply
from dask.dataframe.dask_expr._merge import Merge
from dask.dataframe.dask_expr._reductions import NFirst, NLast
from dask.dataframe.dask_expr._shuffle import BaseSetIndexSortValues, ShuffleBase
from dask.utils import M, is_series_like

from dask_gpurt.client.chosen_rows import CHOICES
from dask_gpurt.client.statistics import STATISTICS
from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.planning import name_of, shuffled_by_index
from dask_gpurt.dask_hooks.seams import EXPRESSIONS
from dask_gpurt.dask_hooks.types import convert_to_list

_FILTERS = (_expr.Filter, _expr.FilterAlign)


def correct_with(is_usable: Callable[[], bool], patches: PatchSet) -> None:
    """Correct joins by labels that Dask takes for none, divisions, filters, sorts, and statistics of groups.

    ``is_usable``: returns whether the runtime is on for this client.
    ``patches``: restores what Dask does.
    """

    def while_on(correct: Callable[..., Any]) -> Callable[..., Any]:
        def corrected(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return correct(original, *args, **kwargs) if is_usable() else original(*args, **kwargs)

        return corrected

    for name, correct in CORRECTIONS:
        patches.replace_in(EXPRESSIONS, {name: while_on(correct)})


def looks_absent(label: Any) -> bool:
    """Return whether Dask takes a label for none, asking for its truth."""
    return isinstance(label, (str, Number)) and not label


def _join_by_labels(
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
    """Join by keys labelled "" or 0. Dask sees none, and takes all common columns.

    Nor does cudf see such a key, unless it is in a list.
    """
    keys = [on, left_on, right_on]
    # Dask takes keys for a label where it sets the index of a frame that is no collection.
    can_list = not (left_index or right_index) or (is_dask_collection(left) and is_dask_collection(right))
    if can_list and any(map(looks_absent, keys)):
        keys = list(map(convert_to_list, keys))
    return original(left, right, how, *keys, left_index, right_index, *args, **kwargs)


def _see_all_partitions(original: Callable[..., Any], frame: Any, *args: Any, **kwargs: Any) -> Any:
    """Have rows sorted where Dask has not seen each partition.

    Dask looks at the least and the greatest value of each partition, in order to leave rows where they are
    if they are sorted already. Where only one of many columns of Parquet files is read, it reads several
    files as one partition. Then it has seen fewer ranges than there are partitions, and they may be sorted
    although the partitions are not; or it labels partitions with ranges that are not theirs, and joins lose
    rows.
    """
    chosen, least, greatest, is_sorted = original(frame, *args, **kwargs)
    return chosen, least, greatest, len(least) == frame.npartitions if is_sorted else is_sorted


def _keep_other_operands(original: Callable[..., Any], expr: Any, parent: Any, dependents: Any) -> Any:
    """Leave a filter as it is where it is not the first operand, as on the right side of a join.

    Dask takes what the parts of a condition with ``|`` have in common out of it. It puts the new filter in
    the place of the first operand, whichever the old one was: a join then has the right side on both.
    """
    is_first = getattr(parent.operands[0], "_name", None) == expr._name
    return original(expr, parent, dependents) if is_first else None


def _keep_sides_of_joins(original: Callable[..., Any], expr: Any, parent: Any, dependents: Any) -> Any:
    """Leave a filter above a join that keeps the other side's rows without a match.

    Where both sides have a column, of which that of the left side alone gets a suffix, Dask takes a condition
    on that of the right side for one on the left, which may pass the join. It then puts it on the right side:
    rows whose matches it leaves out come back with nulls.
    """
    found = original(expr, parent, dependents)
    if isinstance(parent, _expr.Filter) and isinstance(found, Merge) and expr.how in ("left", "right"):
        kept = (getattr(each, expr.how)._name for each in (expr, found))
        return None if next(kept) == next(kept) else found
    return found


def _keep_column_of_mapping(original: Callable[..., Any], expr: Any, parent: Any, dependents: Any) -> Any:
    """Have values filled, replaced or rounded by columns also if a program wants one of these alone.

    Dask does so with that column as a series, of which pandas looks for the labels of rows in the mapping.
    """
    found = original(expr, parent, dependents)
    is_by_columns = type(expr) in _BY_COLUMNS and any(isinstance(each, Mapping) for each in expr.operands[1:])
    if not is_by_columns or type(found) is not type(expr) or (found.ndim, expr.ndim) != (1, 2):
        return found
    name = parent.operand("columns")
    if len(expr.frame.columns) == 1:
        return None
    return _expr.Projection(type(expr)(expr.frame[[name]], *expr.operands[1:]), name)


_BY_COLUMNS = (_expr.Fillna, _expr.Replace, _expr.Round)


def _filter_in_turn(original: Callable[..., Any], expr: Any, parent: Any, dependents: Any) -> Any:
    """Leave two filters where the condition of the second one is on rows that the first has left.

    Dask makes one filter of two, and takes the first out of the condition of the second. If that is already
    a filter of a column there, Dask does not see it: of the two conditions, one then has fewer rows, and
    pandas raises where labels of rows repeat, as in files that one task reads. Nor does pandas combine a
    condition that is masked with one of Arrow.
    """
    found = original(expr, parent, dependents)
    is_one_of_two = isinstance(parent, _FILTERS) and isinstance(found, _FILTERS)
    if is_one_of_two and found.frame._name == expr.frame._name:
        kinds = {type(each._meta.dtype) for each in (expr.predicate, parent.predicate)}
        if kinds == {pd.BooleanDtype, pd.ArrowDtype} or _is_filtered(found.predicate.operands[1]):
            return None
    return found


def _is_filtered(condition: Any) -> bool:
    """Return whether a condition has the rows of a filter, as far as it is made row by row."""
    waiting = [condition]
    while waiting:
        each = waiting.pop()
        if isinstance(each, _FILTERS):
            return True
        if isinstance(each, _expr.Elemwise):
            waiting += [found for found in each.dependencies() if found.ndim]
    return False


def _need_whole_frames(original: Callable[..., Any], expr: Any) -> Any:
    """Need all columns of the frame that an operation is on, also if its result has others.

    Dask looks for those of the result, and leaves out the rest where something else is made of the frame, but
    not for this operation. So there are two reads of a table, and it may put files together in one of them
    only: where both meet, it raises AssertionError.
    """
    needed = original(expr)
    if not isinstance(expr, _expr.Blockwise) or isinstance(expr, (_expr.Projection, _expr.Index)):
        return needed
    return [*needed, *chain.from_iterable(each.columns for each in expr.dependencies() if each.ndim == 2)]


def _check_after_casts(original: Callable[..., Any], cast: Any, parent: Any, dependents: Any) -> Any:
    """Leave a filter after the cast of a column that its condition reads.

    Dask checks the condition before: ``"7"`` is no integer, and 1.5 is not equal to 1.
    """
    if isinstance(parent, _expr.Filter):
        dtypes, name, condition = cast.operand("dtypes"), cast._name, parent.predicate
        changed = set(dtypes) if isinstance(dtypes, Mapping) else set(cast.columns)
        users = (each for each in condition.walk() if name in (below._name for below in each.dependencies()))
        reads = any(not isinstance(each, _expr.Projection) or changed & {*each.columns} for each in users)
        if reads or condition._name == name:
            return None
    return original(cast, parent, dependents)


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


def _begin_with_nulls(original: Callable[..., Any], sort: Any, parent: Any, dependents: Any) -> Any:
    """Have nulls come first in the first and last rows of a sort, where a program says so.

    Dask forgets that it does. Partitions of a sort are corrected by :mod:`.lowering`.
    """
    kinds: dict[type, Callable[..., Any]] = {NFirst: HeadOfNulls, NLast: TailAfterNulls}
    found = original(sort, parent, dependents)
    if type(found) not in kinds or sort.na_position != "first":
        return found
    return kinds[type(found)](*found.operands)


def _sort_by_functions(
    original: Callable[..., Any], frame: Any, by: Any, *args: Any, key: Any = None, **kwargs: Any
) -> Any:
    """Sort rows by what ``key`` returns for their columns. Dask takes it for an option of shuffles.

    The function is one of whole columns, so that there is one partition.
    """
    unlike = {"sort_function", "sort_function_kwargs"} & kwargs.keys()
    if key is None or args or unlike or not isinstance(frame._meta, pd.DataFrame):
        return original(frame, by, *args, **({} if key is None else {"key": key}), **kwargs)
    original(frame, by, **kwargs)  # raises what Dask raises
    order = {name: kwargs[name] for name in ("ascending", "na_position", "ignore_index") if name in kwargs}
    return frame.repartition(npartitions=1).map_partitions(
        M.sort_values, by=by, key=key, meta=frame._meta, **order
    )


def _name_values(original: Callable[..., Any], expr: Any) -> Any:
    """Have values without a name, as sizes of groups are, shuffled under one beside their labels.

    cudf calls a column without a name NaN among others of strings, and Dask looks for it by that.
    """
    both = (expr.frame._meta, expr._meta)
    if not all(is_series_like(each) and each.name is None for each in both):
        return original(expr)
    named = _expr.RenameSeries(expr.frame, "__values__")
    lowered = original(expr.substitute_parameters({"frame": named}))
    return _expr.RenameSeries(lowered, None)


def _keep_conditions_on_labels(
    original: Callable[..., Any], resets: Any, parent: Any, dependents: Any
) -> Any:
    """Leave a filter above the columns that labels become, where its condition reads these.

    Dask has the index in their place, which has other methods, and no labels for what it is compared beside.
    """
    if isinstance(parent, _expr.Filter) and not resets.drop:
        own = {*resets.frame.columns}
        for each in parent.predicate.walk():
            reads = isinstance(each, _expr.Projection) and name_of(each.frame) == name_of(resets)
            if reads and not {*each.columns} <= own:
                return None
    return original(resets, parent, dependents)


def _keep_labels_of_values(original: Callable[..., Any], resets: Any, parent: Any, dependents: Any) -> Any:
    """Leave a column that labels of a series become, and drop these where only its values are wanted.

    Dask returns the values in place of one of several. It compares with ``resets.name``, which is a column
    where a program groups by one of that name.
    """
    if not isinstance(parent, _expr.Projection) or resets.frame.ndim != 1 or resets.drop:
        return original(resets, parent, dependents)
    wanted, values = parent.operand("columns"), resets.frame._meta
    if isinstance(wanted, list) or wanted != values.name or wanted in ("index", *values.index.names):
        return None
    users = [each() for each in dependents[resets._name]]
    is_all = all(isinstance(each, _expr.Projection) and each.operand("columns") == wanted for each in users)
    return resets.substitute_parameters({"drop": True}) if is_all else None


def _align_what_functions_return(original: Callable[..., Any], frame: Any, **pairs: Any) -> Any:
    """Have a column that a function returns aligned with the frame, as one that is given.

    Dask puts partitions side by side, also if a shuffle has divided the rows of one differently.
    """
    if not any(map(callable, pairs.values())):
        return original(frame, **pairs)
    for label, value in pairs.items():
        if callable(value):
            found = value(frame)
            moved = isinstance(found, Series) and bool(_moves(found.expr, since=frame.expr))
            value = found if moved else lambda _, found=found: found
        frame = original(frame, **{label: value})
    return frame


def _assign_in_place(original: Callable[..., Any], later: Any, earlier: Any) -> Any:
    """Leave a column that is assigned twice where it is, as pandas does, where one assignment is made of two.

    Dask puts it behind all others, and the result has another order of columns than the collection says.
    """
    if not {*later.keys} & {*earlier.keys}:
        return original(later, earlier)
    pairs = dict(zip([*earlier.keys, *later.keys], [*earlier.vals, *later.vals], strict=True))
    return [earlier.frame, *chain.from_iterable(pairs.items())]


def _align_by_labels(original: Callable[..., Any], expr: Any) -> Any:
    """Have rows of two frames meet by their labels, where divisions are unknown and a shuffle has moved some.

    Dask takes divisions that are unknown for equal if there are as many.
    """
    frames = expr.args
    unknown = len(frames) == 2 and not all(frame.known_divisions for frame in frames)
    if not unknown or all(frame.divisions == (None, None) for frame in frames):
        return original(expr)
    dtypes = {frame._meta.index.dtype for frame in frames}
    if len(dtypes) > 1 or _moves(frames[0]) == _moves(frames[1]):
        return original(expr)
    return shuffled_by_index(expr)


def _moves(expr: Any, since: Any = None) -> set[str]:
    """Return the names of the operations that have divided the rows of an expression as they are.

    ``since``: an expression below which nothing counts.
    """
    waiting, found = [expr], set[str]()
    seen = set() if since is None else {name_of(since)}
    while waiting:
        each = waiting.pop()
        if each.ndim == 0 or name_of(each) in seen:  # each partition gets the same scalar
            continue
        seen.add(name_of(each))
        if isinstance(each, GroupByApply):
            is_move = each.need_to_shuffle
        else:
            is_move = isinstance(each, (ShuffleBase, BaseSetIndexSortValues))
        if is_move:
            found.add(name_of(each))
        else:
            waiting += each.dependencies()
    return found


#: What each corrects, by its name in Dask. Of several for one, the last one calls those before it.
CORRECTIONS: tuple[tuple[str, Callable[..., Any]], ...] = (
    *CHOICES,
    *STATISTICS,
    ("merge", _join_by_labels),
    ("_get_divisions", _see_all_partitions),
    ("Filter._simplify_up", _keep_other_operands),
    ("Merge._simplify_up", _keep_sides_of_joins),
    ("Elemwise._simplify_up", _keep_column_of_mapping),
    ("Filter._simplify_up", _filter_in_turn),
    ("Expr._projection_columns", _need_whole_frames),
    ("AsType._simplify_up", _check_after_casts),
    ("SortValues._simplify_up", _begin_with_nulls),
    ("ResetIndex._simplify_up", _keep_conditions_on_labels),
    ("ResetIndex._simplify_up", _keep_labels_of_values),
    ("DataFrame.sort_values", _sort_by_functions),
    ("ShuffleReduce._lower", _name_values),
    ("DataFrame.assign", _align_what_functions_return),
    ("Assign._remove_common_columns", _assign_in_place),
    ("OpAlignPartitions._lower", _align_by_labels),
)
