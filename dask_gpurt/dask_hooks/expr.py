"""Re-export and read dataframe expressions, and replace how they are lowered.

dask-expr has no registry of shuffle methods: ``Shuffle._lower`` knows a fixed list of names, and so does
``Merge``. Replacements are put on the classes, for all clients of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dask.dataframe.dask_expr import _shuffle
from dask.dataframe.dask_expr._expr import (
    Assign,
    Blockwise,
    Filter,
    Fused,
    Projection,
    RenameFrame,
    ResetIndex,
)
from dask.dataframe.dask_expr._groupby import Cov, GroupByApply, NUnique, Var
from dask.dataframe.dask_expr._groupby import Mean as GroupMean
from dask.dataframe.dask_expr._merge import (
    BlockwiseMerge,
    BroadcastJoin,
    HashJoinP2P,
    Merge,
    create_assign_index_merge_transfer,
)
from dask.dataframe.dask_expr._reductions import MeanAggregate, NFirst, NLast, ShuffleReduce, Sum
from dask.dataframe.dask_expr._shuffle import (
    AssignPartitioningIndex,
    P2PShuffle,
    RearrangeByColumn,
    SetIndexBlockwise,
    Shuffle,
)
from dask.dataframe.dask_expr._shuffle import _SetPartitionsPreSetIndex as SetPartitionsPreSetIndex
from dask.dataframe.dask_expr._util import _convert_to_list as convert_to_list

from dask_gpurt.dask_hooks.comparison import Seam
from dask_gpurt.dask_hooks.patch import PatchSet, Wrap
from dask_gpurt.dask_hooks.seams import EXPRESSIONS

__all__ = [
    "Assign",
    "AssignPartitioningIndex",
    "Blockwise",
    "BlockwiseMerge",
    "BroadcastJoin",
    "Filter",
    "Fused",
    "GroupByApply",
    "GroupMean",
    "HashJoinP2P",
    "MeanAggregate",
    "Merge",
    "NFirst",
    "NLast",
    "NUnique",
    "P2PShuffle",
    "Projection",
    "RearrangeByColumn",
    "RenameFrame",
    "ResetIndex",
    "SetIndexBlockwise",
    "SetPartitionsPreSetIndex",
    "Shuffle",
    "ShuffleReduce",
    "Sum",
    "convert_to_list",
    "create_assign_index_merge_transfer",
    "default_shuffle_method",
    "defaults",
    "is_first_operand",
    "layer_of",
    "meta",
    "name_of",
    "parameters",
    "replace_default_method",
    "replace_divisions",
    "replace_lowering",
    "replace_means",
    "replace_merge",
    "replace_null_groups",
    "replace_reductions",
    "replace_simplified",
    "replace_sort",
    "task_of",
]

#: A replacement that gets the original as its first argument.
Replacement = Callable[..., Any]


# ---- reading expressions ---------------------------------------------------------------------------


def meta(expr: Any) -> Any:
    """Return the empty frame that describes the result of an expression or a collection."""
    return expr._meta


def name_of(expr: Any) -> str:
    """Return the name of an expression, which is the first part of its keys."""
    return str(expr._name)


def parameters(kind: type) -> list[str]:
    """Return the names of the operands of a class of expressions."""
    found: list[str] = kind._parameters  # type: ignore[attr-defined]
    return found


def defaults(kind: type) -> Mapping[str, Any]:
    """Return the defaults of the operands of a class of expressions."""
    found: Mapping[str, Any] = kind._defaults  # type: ignore[attr-defined]
    return found


def layer_of(expr: Any) -> dict[Any, Any]:
    """Return the tasks of a lowered expression."""
    layer: dict[Any, Any] = expr._layer()
    return layer


def task_of(expr: Any, key: Any, index: int) -> Any:
    """Return the task of a partition of a blockwise expression."""
    return expr._task(key, index)


# ---- replacing the lowering ------------------------------------------------------------------------


def replace_lowering(
    patches: PatchSet,
    *,
    shuffle: Replacement,
    sort: Replacement,
    reduction: Replacement,
    merge: Replacement,
    is_broadcast_join: Replacement,
    is_aligned: Replacement,
    needs_shuffle: Replacement,
    graph: Replacement,
) -> None:
    """Replace the lowering of shuffles, sorts, shuffling reductions and joins, and the graphs of expressions.

    Each replacement is called as ``replacement(original, expr)``, and returns ``original(expr)`` for
    expressions that it does not handle.

    ``shuffle``, ``sort``, ``reduction``, ``merge``: replace ``_lower`` of ``Shuffle``, ``SortValues``,
    ``ShuffleReduce`` and ``Merge``.
    ``is_broadcast_join``: replaces the property of ``Merge``.
    ``is_aligned``: replaces ``_on_condition_already_partitioned`` of ``Merge``; called with a side and its
    keys too.
    ``needs_shuffle``: replaces ``need_to_shuffle`` of reductions by groups, and of functions that are applied
    to groups.
    ``graph``: replaces ``__dask_graph__`` of all expressions.
    Raises UnsupportedError if one of these differs from the known one.
    """
    patches.replace_all(
        {
            _seam("Shuffle._lower"): _instead(shuffle),
            _seam("SortValues._lower"): _instead(sort),
            _seam("ShuffleReduce._lower"): _instead(reduction),
            _seam("Merge._lower"): _instead(merge),
            _seam("Merge.is_broadcast_join"): _instead(is_broadcast_join),
            _seam("Merge._on_condition_already_partitioned"): _instead(is_aligned),
            _seam("ApplyConcatApply.need_to_shuffle"): _instead(needs_shuffle),
            _seam("GroupByApply.need_to_shuffle"): _instead(needs_shuffle),
            _seam("Expr.__dask_graph__"): _instead(graph),
        },
        cached=False,
    )


def replace_default_method(
    patches: PatchSet, *, default_method: Replacement, preferring_order: Replacement
) -> None:
    """Replace the choice of the default shuffle method.

    ``default_method``: called as ``default_method(original)``; returns the name of a method.
    ``preferring_order``: called as ``preferring_order(original, method)`` where Dask prefers a method that
    keeps the order of rows.
    Raises UnsupportedError if one of the functions differs from the known one.
    """
    # Each module has its own reference to the function.
    default = [seam for seam in EXPRESSIONS.seams if seam.attribute == "get_default_shuffle_method"]
    wraps = dict.fromkeys(default, _instead(default_method))
    patches.replace_all({**wraps, _seam("_get_shuffle_preferring_order"): _instead(preferring_order)})


def replace_merge(patches: PatchSet, merge: Replacement) -> None:
    """Replace the function that joins collections, which their methods call too.

    Raises UnsupportedError if Dask has no such function.
    """
    # Each module has its own reference to the function.
    patches.replace_all({seam: _instead(merge) for seam in EXPRESSIONS.seams if seam.short == "merge"})


def replace_divisions(patches: PatchSet, divisions: Replacement) -> None:
    """Replace the function that finds how the values of a column are divided, and whether they are sorted.

    ``divisions``: called as ``divisions(original, frame, column, ...)``; returns the divisions, the least and
    the greatest value of each partition, and whether the partitions are sorted.
    Raises UnsupportedError if Dask has no such function.
    """
    patches.replace_all({_seam("_get_divisions"): _instead(divisions)})


def replace_null_groups(patches: PatchSet, keywords: Replacement) -> None:
    """Replace the keywords of the steps of means, variances and standard deviations by groups.

    ``keywords``: called as ``keywords(original, expr)``; returns the keywords, among them ``dropna``.
    Raises UnsupportedError if Dask has no such properties.
    """
    steps = [seam for seam in EXPRESSIONS.seams if seam.short.startswith("GroupByReduction.")]
    patches.replace_all(dict.fromkeys(steps, _instead(keywords)), cached=False)


def replace_simplified(patches: PatchSet, kind: str, simplified: Replacement) -> None:
    """Replace how an operation is simplified together with one that uses it.

    ``kind``: the name of the operation's class: ``Filter``, ``AsType`` or ``SortValues``.
    ``simplified``: called as ``simplified(original, expr, parent, dependents)``; returns another parent, or
    None.
    Raises UnsupportedError if Dask has no such method.
    """
    patches.replace_all({_seam(f"{kind}._simplify_up"): _instead(simplified)})


def replace_reductions(patches: PatchSet, lower: Replacement) -> None:
    """Replace the lowering of reductions.

    ``lower``: called as ``lower(original, expr)``, for all reductions.
    Raises UnsupportedError if Dask has no such method.
    """
    patches.replace_all({_seam("ApplyConcatApply._lower"): _instead(lower)})


def replace_means(patches: PatchSet, lower: Replacement, aggregation: Replacement) -> None:
    """Replace the lowering of means of columns, and the steps of which ``agg`` makes a mean by groups.

    ``lower``: called as ``lower(original, expr)``.
    ``aggregation``: called as ``aggregation(original, …)``; returns the steps, by their kind.
    Raises UnsupportedError if Dask has no such functions.
    """
    steps = _seam("_build_agg_args_mean")
    patches.replace_all({_seam("Mean._lower"): _instead(lower), steps: _instead(aggregation)})


def replace_sort(patches: PatchSet, sort: Replacement) -> None:
    """Replace the method that sorts a collection by its columns.

    ``sort``: called as ``sort(original, frame, by, ...)``; returns a collection.
    Raises UnsupportedError if Dask has no such method.
    """
    patches.replace_all({_seam("DataFrame.sort_values"): _instead(sort)})


def reads_cast(parent: Any, cast: Any) -> bool:
    """Return whether an operation is a filter whose condition reads a column that is cast before."""
    if not isinstance(parent, Filter):
        return False
    dtypes = cast.operand("dtypes")
    changed = set(dtypes) if isinstance(dtypes, Mapping) else set(cast.columns)
    cast_name, condition = name_of(cast), parent.predicate
    users = (each for each in condition.walk() if cast_name in map(name_of, each.dependencies()))
    reads = any(not isinstance(each, Projection) or changed & {*each.columns} for each in users)
    return reads or name_of(condition) == cast_name


def replace_variances(patches: PatchSet, lower: Replacement, aggregation: Replacement) -> None:
    """Replace the lowering of reductions, and the steps of which a variance by groups consists.

    ``lower``: called as ``lower(original, expr)``, also for other reductions.
    ``aggregation``: called as ``aggregation(original, …)``; returns the steps, by their kind.
    Raises UnsupportedError if Dask has no such functions.
    """
    patches.replace_all(
        {
            _seam("ApplyConcatApply._lower"): _instead(lower),
            _seam("_build_agg_args_var"): _instead(aggregation),
        }
    )


def is_variance(expr: Any) -> bool:
    """Return whether an expression computes variances, covariances or correlations by groups."""
    return isinstance(expr, (Var, Cov))


def dtypes_of_values(groups: Any) -> Any:
    """Return the dtypes of the columns that are no keys, by label; the dtype of a series."""
    meta = groups.frame._meta
    if meta.ndim == 1:
        return meta.dtype
    return {label: dtype for label, dtype in meta.dtypes.items() if label not in groups._by_columns}


def with_dtypes(expr: Any, dtypes: Any) -> Any:
    """Return an expression whose frame has other dtypes: one, or some by label."""
    return type(expr)(expr.frame.astype(dtypes), *expr.operands[1:])


def is_first_operand(expr: Any, parent: Any) -> bool:
    """Return whether an expression is the first operand of another one."""
    first = parent.operands[0]
    return hasattr(first, "_name") and name_of(first) == name_of(expr)


def default_shuffle_method() -> str:
    """Return the default shuffle method, considering replacements."""
    return str(vars(_shuffle)["get_default_shuffle_method"]())


def _seam(short: str) -> Seam:
    (found,) = (seam for seam in EXPRESSIONS.seams if seam.short == short)
    return found


def _instead(replacement: Replacement) -> Wrap:
    """Pass the original to a replacement as its first argument."""
    return lambda original: partial(replacement, original)
