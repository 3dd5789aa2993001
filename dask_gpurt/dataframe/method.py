"""The shuffle method "gpurt" inside dask-expr, which has no registry of methods.

Four members of three of its classes are replaced. Each replacement concerns only what would
use the method "gpurt" and hands everything else to the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dask.dataframe.dask_expr._expr import Assign, RenameFrame, ResetIndex
from dask.dataframe.dask_expr._merge import HashJoinP2P, Merge
from dask.dataframe.dask_expr._reductions import ShuffleReduce
from dask.dataframe.dask_expr._shuffle import (
    AssignPartitioningIndex,
    RearrangeByColumn,
    SetIndexBlockwise,
    Shuffle,
)
from dask.utils import get_default_shuffle_method

from dask_gpurt.dataframe.expressions import GpurtHashJoin, GpurtShuffle, HashTargets, RangeTargets
from dask_gpurt.table import library

METHOD = "gpurt"

_originals: dict[tuple[type, str], Any] = {}


def install(is_usable: Callable[[], bool]) -> None:
    """Make the method known, once in a process.

    Parameters
    ----------
    is_usable
        Whether what is computed now will run on a cluster that has the runtime. Where it
        will not, Dask's own default method serves.
    """
    if _originals:
        return
    _replace(Shuffle, "_lower", functools.partial(_lower_shuffle, is_usable))
    _replace(ShuffleReduce, "_lower", _lower_reduction)
    _replace(Merge, "_lower", functools.partial(_lower_merge, is_usable))
    _replace(Merge, "is_broadcast_join", _is_broadcast_join)


def uninstall() -> None:
    """Give dask-expr back as shipped."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def _replace(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    original = _originals[owner, name] = owner.__dict__[name]
    if isinstance(original, functools.cached_property):
        prop = functools.cached_property(lambda self: replacement(original.func, self))
        prop.__set_name__(owner, name)
        setattr(owner, name, prop)
    else:
        setattr(owner, name, lambda self: replacement(original, self))


def _lower_shuffle(is_usable: Callable[[], bool], original: Callable[[Any], Any], expr: Any) -> Any:
    # Subclasses that do not override `_lower` are concrete methods, not for us.
    if type(expr) is not Shuffle or (expr.method or get_default_shuffle_method()) != METHOD:
        return original(expr)
    if not is_usable() or library(expr.frame._meta) is None:
        return original(expr.substitute_parameters({"method": _dasks_default()}))
    frame = expr.frame
    if (
        type(frame) is AssignPartitioningIndex
        and frame.frame.ndim == 2
        and isinstance(frame.partitioning_index, list)
    ):
        frame = HashTargets(*frame.operands, None)
    elif type(frame) is Assign:
        frame = RangeTargets.of(frame)
    return GpurtShuffle(
        frame,
        expr.partitioning_index,
        expr.npartitions_out,
        expr.ignore_index,
        expr.options,
        expr.original_partitioning_index,
    )


def _lower_reduction(original: Callable[[Any], Any], expr: Any) -> Any:
    """Leave the numbers of rows behind that a groupby has only until it sets its keys as the index again.

    Dask makes columns of the keys before it shuffles, and keeps the index that comes of it: 8 bytes a row.
    """
    lowered = original(expr)
    if not _uses_our_method(expr):
        return lowered
    node = lowered
    while not isinstance(node, (SetIndexBlockwise, RearrangeByColumn)) and hasattr(node, "frame"):
        node = node.frame
    if not isinstance(node, SetIndexBlockwise):
        return lowered
    shuffle = _but_names(node.frame)
    if type(shuffle) is not RearrangeByColumn or type(_but_names(shuffle.frame)) is not ResetIndex:
        return lowered
    return lowered.substitute(shuffle, shuffle.substitute_parameters({"ignore_index": True}))


def _but_names(expr: Any) -> Any:
    """The same under the names that columns had before."""
    return expr.frame if type(expr) is RenameFrame else expr


def _lower_merge(is_usable: Callable[[], bool], original: Callable[[Any], Any], expr: Any) -> Any:
    if type(expr) is not Merge or not _uses_our_method(expr):
        return original(expr)
    if not is_usable() or not (library(expr.left._meta) and library(expr.right._meta)):
        return original(expr.substitute_parameters({"shuffle_method": _dasks_default()}))
    for side, on in ((expr.left, expr.left_on), (expr.right, expr.right_on)):
        if expr._on_condition_already_partitioned(side, on):
            return original(expr)  # only the other side is shuffled, if at all
    lowered = original(expr.substitute_parameters({"shuffle_method": "p2p"}))
    return GpurtHashJoin(*lowered.operands) if type(lowered) is HashJoinP2P else lowered


def _is_broadcast_join(original: Callable[[Any], bool], expr: Any) -> bool:
    if "shuffle_method" in expr._parameters and _uses_our_method(expr):
        expr = expr.substitute_parameters({"shuffle_method": "p2p"})
    return original(expr)


def _uses_our_method(expr: Any) -> bool:
    return (expr.shuffle_method or get_default_shuffle_method()) == METHOD


def _dasks_default() -> str:
    """What Dask would use if nobody had set a method."""
    from distributed import default_client

    try:
        default_client()
    except ValueError:
        return "disk"
    return "p2p"
