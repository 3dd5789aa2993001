"""Describe shuffles. A spec is the same on the scheduler and on every worker, and for all runs of a shuffle.

Dask's p2p plugins on the scheduler and the workers manage runs, their ids, restarts and owners. These specs
make them create the runs of this package.

There is a spec for each kind of data: :class:`ShuffleSpec` for the rows of dataframes, and
:class:`~dask_gpurt.shuffle.rechunk.RechunkSpec` for the chunks of arrays. Runs refer to inputs and outputs by
number.

Decisions and their figures: ``docs/decisions/partitions.md``.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.dask_hooks.shuffle import (
    ArrayRechunkSpec,
    DataFrameShuffleSpec,
    SchedulerShuffleState,
    ShuffleWorkerPlugin,
    errors_of_data,
    worker_for_range_sharding,
)
from dask_gpurt.dask_hooks.shuffle import ShuffleSpec as DaskShuffleSpec
from dask_gpurt.dask_hooks.types import SchedulerTask
from dask_gpurt.frames import Packer, Part, Piece, Routed, Table, column_names, halves
from dask_gpurt.frames.boxes import Grid
from dask_gpurt.frames.registry import device_kind, has_unknown_categories
from dask_gpurt.observe import Metrics
from dask_gpurt.shuffle.owners import Owners

if TYPE_CHECKING:
    from dask_gpurt.exchange.exchange import Exchange
    from dask_gpurt.shuffle.run import ShuffleRun


class Input(Protocol):
    """Split an input partition."""

    @property
    def packer(self) -> Packer:
        """Return the backend that packs the pieces."""

    @property
    def data(self) -> Any:
        """Return the partition itself."""

    def count(self, metrics: Metrics) -> None:
        """Count its rows or elements."""

    def split(self, groups: Sequence[Sequence[int]]) -> list[Piece | None]:
        """Split it into a piece for each group of outputs; None for groups without rows or elements."""

    def halves(self) -> Sequence[Input]:
        """Return its halves, to split it when memory is short; empty if it cannot be halved."""

    def empty(self) -> bytes | None:
        """Return a pickled output without rows, made of this input; None if it is as the spec has it."""


class Assembler(Protocol):
    """Assemble outputs. Thread-safe."""

    def assemble(self, parts: Sequence[Part], empty: bytes | None) -> tuple[Any, Packer]:
        """Assemble an output; return it with the packer whose fence guards the reads.

        ``empty``: see :meth:`Input.empty`.
        """


@dataclass(frozen=True)
class RunSpec(DaskShuffleSpec[int]):
    """Describe a shuffle of any kind of data.

    ``npartitions``: the number of outputs, wanted or not.
    """

    npartitions: int

    @property
    def ninputs(self) -> int:
        """Return the number of inputs, or an estimate of it."""
        return self.npartitions

    @property
    def device(self) -> str | None:
        """Return the kind of device that a worker needs to assemble outputs; None for any."""
        return None

    @property
    @abstractmethod
    def smallest(self) -> str:
        """Return a description of the smallest part that an input can be split into, for messages."""

    @abstractmethod
    def input(self, data: Any, source: int, exchange: Exchange) -> Input:
        """Validate an input, and return it ready to be split.

        Raises ValueError if the input does not have the columns or the shape of the collection.
        """

    @abstractmethod
    def assembler(self, exchange: Exchange) -> Assembler:
        """Return the assembler of the outputs on one worker."""

    def source_of(self, input_id: Any) -> int:
        """Return the number of the input with the id in a transfer task."""
        return int(input_id)

    def output_of(self, output_id: Any) -> int:
        """Return the number of the output with the id in an unpack task."""
        return int(output_id)

    def pick_worker(self, partition: int, workers: Sequence[str]) -> str:
        """Return the initial owner of an output.

        Neighbouring partitions have the same owner, so that a shard is one range of sorted rows. With
        placement enabled, the scheduler chooses other owners, for which the same holds.
        """
        return str(worker_for_range_sharding(self.npartitions, partition, workers))

    def create_new_run(self, worker_for: dict[int, str], span_id: str | None) -> SchedulerShuffleState[int]:
        """Start a run on the scheduler, with owners that can change."""
        return super().create_new_run(Owners.of(worker_for), span_id)

    # The type is that of Dask's own run, of which Dask calls only the methods that ours implements.
    def create_run_on_worker(  # type: ignore[override]
        self, run_id: int, span_id: str | None, worker_for: dict[int, str], plugin: ShuffleWorkerPlugin
    ) -> ShuffleRun:
        """Start this worker's part of a run."""
        from dask_gpurt.shuffle.run import ShuffleRun

        worker = plugin.worker
        runtime: Any = worker.plugins.get("gpurt")
        # The plugin creates its exchange in a thread, so it may not have one yet.
        if (exchange := getattr(runtime, "exchange", None)) is None:
            raise RuntimeError(
                f"worker {worker.address} takes part in a gpurt shuffle, but the runtime is not on there: "
                "start it with `--preload dask_gpurt`, or call dask_gpurt.enable(client) again"
            )
        return ShuffleRun(self, run_id, span_id, Owners.of(worker_for), worker, exchange)


