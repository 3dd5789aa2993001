"""Correct which rows, values and columns Dask chooses, by their order or by what a program wants of them.

These are the first, last, largest and least rows of a frame, the most frequent values, the labels of the
greatest values of groups, and the columns that these and groups need. :mod:`.corrections` installs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pandas as pd
from dask.dataframe.dask_expr._expr import Head, Projection, ResetIndex, determine_column_projection
from dask.dataframe.dask_expr._groupby import IdxMax, IdxMin
from dask.dataframe.dask_expr._reductions import NLargest, NSmallest, ValueCounts
from pandas.api.types import is_numeric_dtype

from dask_gpurt.dask_hooks.types import convert_to_list
from dask_gpurt.frames.statistics import choose_labels, combine_labels, labels_of_groups


def _choose_by_function(original: Callable[..., Any], frame: Any, wanted: Any) -> Any:
    """Have a function of a frame say what is wanted of it, as pandas does.

    Dask takes it for a label: the number of rows is then that of all, and anything else raises.
    """
    return original(frame, wanted(frame) if callable(wanted) else wanted)


def _keep_columns_of_order(original: Callable[..., Any], expr: Any, parent: Any, dependents: Any) -> Any:
    """Leave the columns by which first, last, largest or least rows are chosen until they are.

    Where a program then wants some columns, Dask leaves out the others before, and raises KeyError.
    """
    if not (isinstance(expr, NLargest) and isinstance(parent, Projection)) or expr.frame.ndim == 1:
        return original(expr, parent, dependents)
    order = convert_to_list(expr.operand("_columns"))
    found: Any = determine_column_projection(expr, parent, dependents, additional_columns=order)
    needed = {*found} if isinstance(found, list) else {found}  # one label for a series
    columns = [label for label in expr.frame.columns if label in needed]
    if len(columns) == len(expr.frame.columns) or len({*columns}) < len(columns):
        return None
    return type(parent)(type(expr)(expr.frame[columns], *expr.operands[1:]), *parent.operands[1:])


def _aggregate_columns_needed(original: Callable[..., Any], groups: Any, parent: Any, dependents: Any) -> Any:
    """Have groups of chosen columns aggregate those of them that are needed later.

    Dask leaves out the others before, and raises KeyError, as it has still chosen them.
    """
    found = original(groups, parent, dependents)
    if found is None or "_slice" not in groups._parameters or not isinstance(groups.operand("_slice"), list):
        return found
    fewer = found.operands[0]
    needed = [label for label in groups.operand("_slice") if label in fewer.frame.columns]
    return type(parent)(fewer.substitute_parameters({"_slice": needed}), *parent.operands[1:])


def _take_most_frequent(original: Callable[..., Any], head: Any) -> Any:
    """Take the first of all values counted, the most frequent ones.

    Dask divides the values by their hash into partitions that are in no order, unless a program asks for one,
    and takes what is in the first of them.
    """
    counts = head.frame
    if type(head) is not Head or head.n < 0:
        return original(head)
    if type(counts) is ResetIndex and _are_counts(counts.frame):
        first = Head(counts.frame, *head.operands[1:])
        return ResetIndex(first, *counts.operands[1:])
    if _are_counts(counts):
        kind: Callable[..., Any] = NSmallest if counts.ascending else NLargest
        return kind(counts, head.n)
    return original(head)


def _are_counts(expr: Any) -> bool:
    """Return whether an expression counts values, in the order that pandas has by default."""
    return type(expr) is ValueCounts and expr.sort is None


class LabelOfLeast(IdxMin):
    """Find the label of the least value in each group of all partitions."""

    chunk = staticmethod(labels_of_groups)  # type: ignore[assignment]
    combine = staticmethod(combine_labels)
    aggregate = staticmethod(choose_labels)  # type: ignore[assignment]
    _least = True

    @property
    def chunk_kwargs(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the columns of which there are labels, and how groups are made."""
        chosen, frame = self._slice, self.frame
        names = [each for each in frame.columns if frame.ndim == 1 or each not in self._by_columns]
        names = names if chosen is None else chosen if isinstance(chosen, list) else [chosen]
        given = cast(Any, self).operand("chunk_kwargs") or {}
        if given.get("numeric_only"):
            names = [name for name in names if is_numeric_dtype(frame._meta.dtypes[name])]
        options = {"observed": self.observed, "dropna": self.dropna, "skipna": given.get("skipna")}
        known = {name: value for name, value in options.items() if value is not None}
        return {"names": names, "least": self._least, **known}

    @property
    def combine_kwargs(self) -> dict[str, Any]:  # type: ignore[override]
        """Return how groups of several partitions are made."""
        of_chunks = ("names", "skipna")
        options = {name: value for name, value in self.chunk_kwargs.items() if name not in of_chunks}
        return {"levels": self.levels, **options}

    @property
    def aggregate_kwargs(self) -> dict[str, Any]:  # type: ignore[override]
        """Return what the result is, and the order of groups."""
        chosen = self._slice
        is_frame = self.frame.ndim == 2 and (chosen is None or isinstance(chosen, list))
        names = self.chunk_kwargs["names"]
        shape = {"names": names, "name": names[0], "is_frame": is_frame, "sort": bool(self.sort)}
        return {**self.combine_kwargs, **shape}


class LabelOfGreatest(LabelOfLeast):
    """Find the label of the greatest value in each group of all partitions."""

    _least = False


def _find_labels_again(original: Callable[..., Any], expr: Any) -> Any:
    """Find the labels of the least or greatest values of groups in all partitions.

    Dask takes those of the first partition that has rows of a group. Groups of categories without rows are
    left to it.
    """
    kinds: dict[type, Callable[..., Any]] = {IdxMin: LabelOfLeast, IdxMax: LabelOfGreatest}
    kind = kinds.get(type(expr))
    if kind is None or not isinstance(expr.frame._meta, (pd.DataFrame, pd.Series)):
        return original(expr)
    is_of_rows = expr.observed or not _has_categories(expr)
    return original(kind(*expr.operands) if is_of_rows else expr)


def _has_categories(groups: Any) -> bool:
    """Return whether a key of groups is of categories, of which each is a group, with rows or without."""
    levels = groups._meta.index
    dtypes = levels.dtypes if levels.nlevels > 1 else [levels.dtype]
    return any(isinstance(each, pd.CategoricalDtype) for each in dtypes)


#: What each corrects, by its name in Dask.
CHOICES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("FrameBase.__getitem__", _choose_by_function),
    ("Head._simplify_down", _take_most_frequent),
    ("Reduction._simplify_up", _keep_columns_of_order),
    ("groupby_projection", _aggregate_columns_needed),
    ("ApplyConcatApply._lower", _find_labels_again),
)
