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
    "replace",
    "task_of",
]

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


def replace(patches: PatchSet, replacements: Mapping[str, Callable[..., Any]]) -> None:
    """Replace functions that are listed in :data:`~.seams.EXPRESSIONS`, by name, wherever Dask has them.

    A replacement takes the original as its first argument. In place of a cached property there is a property,
    which takes no notice of what expressions have cached: replacements can be switched on and off.

    Raises UnsupportedError if one of the functions differs from the known one; nothing is replaced.
    """
    seams = [seam for seam in EXPRESSIONS.seams if seam.short in replacements]
    assert {seam.short for seam in seams} == replacements.keys()
    patches.replace_all({seam: _instead(replacements[seam.short]) for seam in seams}, cached=False)


def _instead(replacement: Callable[..., Any]) -> Wrap:
    return lambda original: partial(replacement, original)


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