@dataclass(frozen=True)
class ShuffleSpec(RunSpec):
    """Describe a shuffle of dataframes by a column of output partition numbers.

    ``column``: holds the output partition of each row.
    ``meta``: the pickled empty output partition. Only workers unpickle it, since it may need a GPU, which the
    scheduler may not have.
    ``columns``: the column labels of every input partition, including ``column``.
    ``drop_column``, ``ignore_index``: whether to drop ``column`` and the index from the outputs.
    ``in_order``: whether rows keep their order within each input, as where frames are aligned by their index:
    rows with the same label then meet one by one.
    ``computation``: the name of the only computation that this shuffle is part of; None if several may share
    it.
    ``device``: the kind of device that a worker needs to assemble outputs.
    ``is_open``: whether categories are unknown in ``meta``, so that outputs without rows have those of an
    input.
    ``any_columns``: whether inputs may lack columns, which are missing values in outputs with rows of others,
    or have more, which are left out.
    ``label``: the operation and its keys, as a user knows them.
    """

    column: str
    meta: bytes
    columns: tuple[Any, ...]
    parts_out: tuple[int, ...]
    drop_column: bool
    ignore_index: bool
    in_order: bool = False
    computation: str | None = None
    device: str = "host"
    is_open: bool = False
    any_columns: bool = False
    label: str = "shuffle"

    @classmethod
    def of(
        cls,
        spec: DataFrameShuffleSpec,
        *,
        ignore_index: bool = False,
        in_order: bool = False,
        computation: str | None = None,
        any_columns: bool = False,
        label: str = "shuffle",
    ) -> ShuffleSpec:
        """Convert a spec of Dask's p2p shuffle."""
        wanted = range(spec.parts_out) if isinstance(spec.parts_out, int) else spec.parts_out
        names = column_names(spec.meta)
        return cls(
            id=spec.id,
            disk=False,
            npartitions=spec.npartitions,
            column=spec.column,
            meta=pickle.dumps(_output(spec, names, ignore_index=ignore_index)),
            columns=names,
            parts_out=tuple(wanted),
            drop_column=spec.drop_column,
            ignore_index=ignore_index,
            in_order=in_order,
            computation=computation,
            device=device_kind(spec.meta) or "host",
            is_open=has_unknown_categories(spec.meta),
            any_columns=any_columns,
            label=label,
        )

    @property
    def output_partitions(self) -> Generator[int, None, None]:
        yield from self.parts_out

    @property
    def smallest(self) -> str:
        return f"one row of shuffle {self.id}"

    def input(self, data: Any, source: int, exchange: Exchange) -> FrameInput:
        frame = self._validated(data, source)
        plain = frame.frame if isinstance(frame, Routed) else frame
        return FrameInput(self, exchange.table(plain), frame, plain)

    def _validated(self, frame: Any, source: int) -> Any:
        """Return the partition with its columns in order; raise ValueError before any of it is published."""
        if isinstance(frame, Routed):
            plain = self._in_order(frame.frame, [c for c in self.columns if c != self.column], source)
            if plain is frame.frame:
                return frame
            whole = list(self.columns)
            return replace(
                frame, frame=plain, assign=lambda rows: self._in_order(frame.assign(rows), whole, source)
            )
        return self._in_order(frame, list(self.columns), source)

    def _in_order(self, frame: Any, columns: list[Any], source: int) -> Any:
        names, expected = _comparable(column_names(frame)), _comparable(columns)
        if names == expected:
            return frame
        missing = sorted(map(str, set(expected) - set(names)))
        extra = sorted(map(str, set(names) - set(expected)))
        if (missing or extra) and not self.any_columns:
            if not len(frame):  # has nothing to shuffle: some functions return other columns for no rows
                return frame
            raise ValueError(
                f"input partition {source} of shuffle {self.id} does not have the columns of its collection: "
                f"missing {missing}, unexpected {extra}. All partitions need the columns of `df._meta`"
            )
        return frame[[name for name, known in zip(columns, expected, strict=True) if known in {*names}]]

    def assembler(self, exchange: Exchange) -> FrameAssembler:
        return FrameAssembler(self, exchange, pickle.loads(self.meta))


def _comparable(labels: Sequence[Any]) -> list[Any]:
    """Return labels of which NaN, which another process has as another object, equals itself."""
    return [str(label) if label != label else label for label in labels]


