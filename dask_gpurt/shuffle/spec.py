"""Describe a shuffle: the same on the scheduler and on every worker, for all its runs.

Runs, their ids, their restart and their owners are managed by the machinery of Dask's p2p
shuffles on the scheduler and the workers; a spec of ours makes it work with our runs.

Each kind of data has a spec: :class:`ShuffleSpec` is for the rows of dataframes, and
:class:`~dask_gpurt.shuffle.rechunk.RechunkSpec` for the chunks of arrays. Runs number inputs and outputs.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.dask_hooks.arrays import ArrayRechunkSpec
from dask_gpurt.dask_hooks.shuffle import (
    DataFrameShuffleSpec,
    SchedulerShuffleState,
    ShuffleWorkerPlugin,
    worker_for_range_sharding,
)
from dask_gpurt.dask_hooks.shuffle import ShuffleSpec as DaskShuffleSpec
from dask_gpurt.frames import ChunkTable, Packer, Part, Piece, Routed, Table, halves
from dask_gpurt.frames.boxes import Grid
from dask_gpurt.frames.registry import device_kind
from dask_gpurt.observe import Metrics
from dask_gpurt.shuffle.owners import Owners

if TYPE_CHECKING:
    from dask_gpurt.shuffle.run import ShuffleRun


class Tables(Protocol):
    """Find what packs on a worker, as its exchange does."""

    def table(self, frame: Any) -> Table:
        """Return the backend for a frame."""
        ...

    def chunk_table(self, library: str) -> ChunkTable:
        """Return what packs the chunks of an array library."""
        ...


class Input(Protocol):
    """Cut an input partition."""

    @property
    def packer(self) -> Packer:
        """Return what packs its pieces."""
        ...

    @property
    def data(self) -> Any:
        """Return the partition itself."""
        ...

    def count(self, metrics: Metrics) -> None:
        """Count what it consists of."""
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> list[Piece | None]:
        """Cut it into a piece for each group of outputs, None where that has nothing of it."""
        ...

    def halves(self) -> Sequence[Input]:
        """Return its halves, for where memory is too short to cut it whole; none where it has none."""
        ...


class Assembler(Protocol):
    """Put outputs together. Thread-safe."""

    def assemble(self, parts: Sequence[Part]) -> tuple[Any, Packer]:
        """Return an output, and the packer that is to be asked for a fence."""
        ...


@dataclass(frozen=True)
class RunSpec(DaskShuffleSpec[int]):
    """Describe what goes through a run, of whatever kind.

    Attributes
    ----------
    npartitions
        Outputs, wanted or not.
    """

    npartitions: int

    @property
    def ninputs(self) -> int:
        """Return the number of inputs, or a guess at it."""
        return self.npartitions

    @property
    def device(self) -> str | None:
        """Return the kind of device that a worker needs to put outputs together; None where any may do."""
        return None

    @property
    @abstractmethod
    def smallest(self) -> str:
        """Return a name for what of an input is never divided, for people."""

    @abstractmethod
    def input(self, data: Any, source: int, tables: Tables) -> Input:
        """Make an input ready to be cut.

        Raises
        ------
        ValueError
            When it is not of this shuffle.
        """

    @abstractmethod
    def assembler(self, tables: Tables) -> Assembler:
        """Return what puts the outputs together on one worker."""

    def source_of(self, input_id: Any) -> int:
        """Return the number of the input that a transfer task names."""
        return int(input_id)

    def output_of(self, output_id: Any) -> int:
        """Return the number of the output that an unpack task names."""
        return int(output_id)

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


@dataclass(frozen=True)
class ShuffleSpec(RunSpec):
    """Describe a shuffle of dataframes by a column that holds output partitions.

    Attributes
    ----------
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
            # That of a collection made of a bag has a row, which is none of the outputs'.
            meta=pickle.dumps(spec.meta.iloc[:0]),
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

    @property
    def smallest(self) -> str:
        return f"one row of shuffle {self.id}"

    def input(self, data: Any, source: int, tables: Tables) -> FrameInput:
        frame = self._validated(data, source)
        plain = frame.frame if isinstance(frame, Routed) else frame
        return FrameInput(self, tables.table(plain), frame, plain)

    def _validated(self, frame: Any, source: int) -> Any:
        """Return the partition with its columns in order; refuses it before anything of it is published."""
        if isinstance(frame, Routed):
            plain = self._in_order(frame.frame, [c for c in self.columns if c != self.column], source)
            if plain is frame.frame:
                return frame
            return replace(frame, frame=plain, assign=lambda rows: frame.assign(rows)[list(self.columns)])
        return self._in_order(frame, list(self.columns), source)

    def _in_order(self, frame: Any, columns: list[Any], source: int) -> Any:
        if list(frame.columns) == columns:
            return frame
        missing = sorted(map(str, set(columns) - set(frame.columns)))
        extra = sorted(map(str, set(frame.columns) - set(columns)))
        if missing or extra:
            raise ValueError(
                f"input partition {source} of shuffle {self.id} has other columns than the collection "
                f"says: missing {missing}, unexpected {extra}. All partitions need the columns of `df._meta`"
            )
        return frame[columns]

    def assembler(self, tables: Tables) -> FrameAssembler:
        meta = pickle.loads(self.meta)
        if self.drop_column:
            meta = meta.drop(columns=self.column)
        meta = meta.reset_index(drop=True) if self.ignore_index else meta
        return FrameAssembler(self, tables, meta)


