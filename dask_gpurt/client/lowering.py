"""Add the shuffle method "gpurt" to dask-expr, which has no registry of methods.

There are two sets of patches. Each handles only shuffles that go through the runtime, as
:func:`choose_method` decides, and passes all others to the original:

- the *name* of the method, from the first :func:`register_shuffle_method` on, permanently: a collection that
  was built while the runtime was on may name it, and is computed with Dask's default method once the runtime
  is off;
- the *default* of dask-expr, which is "gpurt" between :func:`choose` and :func:`leave`. Dask's configuration
  stays unchanged, since ``dask.bag`` reads the same key and does not know "gpurt". In that time, threads
  share expressions without the lock by which Dask can deadlock on Python 3.11.

Most GPU programs configure Dask's method ``tasks`` because ``p2p`` is slow there, and not because they need
``tasks``. So a configured ``tasks`` is taken over. The argument ``shuffle_method="tasks"`` is taken over only
with ``gpurt.takeover: all``. dask-expr writes a configured method into expressions as if it were an argument,
so the two are distinguished by the configuration: an argument that equals it counts as configured.

Decisions and their figures: ``docs/decisions/partitions.md``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import dask
from dask.core import flatten
from dask.dataframe.dask_expr._expr import Assign, Projection, RenameFrame, ResetIndex
from dask.dataframe.dask_expr._groupby import GroupByApply
from dask.dataframe.dask_expr._merge import BlockwiseMerge, BroadcastJoin, HashJoinP2P, Merge
from dask.dataframe.dask_expr._shuffle import (
    AssignPartitioningIndex,
    RearrangeByColumn,
    SetIndexBlockwise,
    Shuffle,
)
from dask.dataframe.dask_expr._shuffle import _SetPartitionsPreSetIndex as SetPartitionsPreSetIndex
from dask.typing import Key

from dask_gpurt import config
from dask_gpurt.client import expressions
from dask_gpurt.client.corrections import correct_with, looks_absent
from dask_gpurt.client.planning.catalogue.schema import known_schema
from dask_gpurt.client.planning.fusing import needed_tasks
from dask_gpurt.client.planning.rules.partition_notes import (
    are_together,
    groups_need_shuffle,
    hash_alike,
    is_aligned,
    needs_no_shuffle,
)
from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.computing import runs_locally
from dask_gpurt.dask_hooks.expression_threads import sharing_expressions
from dask_gpurt.dask_hooks.planning import (
    default_shuffle_method,
    keys_of,
    name_of,
    with_rows_in_order,
)
from dask_gpurt.dask_hooks.seams import EXPRESSIONS
from dask_gpurt.dask_hooks.shuffle import P2PBarrierTask
from dask_gpurt.dask_hooks.types import convert_legacy_graph
from dask_gpurt.frames import library
from dask_gpurt.observe import MethodChoice
from dask_gpurt.shuffle import ShuffleSpec
from dask_gpurt.shuffle.joins import LEFT, SEMI

logger = logging.getLogger(__name__)

#: Called with the name of an expression and the choice for it, each time that it is lowered.
OnChoice = Callable[[str, MethodChoice], None]

METHOD = "gpurt"
TASKS, P2P = "tasks", "p2p"

_name, _default = PatchSet(), PatchSet()
_sharing = contextlib.ExitStack()
#: Choices for ``tasks``: p2p, which is Dask's default where there is a client, fails too.
FOR_TASKS = (MethodChoice.COLUMN_LEVELS, MethodChoice.COLUMN_TAKEN)
#: What Dask calls an index without a name among the keys of a join.
_INDEX = "_index"
#: Set once the runtime has been on in this process.
_was_on = threading.Event()


def register_shuffle_method(is_usable: Callable[[], bool], on_choice: OnChoice) -> None:
    """Make the name of the method known, permanently. Idempotent.

    ``is_usable``: returns whether the runtime is on for the current client. If not, Dask's default method is
    used.
    ``on_choice``: called for each choice of a method for a shuffle or join while the runtime is usable.
    """
    if not _name:
        lower_with(Lowering(is_usable, on_choice), _name)


def lower_with(lowering: Lowering, patches: PatchSet) -> None:
    """Have expressions lowered by a :class:`Lowering`."""
    patches.replace_in(
        EXPRESSIONS,
        {
            "Shuffle._lower": lowering.shuffle,
            "SortValues._lower": lowering.sort,
            "ShuffleReduce._lower": lowering.reduction,
            "Merge._lower": lowering.merge,
            "Merge.is_broadcast_join": lowering.is_broadcast_join,
            "Merge._on_condition_already_partitioned": lowering.is_aligned,
            "ApplyConcatApply.need_to_shuffle": lowering.needs_shuffle,
            "GroupByApply.need_to_shuffle": lowering.needs_shuffle,
            "GroupByApply._lower": lowering.applied,
            "Expr.__dask_graph__": _graph,
        },
    )


def choose(is_usable: Callable[[], bool]) -> None:
    """Make it the default method of shuffles, where the runtime is usable.

    ``is_usable``: see :func:`register_shuffle_method`.
    """
    _was_on.set()
    if _default:
        return

    def is_ours() -> bool:
        return dask.config.get("dataframe.shuffle.method", None) is None and is_usable()

    def default_method(original: Callable[[], str]) -> str:
        return METHOD if is_ours() else original()

    def preferring_order(original: Callable[[Any], Any], method: Any) -> Any:
        # Decide at lowering, as for all others, since the runtime may be off by then.
        return method if is_ours() else original(method)

    _default.replace_in(
        EXPRESSIONS,
        {"get_default_shuffle_method": default_method, "_get_shuffle_preferring_order": preferring_order},
    )
    correct_with(is_usable, _default)
    _sharing.enter_context(sharing_expressions())


def leave() -> None:
    """Restore the default method of dask-expr."""
    _default.restore()
    _sharing.close()


def choose_method(
    asked: str | None,
    configured: str | None,
    takeover: bool | str,
    *,
    explicit_comms: bool = False,
    local: bool = False,
) -> MethodChoice | None:
    """Choose between the runtime and Dask for a shuffle or a join.

    ``asked``: the method in the expression; None if it has none.
    ``configured``: the setting ``dataframe.shuffle.method`` at the time of lowering.
    ``takeover``: the setting ``gpurt.takeover``.
    ``explicit_comms``: the setting ``explicit-comms`` of dask-cuda, which then handles ``tasks`` itself.
    ``local``: whether a local scheduler of Dask is selected, which has no workers.
    Returns None for ``p2p``, which the scheduler may take over.
    """
    method = asked or configured
    if method == P2P:
        return None
    if local:
        return MethodChoice.LOCAL_SCHEDULER
    if method is None:
        return MethodChoice.DEFAULT
    if method == METHOD:
        return MethodChoice.NAMED
    if method != TASKS:
        return MethodChoice.OTHER_METHOD
    if not takeover:
        return MethodChoice.TAKEOVER_OFF
    if explicit_comms:
        return MethodChoice.EXPLICIT_COMMS
    if configured == TASKS:
        return MethodChoice.CONFIGURED_TASKS
    return MethodChoice.ARGUMENT_TASKS if takeover == "all" else MethodChoice.ONLY_CONFIGURED


class Lowering:
    """Lower the shuffles, shuffling reductions and joins that go through the runtime.

    ``is_usable``, ``on_choice``: see :func:`register_shuffle_method`.
    """

    def __init__(self, is_usable: Callable[[], bool], on_choice: OnChoice):
        self._is_usable = is_usable
        self._on_choice = on_choice

    def shuffle(self, original: Callable[[Any], Any], expr: Any) -> Any:
        """Lower a shuffle, deferring a preceding expression that just adds output partitions."""
        # Subclasses that do not override `_lower` are concrete methods.
        if type(expr) is not Shuffle:
            return original(expr)
        choice = self._choose(expr.method, expr.frame)
        if choice is not None:
            self._on_choice(name_of(expr), choice)
        if choice in FOR_TASKS:
            return original(expr.substitute_parameters({"method": TASKS}))
        if choice is None or not choice.taken:
            return original(_as_dask_knows(expr, "method"))
        frame, options = expr.frame, expr.options
        if type(frame) is AssignPartitioningIndex and frame.index_shuffle:  # frames may be aligned by it
            options = {**(options or {}), expressions.IN_ORDER: True}
        if (
            type(frame) is AssignPartitioningIndex
            and frame.frame.ndim == 2
            and isinstance(frame.partitioning_index, list)
        ):
            frame = expressions.HashTargets(*frame.operands, None)
        elif type(frame) is Assign:
            frame = expressions.RangeTargets.of(frame)
        kind: Any = expressions.GpurtTaskShuffle if expr.method == TASKS else expressions.GpurtShuffle
        return kind(
            frame,
            expr.partitioning_index,
            expr.npartitions_out,
            expr.ignore_index,
            options,
            expr.original_partitioning_index,
        )

    def sort(self, original: Callable[[Any], Any], expr: Any) -> Any:
        """Lower ``sort_values``; a function of the user gets rows in the same order as with ``tasks``."""
        lowered = original(expr)
        if expr.na_position == "first" and self._is_usable():
            lowered = _with_nulls_first(lowered)
        choice = self._choose(expr.shuffle_method, expr.frame)
        if choice is None or not choice.taken or _sorts_by_columns(expr):
            return lowered
        if type(projected := lowered.frame) is not Projection or type(projected.frame) is not Shuffle:
            return lowered  # nothing is shuffled
        options = {**(projected.frame.operand("options") or {}), expressions.IN_ORDER: True}
        shuffle = projected.frame.substitute_parameters({"options": options})
        return lowered.substitute_parameters({"frame": projected.substitute_parameters({"frame": shuffle})})

    def reduction(self, original: Callable[[Any], Any], expr: Any) -> Any:
        """Lower a reduction, and drop the row numbers in the shuffle of a groupby.

        Dask resets the index before the shuffle, to make the keys columns, and sets it again afterwards. The
        row numbers in between would be shuffled for nothing: 8 bytes a row.
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
        """Lower a join; if both sides need a shuffle, join in the unpack tasks."""
        if type(expr) is not Merge:
            return original(expr)
        if self._is_usable():
            expr, original = _with_keys_listed(expr), partial(_lower_shuffling_all, original)
        choice = self._choose(expr.shuffle_method, expr.left, expr.right)
        if self._is_usable() and not hash_alike(expr):
            lowered = _with_hashed_values(
                original(expr.substitute_parameters({"shuffle_method": TASKS})), expr
            )
            return _as_we_join(lowered, is_ours=choice is not None and choice.taken)
        if choice in FOR_TASKS:
            return original(expr.substitute_parameters({"shuffle_method": TASKS}))
        if choice is None or not choice.taken:
            return original(_as_dask_knows(expr, "shuffle_method"))
        for side, on in ((expr.left, expr.left_on), (expr.right, expr.right_on)):
            if is_aligned(expr, side, on):  # at most the other side is shuffled
                return _as_we_join(original(expr), is_ours=True)
        lowered = original(expr.substitute_parameters({"shuffle_method": "p2p"}))
        if type(lowered) is not HashJoinP2P:
            return _as_we_join(lowered)
        self._on_choice(name_of(expr), choice)
        return expressions.GpurtHashJoin(*lowered.operands, expr.shuffle_method == TASKS)

    def is_broadcast_join(self, original: Callable[[Any], bool], expr: Any) -> bool:
        """Return whether a join sends one side to all partitions of the other, as decided by Dask.

        Not if rows of that side are kept, which would repeat: Dask forgets semi joins. Nor where Dask divides
        the other side by a hash that differs from that of the keys it meets.
        """
        if "shuffle_method" in type(expr)._parameters and _names_ours(expr.shuffle_method):
            expr = expr.substitute_parameters({"shuffle_method": "p2p"})
        is_ours = type(expr) is Merge and self._is_usable()
        if is_ours and (reason := _why_not_broadcast(expr)) is not None:
            logger.debug("%s is not a broadcast join: %s", name_of(expr), reason)
            return False
        return original(expr)

    def is_aligned(self, original: Callable[[Any, Any, Any], bool], expr: Any, side: Any, on: Any) -> bool:
        """Return whether a side of a join is partitioned by its keys already."""
        return is_aligned(expr, side, on) if self._is_usable() else original(expr, side, on)

    def needs_shuffle(self, original: Callable[[Any], bool], expr: Any) -> bool:
        """Return whether groups are not yet together in partitions; Dask's note of it may be false."""
        if not self._is_usable():
            return original(expr)
        if expr.frame.npartitions == 1:
            try:
                return original(expr)
            except (KeyError, TypeError):  # Dask cannot follow its note through a renaming
                return True
        return groups_need_shuffle(expr) if isinstance(expr, GroupByApply) else not are_together(expr)

    def applied(self, original: Callable[[Any], Any], expr: Any) -> Any:
        """Lower a function of groups, whose rows come in their order, as in pandas.

        Dask sorts the rows of a partition by their index before it shifts them, since its own shuffles may
        change their order. Where labels repeat, as in files without an index, these are other rows.
        """
        lowered = original(expr)
        choice = self._choose(expr.shuffle_method, expr.frame)
        if choice is None or not choice.taken or not expr.need_to_shuffle:
            return lowered
        shuffle = lowered.frame
        while isinstance(shuffle, (RenameFrame, Projection)):
            shuffle = shuffle.frame
        options = {**(shuffle.options or {}), expressions.IN_ORDER: True}
        in_order = lowered.substitute(shuffle, shuffle.substitute_parameters({"options": options}))
        return with_rows_in_order(expr, in_order)

    def _choose(self, asked: str | None, *frames: Any) -> MethodChoice | None:
        """Return the choice for an expression; None if the runtime is off, and for ``p2p``."""
        if not self._is_usable():
            return None
        choice = choose_method(
            asked,
            dask.config.get("dataframe.shuffle.method", None),
            config.takeover(),
            explicit_comms=bool(dask.config.get("explicit-comms", False)),
            local=runs_locally(),
        )
        if choice is None or not choice.taken:
            return choice
        if not all(library(frame._meta) for frame in frames if known_schema(frame) is None):
            return MethodChoice.UNSUPPORTED_FRAMES
        if any(map(_has_column_levels, frames)):
            return MethodChoice.COLUMN_LEVELS
        return MethodChoice.COLUMN_TAKEN if any(map(_overwrites_a_column, frames)) else choice


