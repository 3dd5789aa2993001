"""Shuffles and joins as expressions: Dask's p2p graphs, with our spec at the barrier."""

from __future__ import annotations

import functools
from typing import Any

from dask._task_spec import Task
from dask.dataframe.dask_expr._expr import Assign, Blockwise, Fused
from dask.dataframe.dask_expr._merge import HashJoinP2P
from dask.dataframe.dask_expr._shuffle import AssignPartitioningIndex, P2PShuffle
from distributed.shuffle._core import P2PBarrierTask

from dask_gpurt.shuffle import ShuffleSpec


class GpurtShuffle(P2PShuffle):  # type: ignore[misc]
    """A shuffle through the runtime."""

    @functools.cached_property
    def _meta(self) -> Any:
        meta = self.frame._meta.drop(columns=self.partitioning_index)
        return meta.reset_index(drop=True) if self._drops_index else meta

    @property
    def _drops_index(self) -> bool:
        """Whether the index stays behind: in ``set_index``, which replaces it anyway.

        Where the user asks for it, Dask's description of the result still has the index, and
        like Dask's p2p we keep to that.
        """
        return bool(self.ignore_index) and self.original_partitioning_index is None

    def _layer(self) -> dict[Any, Any]:
        layer = _with_our_spec(super()._layer(), ignore_index=self._drops_index)
        if _computes_targets(self.frame, self.partitioning_index):
            for task in [task for task in layer.values() if task.func.__name__ == "_shuffle_transfer"]:
                (producer,) = task.dependencies
                layer[task.key] = Task.fuse(self.frame._task(producer, producer[1]), task, key=task.key)
        return layer


class GpurtHashJoin(HashJoinP2P):  # type: ignore[misc]
    """A join that shuffles both sides through the runtime and joins as it unpacks."""

    def _layer(self) -> dict[Any, Any]:
        whole = _WholeHashJoin(*self.operands)
        layer = _with_our_spec(whole._layer(), ignore_index=False)
        for index, partition in enumerate(self._partitions):
            task = layer.pop((whole._name, partition))
            key = (self._name, index)
            layer[key] = Task(key, task.func, *task.args, **task.kwargs)
        return layer


class _WholeHashJoin(HashJoinP2P):  # type: ignore[misc]
    """Hashes to all partitions of the join, also where only some of them are wanted.

    Dask's own takes the number of wanted ones, and so gives other rows.
    """

    @property
    def npartitions(self) -> int:
        return int(self._npartitions)


def _with_our_spec(layer: dict[Any, Any], *, ignore_index: bool) -> dict[Any, Any]:
    barriers = [task for task in layer.values() if isinstance(task, P2PBarrierTask)]
    for task in barriers:
        spec = ShuffleSpec.of(task.spec, ignore_index=ignore_index)
        layer[task.key] = P2PBarrierTask(task.key, task.func, *task.args, spec=spec)
    return layer


def _computes_targets(frame: Any, column: str) -> bool:
    """Whether ``frame`` only exists to add the output partitions of this one shuffle.

    Then its work is done within the transfer task: no task of its own, and no partition
    with the extra column is kept.
    """
    if not isinstance(frame, Blockwise):
        return False
    root = frame.exprs[0] if isinstance(frame, Fused) else frame
    return isinstance(root, (AssignPartitioningIndex, Assign)) and column in root.columns
