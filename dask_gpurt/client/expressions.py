"""Define the expressions of shuffles and joins: Dask's p2p graphs, with our spec in the barrier task."""

from __future__ import annotations

import functools
import pickle
from functools import partial
from typing import Any

from dask.dataframe.dask_expr._expr import Assign, Blockwise, Fused, Projection
from dask.dataframe.dask_expr._merge import (
    BlockwiseMerge,
    BroadcastJoin,
    HashJoinP2P,
    create_assign_index_merge_transfer,
)
from dask.dataframe.dask_expr._shuffle import AssignPartitioningIndex, P2PShuffle, RearrangeByColumn
from dask.dataframe.dask_expr._shuffle import _SetPartitionsPreSetIndex as SetPartitionsPreSetIndex
from dask.utils import apply

from dask_gpurt.client.planning.fusing import OWN_COMPUTATION
from dask_gpurt.client.planning.origins import listed, named
from dask_gpurt.dask_hooks.graphs import may_ignore_index
from dask_gpurt.dask_hooks.planning import name_of, set_metadata
from dask_gpurt.dask_hooks.shuffle import DataFrameShuffleSpec, P2PBarrierTask, run_barrier
from dask_gpurt.dask_hooks.types import Task, convert_to_list
from dask_gpurt.frames import Hashed, Ranged, column_names
from dask_gpurt.frames.key_values import partitions_by_value
from dask_gpurt.shuffle import ShuffleSpec
from dask_gpurt.shuffle.joins import merge_aligned, merge_frames, merge_unpack
from dask_gpurt.shuffle.local import BarrierTask, shuffle_unpack, transfer

#: The option of a shuffle whose outputs keep the order of the inputs, also if they are sorted later.
IN_ORDER = "gpurt-in-order"


class GpurtShuffle(P2PShuffle):
    """Shuffle through the runtime.

    The last operand is the name of the computation that the shuffle is part of, unless computations share it.
    It is an operand because the identity of a shuffle, and the keys of its tasks, depend on its operands.
    """

    _parameters = [*P2PShuffle._parameters, OWN_COMPUTATION]
    _defaults = {**P2PShuffle._defaults, OWN_COMPUTATION: None}
    #: Otherwise Dask takes the length of the input, which need not be a frame.
    _is_length_preserving = False
    _any_columns = False

    @functools.cached_property
    def _meta(self) -> Any:
        rows = self.rows._meta
        kept = rows.drop(columns=self.partitioning_index) if self.partitioning_index in rows.columns else rows
        return kept.reset_index(drop=True) if self._drops_index else kept

    @property
    def rows(self) -> Any:
        """Return what is shuffled, without the column of targets if it is only added as it is transferred."""
        frame = self.frame
        targets = frame.exprs[0] if isinstance(frame, Fused) else frame
        if isinstance(targets, HashTargets) and targets.operand("kept") is not None:
            return targets.frame[targets.operand("kept")]
        return targets.frame if isinstance(targets, (HashTargets, RangeTargets)) else frame

    @property
    def _drops_index(self) -> bool:
        """Return whether to drop the index.

        ``set_index`` replaces it anyway. If the user passes ``ignore_index``, Dask's meta still has the
        index, so it is dropped only if new row numbers match that meta.
        """
        set_index = self.original_partitioning_index is None
        return bool(self.ignore_index) and (set_index or _is_numbering(self.rows._meta.index))

    @property
    def label(self) -> str:
        """Return what is shuffled by what, as a user knows it."""
        if (by := self.original_partitioning_index) is not None:
            return f"shuffle by {listed(by)}"
        targets = _targets(self.frame, self.partitioning_index)
        return f"sort by {listed(targets.by)}" if isinstance(targets, RangeTargets) else "shuffle"

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        """Move only projections below the shuffle, and only if its input takes them.

        Dask drops a shuffle below a reduction, and moves filters below it, also in a collection that has been
        optimised. The input is then not a frame but a ``Hashed`` or ``Ranged``, and has a column more.
        """
        if not isinstance(parent, Projection) or isinstance(self.frame, (Fused, RangeTargets)):
            return None
        return super()._simplify_up(parent, dependents)  # type: ignore[no-untyped-call]

    def _layer(self) -> dict[Any, Any]:
        targets = _targets(self.frame, self.partitioning_index)
        layer: dict[Any, Any] = super()._layer()  # type: ignore[no-untyped-call]
        layer = _with_our_spec(
            layer,
            ignore_index=self._drops_index,
            in_order=IN_ORDER in (self.options or {}),
            computation=self.computation,
            any_columns=self._any_columns,
            label=self.label,
        )
        for key, task in layer.items():
            if task.func.__name__ == "shuffle_unpack":
                layer[key] = Task(key, shuffle_unpack, *task.args)
            elif task.func.__name__ == "_shuffle_transfer":
                (producer,) = task.dependencies
                assign = () if targets is None else (self.frame._task(producer, producer[1]),)
                layer[key] = Task.fuse(*assign, Task(key, transfer, *task.args), key=key)
        return layer