def _why_not_broadcast(join: Any) -> str | None:
    if join.how == SEMI and join.broadcast_side == LEFT:
        return "it would repeat rows of the left side"
    if join.how != "inner" and not hash_alike(join):
        return "the keys of its sides have unlike hashes"
    return None


def _has_column_levels(frame: Any) -> bool:
    """Return whether columns have levels: Dask then labels the column of targets ("_partitions", "")."""
    if (schema := known_schema(frame)) is not None:
        return schema.has_levels
    return bool(frame.ndim == 2 and frame._meta.columns.nlevels > 1)


def _sorts_by_columns(expr: Any) -> bool:
    """Return whether ``sort_values`` sorts by its columns, and not by a function of the user."""
    options = expr.operand("sort_function_kwargs") or {}
    return expr.operand("sort_function") is None and options.get("key") is None


def _with_nulls_first(lowered: Any) -> Any:
    """Return a sort with nulls in the first partition. Dask puts them in the last, and first there."""
    if type(projected := lowered.frame) is not Projection or type(projected.frame) is not Shuffle:
        return lowered
    targets = projected.frame.frame.operands[2]
    return lowered.substitute(targets, targets.substitute_parameters({"na_position": "first"}))


def _overwrites_a_column(frame: Any) -> bool:
    """Return whether the range of each row, by which Dask sorts, replaces a column of the user's."""
    if type(frame) is not Assign or len(frame.operands) != 3:
        return False
    assigned, name, targets = frame.operands
    return type(targets) is SetPartitionsPreSetIndex and name in assigned.columns


