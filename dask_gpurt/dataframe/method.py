"""Put the shuffle method "gpurt" into dask-expr, which has no registry of methods.

There are two sets of replacements. Each handles only shuffles that go through the runtime, as
:mod:`dask_gpurt.dataframe.takeover` decides, and passes all others to the original:

- the method's *name*, known from the first :func:`teach` on. It stays known: a collection that was built
  while the runtime was on may name it, and is computed by Dask's default where the runtime is off;
- the *default* of dask-expr, ours between :func:`choose` and :func:`leave`. Dask's configuration is
  not touched for it, since ``dask.bag`` reads the same key and knows no "gpurt". In between, expressions
  do not hold the lock by which Dask can deadlock on Python 3.11 either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import dask
from dask.core import flatten
from dask.typing import Key

from dask_gpurt import config
from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.expr import (
    Assign,
    AssignPartitioningIndex,
    BlockwiseMerge,
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
    name_of,
    parameters,
    replace_default_method,
    replace_lowering,
)
from dask_gpurt.dask_hooks.graph import convert_legacy_graph
from dask_gpurt.dask_hooks.planning import keys_of
from dask_gpurt.dask_hooks.properties import drop_class_lock
from dask_gpurt.dask_hooks.shuffle import P2PBarrierTask
from dask_gpurt.dataframe.expressions import (
    GpurtBlockwiseMerge,
    GpurtHashJoin,
    GpurtShuffle,
    GpurtTaskShuffle,
    HashTargets,
    RangeTargets,
)
from dask_gpurt.dataframe.takeover import DISTRIBUTED, METHOD, TASKS, choose_method
from dask_gpurt.frames import library
from dask_gpurt.observe import MethodChoice
from dask_gpurt.planning.fusing import needed_tasks
from dask_gpurt.shuffle import ShuffleSpec

#: Called with the name of an expression and what was chosen for it, each time that it is lowered.
OnChoice = Callable[[str, MethodChoice], None]

_name, _default = PatchSet(), PatchSet()
#: Set once the runtime has been on in this process.
_was_on = threading.Event()


def teach(is_usable: Callable[[], bool], on_choice: OnChoice) -> None:
    """Make the name of the method known, once in a process and for good.

    Parameters
    ----------
    is_usable
        Whether what is computed now will run on a cluster that has the runtime. Where it
        will not, Dask's own default method serves.
    on_choice
        Called for each shuffle or join for which a method is chosen where the runtime is usable.
    """
    if _name:
        return
    lowering = Lowering(is_usable, on_choice)
    replace_lowering(
        _name,
        shuffle=lowering.shuffle,
        reduction=lowering.reduction,
        merge=lowering.merge,
        is_broadcast_join=_is_broadcast_join,
        graph=_graph,
    )


def choose(is_usable: Callable[[], bool]) -> None:
    """Make it the method of shuffles for which no method is set, wherever it is usable.

    Parameters
    ----------
    is_usable
        As in :func:`teach`.
    """
    _was_on.set()
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
    drop_class_lock(_default)


def leave() -> None:
    """Have dask-expr choose again as shipped."""
    _default.restore()


class Lowering:
    """Lower shuffles, reductions that shuffle and joins, where they go through the runtime.

    Parameters
    ----------
    is_usable, on_choice
        As in :func:`teach`.
    """

    def __init__(self, is_usable: Callable[[], bool], on_choice: OnChoice):
        self._is_usable = is_usable
        self._on_choice = on_choice

    def shuffle(self, original: Callable[[Any], Any], expr: Any) -> Any:
        """Lower a shuffle, with the work of the task before it that only adds output partitions."""
        # Subclasses that do not override `_lower` are concrete methods, not for us.
        if type(expr) is not Shuffle:
            return original(expr)
        choice = self._choose(expr.method, expr.frame)
        if choice is not None and choice.taken and _has_column_levels(expr.frame):
            choice = MethodChoice.COLUMN_LEVELS
        if choice is not None:
            self._on_choice(name_of(expr), choice)
        if choice is None or not choice.taken:
            return original(_as_dask_knows(expr, "method"))
        frame = expr.frame
        if (
            type(frame) is AssignPartitioningIndex
            and frame.frame.ndim == 2
            and isinstance(frame.partitioning_index, list)
        ):
            frame = HashTargets(*frame.operands, None)
        elif type(frame) is Assign:
            frame = RangeTargets.of(frame)
        kind: Any = GpurtTaskShuffle if expr.method == TASKS else GpurtShuffle
        return kind(
            frame,
            expr.partitioning_index,
            expr.npartitions_out,
            expr.ignore_index,
            expr.options,
            expr.original_partitioning_index,
        )

    def reduction(self, original: Callable[[Any], Any], expr: Any) -> Any:
        """Leave the numbers of rows behind that a groupby has only until it sets its keys as the index again.

        Dask makes columns of the keys before it shuffles, and keeps the index that comes of it: 8 bytes a
        row.
        """
        lowered = original(expr)
        choice = self._choose(expr.shuffle_method, expr.frame)
        if choice is None or not choice.taken:
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

    def merge(self, original: Callable[[Any], Any], expr: Any) -> Any:
        """Lower a join that needs both sides shuffled to one that joins as it unpacks."""
        if type(expr) is not Merge:
            return original(expr)
        choice = self._choose(expr.shuffle_method, expr.left, expr.right)
        if choice is None or not choice.taken:
            return original(_as_dask_knows(expr, "shuffle_method"))
        for side, on in ((expr.left, expr.left_on), (expr.right, expr.right_on)):
            if is_aligned(expr, side, on):  # only the other side is shuffled, if at all
                aligned = original(expr)
                return GpurtBlockwiseMerge(*aligned.operands) if type(aligned) is BlockwiseMerge else aligned
        lowered = original(expr.substitute_parameters({"shuffle_method": "p2p"}))
        if type(lowered) is not HashJoinP2P:
            return lowered
        self._on_choice(name_of(expr), choice)
        return GpurtHashJoin(*lowered.operands)

    def _choose(self, asked: str | None, *frames: Any) -> MethodChoice | None:
        """Return the choice for an expression; None where Dask is as shipped, and for ``p2p``."""
        if not self._is_usable():
            return None
        scheduler = dask.config.get("scheduler", None)
        choice = choose_method(
            asked,
            dask.config.get("dataframe.shuffle.method", None),
            config.takeover(),
            explicit_comms=bool(dask.config.get("explicit-comms", False)),
            local=isinstance(scheduler, str) and scheduler not in DISTRIBUTED,
        )
        if choice is not None and choice.taken and not all(library(meta(frame)) for frame in frames):
            return MethodChoice.UNSUPPORTED_FRAMES
        return choice


def _has_column_levels(frame: Any) -> bool:
    """Return whether columns have levels: Dask then names the column of targets ("_partitions", "")."""
    return bool(frame.ndim == 2 and meta(frame).columns.nlevels > 1)


def _but_names(expr: Any) -> Any:
    """Return the same under the names that columns had before."""
    return expr.frame if type(expr) is RenameFrame else expr


def _graph(original: Callable[[Any], dict[Key, Any]], expr: Any) -> dict[Key, Any]:
    """Return the graph of an expression, without the tasks that are done within transfers.

    Nothing needs these. But where dataframes are computed beside a Delayed or an array, Dask puts the graphs
    of both together, and takes whatever nothing needs for a result.
    """
    graph = original(expr)
    if not any(
        isinstance(task, P2PBarrierTask) and isinstance(task.spec, ShuffleSpec) for task in graph.values()
    ):
        return graph
    return needed_tasks(convert_legacy_graph(graph), flatten(keys_of(expr)))


def _is_broadcast_join(original: Callable[[Any], bool], expr: Any) -> bool:
    if "shuffle_method" in parameters(type(expr)) and _names_ours(expr.shuffle_method):
        expr = expr.substitute_parameters({"shuffle_method": "p2p"})
    return original(expr)


def _names_ours(asked: str | None) -> bool:
    """Return whether the method of an expression, or the one that is used where it has none, is ours."""
    return (asked or default_shuffle_method()) == METHOD


def _as_dask_knows(expr: Any, parameter: str) -> Any:
    """Put a method of Dask's in the place of ours, in an expression that does not go through the runtime."""
    asked = getattr(expr, parameter)
    if not _names_ours(asked):
        return expr
    if (
        asked == METHOD
        and not _was_on.is_set()
        and dask.config.get("dataframe.shuffle.method", None) != METHOD
    ):
        raise ValueError(
            "the shuffle method 'gpurt' needs the runtime, which has not been switched on: call "
            "dask_gpurt.enable(client), or set 'gpurt.enabled' to true before the client is made, or leave "
            "the method out"
        )
    return expr.substitute_parameters({parameter: _dasks_default()})


def _dasks_default() -> str:
    """Return the method that Dask would use if none had been set."""
    from distributed import default_client

    try:
        default_client()
    except ValueError:
        return "disk"
    return "p2p"