@dataclass(frozen=True)
class FrameInput:
    """Cut an input partition of a shuffle.

    Attributes
    ----------
    frame, data
        The partition, with its output partitions or how to find them, and without.
    """

    spec: ShuffleSpec
    packer: Table
    frame: Any
    data: Any

    def count(self, metrics: Metrics) -> None:
        metrics.add("shuffle.rows", len(self.data))

    def split(self, groups: Sequence[Sequence[int]]) -> list[Piece | None]:
        spec = self.spec
        return self.packer.split(
            self.frame,
            spec.column,
            groups,
            spec.npartitions,
            drop_column=spec.drop_column,
            ignore_index=spec.ignore_index,
        )

    def halves(self) -> Sequence[FrameInput]:
        return [replace(self, frame=half) for half in halves(self.frame)]


@dataclass(frozen=True)
class FrameAssembler:
    """Put output partitions of a shuffle together.

    Attributes
    ----------
    meta
        The empty output partition.
    """

    spec: ShuffleSpec
    tables: Tables
    meta: Any

    def assemble(self, parts: Sequence[Part]) -> tuple[Any, Packer]:
        """Concatenate the rows of parts."""
        spec, table = self.spec, self.tables.table(self.meta)
        frame = table.assemble(parts, self.meta, ignore_index=spec.ignore_index, order_by=spec.order_by)
        return frame, table


# ---- outputs on the scheduler ----------------------------------------------------------------------


def outputs_of(barrier: Any) -> Iterator[tuple[Any, int | None]]:
    """Yield the tasks that depend on the barrier of a shuffle, each with the output that it assembles.

    That is None when the task does not show it.

    Parameters
    ----------
    barrier
        The barrier's task, as the scheduler has it.
    """
    number = _numbering(barrier.run_spec.spec)
    for task in barrier.dependents:
        found = {number(*named) for named in _named_outputs(task.run_spec)} - {None}
        yield task, found.pop() if len(found) == 1 else None


def _numbering(spec: Any) -> Callable[[Any, Any], int | None]:
    """Return what numbers the output that a task names, given the shuffle and the output; None: another's."""
    if isinstance(spec, ArrayRechunkSpec):
        grid = Grid.of(spec.new)
        # Chunks of two shuffles may be the inputs of one task, and have their numbers in different grids.
        return lambda shuffle, output: grid.number(output) if shuffle == spec.id else None
    return lambda shuffle, output: output if isinstance(output, int) else None


def _named_outputs(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the shuffle and the output of each unpack task in a task."""
    name = getattr(getattr(node, "func", None), "__name__", "")
    if name == "_execute_subgraph":  # tasks that were fused
        for inner in node.args[0].values():
            yield from _named_outputs(inner)
    position = {"shuffle_unpack": 1, "merge_unpack": 2, "rechunk_unpack": 1}.get(name)
    if position is not None and len(node.args) > position:
        yield node.args[0], node.args[position]