def _but_names(expr: Any) -> Any:
    """Return the expression without a renaming of columns."""
    return expr.frame if type(expr) is RenameFrame else expr


def _graph(original: Callable[[Any], dict[Key, Any]], expr: Any) -> dict[Key, Any]:
    """Return the graph of an expression, without the tasks that are fused into transfers.

    No task depends on these. But if dataframes are computed together with a Delayed or an array, Dask merges
    their graphs, and treats every task without dependents as a result.
    """
    graph = original(expr)
    if not any(
        isinstance(task, P2PBarrierTask) and isinstance(task.spec, ShuffleSpec) for task in graph.values()
    ):
        return graph
    return needed_tasks(convert_legacy_graph(graph), flatten(keys_of(expr)))


def _names_ours(asked: str | None) -> bool:
    """Return whether the method of an expression, or the default if it has none, is ours."""
    return (asked or default_shuffle_method()) == METHOD


def _as_we_join(lowered: Any, *, is_ours: bool = False) -> Any:
    """Replace a join of aligned partitions, or a semi join, by ours; return any other expression unchanged.

    ``is_ours``: whether a side may be the output of a shuffle through the runtime.
    """
    if is_ours and type(lowered) is BlockwiseMerge:
        return expressions.GpurtBlockwiseMerge(*lowered.operands)
    kinds: dict[type, Any] = {
        BlockwiseMerge: expressions.GpurtSemiMerge,
        BroadcastJoin: expressions.GpurtBroadcastSemiJoin,
    }
    kind = kinds.get(type(lowered))
    return kind(*lowered.operands) if kind is not None and lowered.how == SEMI else lowered