class GpurtTaskShuffle(GpurtShuffle):
    """Shuffle in place of ``tasks``, for which Dask's meta does not have an ignored index.

    As with ``tasks``, an input may have other columns than the meta.
    """

    _any_columns = True

    @property
    def _drops_index(self) -> bool:
        return bool(self.ignore_index)


def _is_numbering(index: Any) -> bool:
    """Return whether an index could be row numbers: unnamed, with a single level of int64."""
    return index.nlevels == 1 and index.name is None and index.dtype == "int64"


class HashTargets(AssignPartitioningIndex):
    """Defer hashing of the key columns to the transfer task.

    The operands are those of Dask's expression, which would add the column of output partitions immediately,
    and the columns to keep, which need not include the keys.
    """

    _parameters = [*AssignPartitioningIndex._parameters, "kept"]
    _defaults = {**AssignPartitioningIndex._defaults, "kept": None}

    @functools.cached_property
    def _meta(self) -> Any:
        *operands, kept = self.operands[1:]
        full = AssignPartitioningIndex.operation(self.frame._meta, *operands)
        return full if kept is None else full[[*kept, self.index_name]]

    @staticmethod
    def operation(
        frame: Any, by: Any, name: str, npartitions: int, meta: Any, index_shuffle: bool, kept: Any = None
    ) -> Any:
        columns = tuple(by) if not index_shuffle and set(by) <= set(column_names(frame)) else None

        def assign(rows: Any) -> Any:
            full = AssignPartitioningIndex.operation(rows, by, name, npartitions, meta, index_shuffle)
            return full if kept is None else full[[*kept, name]]

        rows = frame if kept is None else frame[kept]
        if name in column_names(rows):  # a column of the user's, which Dask overwrites
            rows = rows.drop(columns=name)
        return Hashed(rows, columns, frame, meta, assign)

    def _simplify_up(self, parent: Any, dependents: Any) -> Any:
        if isinstance(parent, Projection) and self.index_name in (columns := parent.operand("columns")):
            kept = [column for column in columns if column != self.index_name]
            return HashTargets(*self.operands[:-1], kept)
        return None


class RangeTargets(Blockwise):
    """Defer the search for the range of each row, by which Dask sorts, to the transfer task."""

    _parameters = ["frame", "by", "name", "divisions", "na_position"]
    _is_length_preserving = True

    @classmethod
    def of(cls, assigned: Assign) -> Blockwise:
        """Replace Dask's expression to sort by a column of the same frame; return any other unchanged."""
        frame, *pairs = assigned.operands
        if len(pairs) != 2 or type(pairs[1]) is not SetPartitionsPreSetIndex:
            return assigned
        column, divisions, ascending, na_position = (
            getattr(pairs[1], name) for name in SetPartitionsPreSetIndex._parameters
        )
        if type(column) is not Projection or name_of(column.frame) != name_of(frame) or not ascending:
            return assigned
        return cls(frame, column.operand("columns"), pairs[0], divisions, na_position)

    @functools.cached_property
    def _meta(self) -> Any:
        by, name, divisions, na_position = self.operands[1:]
        targets = SetPartitionsPreSetIndex(self.frame[by], divisions, True, na_position)
        return Assign(self.frame, name, targets)._meta

    @staticmethod
    def operation(frame: Any, by: Any, name: str, divisions: Any, na_position: str) -> Ranged:
        def assign(rows: Any) -> Any:
            targets = SetPartitionsPreSetIndex.operation(rows[by], divisions, True, na_position)
            return rows.assign(**{name: targets})

        return Ranged(frame, by, divisions, assign)


