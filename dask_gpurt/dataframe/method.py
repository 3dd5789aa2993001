"""Put the shuffle method "gpurt" into dask-expr, which has no registry of methods.

Two sets of replacements, which each concern only what would use the method "gpurt" and hand
everything else to the original:

- the method's *name*, known from the first :func:`teach` on. It stays known: what was built while
  the runtime was on may name it, and is computed by Dask's default where the runtime is off;
- the *default* of dask-expr, ours between :func:`choose` and :func:`leave`. Dask's configuration is
  not touched for it, since ``dask.bag`` reads the same key and knows no "gpurt".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import dask

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.expr import (
    Assign,
    AssignPartitioningIndex,
    HashJoinP2P,
    Merge,
    RearrangeByColumn,
    RenameFrame,
    ResetIndex,
    SetIndexBlockwise,
    Shuffle,
    default_shuffle_method,
    is_aligned,
    meta,
    parameters,
    replace_default_method,
    replace_lowering,
)
from dask_gpurt.dataframe.expressions import GpurtHashJoin, GpurtShuffle, HashTargets, RangeTargets
from dask_gpurt.frames import library

METHOD = "gpurt"

_name, _default = PatchSet(), PatchSet()


def teach(is_usable: Callable[[], bool]) -> None:
    """Make the name of the method known, once in a process and for good.

    Parameters
    ----------
    is_usable
        Whether what is computed now will run on a cluster that has the runtime. Where it
        will not, Dask's own default method serves.
    """
    if _name:
        return
    replace_lowering(
        _name,
        shuffle=functools.partial(_lower_shuffle, is_usable),
        reduction=_lower_reduction,
        merge=functools.partial(_lower_merge, is_usable),
        is_broadcast_join=_is_broadcast_join,
    )


def choose(is_usable: Callable[[], bool]) -> None:
    """Make it the method of shuffles for which no method is set, wherever it is usable.

    Parameters
    ----------
    is_usable
        As in :func:`teach`.
    """
    if _default:
        return

    def is_ours() -> bool:
        return dask.config.get("dataframe.shuffle.method", None) is None and is_usable()

    def default_method(original: Callable[[], str]) -> str:
        return METHOD if is_ours() else original()

    def preferring_order(original: Callable[[Any], Any], method: Any) -> Any:
        # Decided when it is lowered, as all others: the runtime may be off by then.
        return method if is_ours() else original(method)

    replace_default_method(_default, default_method=default_method, preferring_order=preferring_order)


def leave() -> None:
    """Have dask-expr choose again as shipped."""
    _default.restore()


def _lower_shuffle(is_usable: Callable[[], bool], original: Callable[[Any], Any], expr: Any) -> Any:
    # Subclasses that do not override `_lower` are concrete methods, not for us.
    if type(expr) is not Shuffle or (expr.method or default_shuffle_method()) != METHOD:
        return original(expr)
    if not is_usable() or library(meta(expr.frame)) is None:
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
    """Return the same under the names that columns had before."""
    return expr.frame if type(expr) is RenameFrame else expr


def _lower_merge(is_usable: Callable[[], bool], original: Callable[[Any], Any], expr: Any) -> Any:
    if type(expr) is not Merge or not _uses_our_method(expr):
        return original(expr)
    if not is_usable() or not (library(meta(expr.left)) and library(meta(expr.right))):
        return original(expr.substitute_parameters({"shuffle_method": _dasks_default()}))
    for side, on in ((expr.left, expr.left_on), (expr.right, expr.right_on)):
        if is_aligned(expr, side, on):
            return original(expr)  # only the other side is shuffled, if at all
    lowered = original(expr.substitute_parameters({"shuffle_method": "p2p"}))
    return GpurtHashJoin(*lowered.operands) if type(lowered) is HashJoinP2P else lowered


def _is_broadcast_join(original: Callable[[Any], bool], expr: Any) -> bool:
    if "shuffle_method" in parameters(type(expr)) and _uses_our_method(expr):
        expr = expr.substitute_parameters({"shuffle_method": "p2p"})
    return original(expr)


def _uses_our_method(expr: Any) -> bool:
    return (expr.shuffle_method or default_shuffle_method()) == METHOD


def _dasks_default() -> str:
    """Return the method that Dask would use if none had been set."""
    from distributed import default_client

    try:
        default_client()
    except ValueError:
        return "disk"
    return "p2p"