def _output(spec: DataFrameShuffleSpec, names: Sequence[Any], *, ignore_index: bool) -> Any:
    """Return the empty output partition of a shuffle whose inputs have columns of these names."""
    # The meta of a collection made from a bag may have a row, which is not part of the data.
    meta = spec.meta.iloc[:0] if len(spec.meta) else spec.meta
    if spec.drop_column:
        kept = [name for name in names if name != spec.column]
        # cudf copies each column in `drop`, but has no equal labels. In pandas these would select twice.
        meta = meta[kept] if len(set(names)) == len(names) else meta.drop(columns=spec.column)
    return meta.reset_index(drop=True) if ignore_index else meta


@dataclass(frozen=True)
class FrameInput:
    """Split an input partition of a shuffle.

    ``frame``: the partition with its output partition numbers, or with a way to compute them.
    ``data``: the partition alone.
    """

    spec: ShuffleSpec
    packer: Table
    frame: Any
    data: Any

    def count(self, metrics: Metrics) -> None:
        metrics.add("shuffle.rows", len(self.data))

    def split(self, groups: Sequence[Sequence[int]]) -> list[Piece | None]:
        spec = self.spec
        if not len(self.data):
            return [None] * len(groups)
        with errors_of_data():
            return self.packer.split(
                self.frame,
                spec.column,
                groups,
                spec.npartitions,
                drop_column=spec.drop_column,
                ignore_index=spec.ignore_index,
                in_order=spec.in_order,
            )

    def halves(self) -> Sequence[FrameInput]:
        return [replace(self, frame=half) for half in halves(self.frame)]

    def empty(self) -> bytes | None:
        spec, frame = self.spec, self.frame
        (names, dtypes), (known, expected) = (
            _described(each, spec.column, index=not spec.ignore_index)
            for each in (self.data, pickle.loads(spec.meta))
        )
        if names != known or (dtypes == expected and not spec.is_open):
            return None
        with errors_of_data():
            rows = frame.between(0, 0).assigned() if isinstance(frame, Routed) else frame.iloc[:0]
        if spec.drop_column:
            rows = rows.drop(columns=spec.column)
        return pickle.dumps(rows.reset_index(drop=True) if spec.ignore_index else rows)


def _described(frame: Any, but: str, *, index: bool) -> tuple[list[Any], list[Any]]:
    """Return the names of all columns but one, and their dtypes with those and the names of the index."""
    columns = zip(_comparable(column_names(frame)), frame.dtypes, strict=True)
    kept = [(name, dtype) for name, dtype in columns if name != but]
    levels = [*frame.index.names, *getattr(frame.index, "dtypes", [frame.index.dtype])] if index else []
    return [name for name, _ in kept], [dtype for _, dtype in kept] + levels


@dataclass(frozen=True)
class FrameAssembler:
    """Assemble output partitions of a shuffle."""

    spec: ShuffleSpec
    exchange: Exchange
    meta: Any

    def assemble(self, parts: Sequence[Part], empty: bytes | None) -> tuple[Any, Packer]:
        """Concatenate the rows of parts."""
        spec, table = self.spec, self.exchange.table(self.meta)
        if not parts and empty is not None:
            return pickle.loads(empty), table
        with errors_of_data():
            frame = table.assemble(parts, self.meta, ignore_index=spec.ignore_index)
            if spec.any_columns and column_names(frame) != column_names(self.meta):
                frame = frame[[name for name in column_names(self.meta) if name in column_names(frame)]]
        return frame, table


# ---- outputs on the scheduler ----------------------------------------------------------------------


def outputs_of(barrier: SchedulerTask) -> Iterator[tuple[SchedulerTask, int | None]]:
    """Yield the tasks that depend on a shuffle's barrier, each with the output that it assembles.

    The output is None if it cannot be read from the task.
    """
    spec: Any = barrier.run_spec
    number = _numbering(spec.spec)
    for task in barrier.dependents:
        found = {number(*named) for named in _named_outputs(task.run_spec)} - {None}
        yield task, found.pop() if len(found) == 1 else None


def _numbering(spec: Any) -> Callable[[Any, Any], int | None]:
    """Return a function that numbers the output of a shuffle; None for an output of another shuffle."""
    if isinstance(spec, ArrayRechunkSpec):
        grid = Grid.of(spec.new)
        # One task may take chunks of two shuffles, which number them in different grids.
        return lambda shuffle, output: grid.number(output) if shuffle == spec.id else None
    return lambda shuffle, output: output if isinstance(output, int) else None


def _named_outputs(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the shuffle id and the output id of each unpack task in a task, including fused ones."""
    name = getattr(getattr(node, "func", None), "__name__", "")
    if name == "_execute_subgraph":  # fused tasks
        for inner in node.args[0].values():
            yield from _named_outputs(inner)
    position = {"shuffle_unpack": 1, "merge_unpack": 2, "rechunk_unpack": 1}.get(name)
    if position is not None and len(node.args) > position:
        yield node.args[0], node.args[position]