class RearrangeByValues(RearrangeByColumn):
    """Shuffle by the values of keys: those that are equal meet, also if they are of another dtype."""

    #: Read by :func:`dask_gpurt.client.planning.rules.partition_notes.hashes_values`.
    hashes_values = True

    def _lower(self) -> Any:
        lowered: Any = super()._lower()  # type: ignore[no-untyped-call]
        (assigned,) = lowered.find_operations(AssignPartitioningIndex)
        return lowered.substitute(assigned, AssignByValues(*assigned.operands))


class AssignByValues(AssignPartitioningIndex):
    """Add the column of output partitions, by the values of keys."""

    hashes_values = True

    @staticmethod
    def operation(frame: Any, by: Any, name: str, npartitions: int, meta: Any, index_shuffle: bool) -> Any:
        keys = frame.index.to_frame() if index_shuffle else frame[by]
        return frame.assign(**{name: partitions_by_value(keys, npartitions)})


#: The column that stands for the index among the keys of a join.
_INDEX = "_partitions_0"


def _hash_join_transfer(
    frame: Any,
    by: Any,
    name: str,
    npartitions: int,
    id: Any,
    input_partition: int,
    by_index: bool,
    like: bytes,
    ignore_index: bool,
) -> Any:
    """Transfer one side of a join, hashed as ``tasks`` does: another join may rely on where its rows are.

    ``frame``, ``by``, ``name``, ``npartitions``, ``id``, ``input_partition``, ``by_index``: as in Dask's
    task.
    ``like``: the pickled meta of the keys. Its dtypes decide what is cast before hashing: those of one
    partition may differ, and Dask's own p2p joins go by these.
    ``ignore_index``: whether rows are numbered anew, by the join; a program then makes no index for them.
    """
    known, columns = _loaded(like), set(column_names(frame))
    names = [by] if isinstance(by, str) else by
    hashed: Any  # Dask's function just passes it on
    if by_index:
        hashed = Hashed(frame, None, frame, known, partial(_by_index, by, name, npartitions, known))
    elif isinstance(names, list) and len(set(names) - columns) <= 1:
        assign = partial(_by_columns, names, name, npartitions, known)
        hashed = Hashed(frame, tuple(names) if set(names) <= columns else None, frame, known, assign)
    else:
        return create_assign_index_merge_transfer()(
            frame, by, name, npartitions, id, input_partition, by_index
        )
    return transfer(hashed, id, input_partition)


may_ignore_index(_hash_join_transfer)


def _by_index(by: Any, name: str, npartitions: int, like: Any, rows: Any) -> Any:
    """Add the output partitions of rows, by the hash of their index."""
    return AssignPartitioningIndex.operation(rows, by, name, npartitions, like, True)


def _by_columns(by: list[Any], name: str, npartitions: int, like: Any, rows: Any) -> Any:
    """Add the output partitions of rows, by the hash of columns, of which one may be the index, in order."""
    if set(by) <= set(column_names(rows)):
        return AssignPartitioningIndex.operation(rows, by, name, npartitions, like, False)
    keys = [each if each in column_names(rows) else _INDEX for each in by]
    selected = _keys_with_index(rows, keys)
    assigned = AssignPartitioningIndex.operation(
        selected, keys, name, npartitions, _keys_with_index(like, keys), False
    )
    return rows.assign(**{name: assigned[name]})


def _keys_with_index(frame: Any, keys: list[Any]) -> Any:
    """Return the columns of these keys, in order, of which one is the index."""
    return frame[[each for each in keys if each != _INDEX]].assign(**{_INDEX: frame.index})[keys]


@functools.lru_cache(maxsize=256)
def _loaded(like: bytes) -> Any:
    """Unpickle the meta of keys, which all transfers of one side share."""
    return pickle.loads(like)


def _meta_of_keys(side: Any, by: Any, by_index: bool) -> bytes:
    """Return the pickled meta of the keys of a side of a join, with its index."""
    known = side._meta
    names = () if by_index else convert_to_list(by) or ()
    return pickle.dumps(known[[name for name in names if name in column_names(known)]])


