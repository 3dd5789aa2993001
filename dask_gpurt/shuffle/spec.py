"""Describe a shuffle: the same on the scheduler and on every worker, for all its runs.

Runs, their ids, their restart and their owners are managed by the machinery of Dask's p2p
shuffles on the scheduler and the workers; a spec of ours makes it work with our runs.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask_gpurt.dask_hooks.shuffle import (
    DataFrameShuffleSpec,
    SchedulerShuffleState,
    ShuffleWorkerPlugin,
    worker_for_range_sharding,
)
from dask_gpurt.dask_hooks.shuffle import ShuffleSpec as DaskShuffleSpec
from dask_gpurt.frames.registry import device_kind
from dask_gpurt.shuffle.owners import Owners

if TYPE_CHECKING:
    from dask_gpurt.shuffle.run import ShuffleRun


@dataclass(frozen=True)
class ShuffleSpec(DaskShuffleSpec[int]):
    """A shuffle of dataframes by a column that holds output partitions.

    Attributes
    ----------
    npartitions
        Output partitions, wanted or not.
    column
        Holds the output partition of each row.
    meta
        The pickled empty frame that describes a partition, ``column`` included. Only workers
        unpickle it: it may live on a GPU, which the scheduler need not have.
    columns
        Labels that every input partition has.
    parts_out
        The output partitions that are wanted.
    drop_column, ignore_index
        Whether ``column`` and the index are left out of the outputs.
    order_by
        The column that outputs are about to be sorted by, None where that is not known.
    computation
        The name of the only computation that this shuffle is a part of; None where others may share it.
    device
        The kind of device that a worker needs to put outputs together.
    """

    npartitions: int
    column: str
    meta: bytes
    columns: tuple[Any, ...]
    parts_out: tuple[int, ...]
    drop_column: bool
    ignore_index: bool
    order_by: Any = None
    computation: str | None = None
    device: str = "host"

    @classmethod
    def of(
        cls,
        spec: DataFrameShuffleSpec,
        *,
        ignore_index: bool = False,
        order_by: Any = None,
        computation: str | None = None,
    ) -> ShuffleSpec:
        """Return our spec for the shuffle that a spec of Dask's p2p describes."""
        wanted = range(spec.parts_out) if isinstance(spec.parts_out, int) else spec.parts_out
        return cls(
            id=spec.id,
            disk=False,
            npartitions=spec.npartitions,
            column=spec.column,
            meta=pickle.dumps(spec.meta),
            columns=tuple(spec.meta.columns),
            parts_out=tuple(wanted),
            drop_column=spec.drop_column,
            ignore_index=ignore_index,
            order_by=order_by,
            computation=computation,
            device=device_kind(spec.meta) or "host",
        )

    @property
    def output_partitions(self) -> Generator[int, None, None]:
        yield from self.parts_out

    def pick_worker(self, partition: int, workers: Sequence[str]) -> str:
        """Return the owner of an output.

        Neighbouring partitions share one, so that a shard is one run of sorted rows.

        With placement on, the scheduler has other owners; then too neighbours share them.
        """
        return str(worker_for_range_sharding(self.npartitions, partition, workers))

    def create_new_run(self, worker_for: dict[int, str], span_id: str | None) -> SchedulerShuffleState[int]:
        """Begin a run on the scheduler, whose owners can change."""
        return super().create_new_run(Owners.of(worker_for), span_id)

    # Dask wants a run of its own class, and calls no more of it than ours has.
    def create_run_on_worker(  # type: ignore[override]
        self, run_id: int, span_id: str | None, worker_for: dict[int, str], plugin: ShuffleWorkerPlugin
    ) -> ShuffleRun:
        """Begin this worker's part of a run."""
        from dask_gpurt.shuffle.run import ShuffleRun

        worker = plugin.worker
        runtime: Any = worker.plugins.get("gpurt")
        # A worker has the plugin before that has an exchange, which is made on a thread.
        if (exchange := getattr(runtime, "exchange", None)) is None:
            raise RuntimeError(
                f"worker {worker.address} takes part in a gpurt shuffle, but the runtime is not on there: "
                "start it with `--preload dask_gpurt`, or call dask_gpurt.enable(client) again"
            )
        return ShuffleRun(self, run_id, span_id, Owners.of(worker_for), worker, exchange)


def output_partition(node: Any) -> int | None:
    """Return the output partition that a task of a shuffle assembles; None when the task does not show it.

    Parameters
    ----------
    node
        The task as the scheduler has it.
    """
    found = set(_output_partitions(node))
    return found.pop() if len(found) == 1 else None


def _output_partitions(node: Any) -> Iterator[int]:
    name = getattr(getattr(node, "func", None), "__name__", "")
    if name == "_execute_subgraph":  # tasks that were fused
        for inner in node.args[0].values():
            yield from _output_partitions(inner)
    position = {"shuffle_unpack": 1, "merge_unpack": 2}.get(name)
    if position is not None and len(node.args) > position and isinstance(node.args[position], int):
        yield node.args[position]