def _with_keys_listed(join: Any) -> Any:
    """List keys that are labelled "" or 0, which Dask takes for none, and so shuffles no rows by."""
    labels = {name: getattr(join, name) for name in ("left_on", "right_on")}
    return join.substitute_parameters(
        {name: [label] for name, label in labels.items() if looks_absent(label)}
    )


def _lower_shuffling_all(original: Callable[[Any], Any], join: Any) -> Any:
    """Lower a join, and shuffle by an index that is labelled "" or 0, which Dask takes for none."""
    lowered = original(join)
    if type(lowered) is not BlockwiseMerge or needs_no_shuffle(join):
        return lowered
    number = join.operand("_npartitions") or max(join.left.npartitions, join.right.npartitions)
    sides = {name: getattr(join, name) for name in ("left", "right")}
    shuffles = {
        name: RearrangeByColumn(side, _INDEX, number, method=join.shuffle_method, index_shuffle=True)
        for name, side in sides.items()
        if getattr(join, f"{name}_index") and looks_absent(side._meta.index.name)
    }
    return lowered.substitute_parameters(shuffles)


def _with_hashed_values(lowered: Any, join: Any) -> Any:
    """Divide those sides of a lowered join that are shuffled by the values of its keys."""
    sides = {name: getattr(lowered, name) for name in ("left", "right")}
    shuffles = {
        name: expressions.RearrangeByValues(
            *side.substitute_parameters({"method": join.shuffle_method}).operands
        )
        for name, side in sides.items()
        if type(side) is RearrangeByColumn and side is not getattr(join, name)
    }
    return lowered.substitute_parameters(shuffles)


def _as_dask_knows(expr: Any, parameter: str) -> Any:
    """Replace our method by one of Dask's, in an expression that does not go through the runtime."""
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
            "dask_gpurt.enable(client), or set 'gpurt.enabled' to true before creating the client, or leave "
            "the method out"
        )
    return expr.substitute_parameters({parameter: _dasks_default()})


def _dasks_default() -> str:
    """Return the method that Dask would use if none had been set; ``tasks`` where p2p has no workers."""
    from distributed import default_client

    try:
        default_client()
    except ValueError:
        return "disk"
    return TASKS if runs_locally() else P2P