class GpurtHashJoin(HashJoinP2P):
    """Shuffle both sides of a join through the runtime, and join in the unpack tasks."""

    _parameters = [*HashJoinP2P._parameters, "any_columns", OWN_COMPUTATION]
    _defaults = {**HashJoinP2P._defaults, "any_columns": False, OWN_COMPUTATION: None}

    def _layer(self) -> dict[Any, Any]:
        whole = _WholeHashJoin(*self.operands)
        set_metadata(whole, self._meta)
        layer = _with_our_spec(
            whole._layer(),
            ignore_index=self._numbers_rows,
            computation=self.computation,
            any_columns=self.any_columns,
            label=self.label,
        )
        sides, likes = {name_of(side): side for side in (self.left, self.right)}, dict[str, bytes]()
        for task in [task for task in layer.values() if task.key[0].startswith("hash-join-transfer")]:
            partition, by, by_index = task.args[0].key, task.args[1], task.args[6]
            if (like := likes.get(task.key[0])) is None:
                like = likes[task.key[0]] = _meta_of_keys(sides[partition[0]], by, by_index)
            layer[task.key] = Task(task.key, _hash_join_transfer, *task.args, like, self._numbers_rows)
        for index, partition in enumerate(self._partitions):
            task = layer.pop((name_of(whole), partition))
            key = (self._name, index)
            layer[key] = Task(key, merge_unpack, *task.args, **task.kwargs)
        return layer

    @property
    def label(self) -> str:
        """Return what is joined by what, as a user knows it."""
        return named(self)

    @property
    def _numbers_rows(self) -> bool:
        """Return whether the join is only on columns: it renumbers the rows, so the index can be dropped."""
        sides = ((self.left, self.left_on), (self.right, self.right_on))
        by_columns = (set(convert_to_list(on) or ()) <= set(side.columns) for side, on in sides)
        return not self.left_index and not self.right_index and all(by_columns)


class GpurtBlockwiseMerge(BlockwiseMerge):
    """Join aligned partitions, of which one side may be the output of a shuffle through the runtime."""

    merging = staticmethod(merge_aligned)

    def _task(self, name: Any, index: int) -> Task:
        task = super()._task(name, index)
        return Task(name, self.merging, *task.args, **task.kwargs)


class GpurtSemiMerge(GpurtBlockwiseMerge):
    """Join aligned partitions, or one that others share, of which only the keys of the right side count."""

    merging = staticmethod(merge_frames)


class GpurtBroadcastSemiJoin(BroadcastJoin):
    """Join each partition with all of the smaller side, of which only the keys of the right side count."""

    def _layer(self) -> dict[Any, Any]:
        layer: dict[Any, Any] = super()._layer()
        joins = {key: task for key, task in layer.items() if task[0] is apply}
        return layer | {key: (apply, merge_frames, *task[2:]) for key, task in joins.items()}


class _WholeHashJoin(HashJoinP2P):
    """Hash to all partitions of the join, even if only some of them are wanted.

    Dask's own expression hashes modulo the number of wanted partitions, which results in different rows.
    """

    _parameters = [*GpurtHashJoin._parameters]
    _defaults = {**GpurtHashJoin._defaults}

    @property
    def npartitions(self) -> int:
        return int(self._npartitions)


def _with_our_spec(layer: dict[Any, Any], **options: Any) -> dict[Any, Any]:
    barriers = [task for task in layer.values() if isinstance(task, P2PBarrierTask)]
    for task in barriers:
        assert isinstance(task.spec, DataFrameShuffleSpec)
        spec = ShuffleSpec.of(task.spec, **options)
        layer[task.key] = BarrierTask(task.key, run_barrier, *task.args, spec=spec)
    return layer


def _targets(frame: Any, column: str) -> Any:
    """Return the expression that adds the column of output partitions, if that is all ``frame`` is for.

    It is then fused into the transfer task, so that no partition with the extra column is stored. Otherwise
    return None.
    """
    if not isinstance(frame, Blockwise):
        return None
    root = frame.exprs[0] if isinstance(frame, Fused) else frame
    adds = isinstance(root, (AssignPartitioningIndex, Assign, RangeTargets)) and column in root.columns
    return root if adds else None
