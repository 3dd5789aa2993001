"""Implement the sides of the exchange benchmark: the runtime, and RapidsMPF."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dask.dataframe.dask_expr._shuffle import AssignPartitioningIndex
from distributed import get_worker
from distributed.shuffle._core import ShuffleId
from distributed.utils import sync

from benchmarks.common.processes import Barrier
from benchmarks.common.rows import ROW_BYTES, make_random
from dask_gpurt.client.expressions import HashTargets
from dask_gpurt.shuffle import ShuffleSpec
from dask_gpurt.shuffle.run import ShuffleRun

Frame = Any

TARGETS = "_partitions"
HIGHEST = 2**62


@dataclass(frozen=True)
class Plan:
    """Hold the sizes and counts of a shuffle."""

    size: int
    partitions: int
    workers: int
    repeat: int
    backend: str
    protocol: str | None
    index: bool
    rmm_pool_size: float

    def sources(self, rank: int) -> range:
        """List the input partitions of a worker."""
        return range(rank, self.partitions, self.workers)

    def source(self, number: int) -> Frame:
        """Make an input partition."""
        return make_random(number, self.size // ROW_BYTES // self.partitions, HIGHEST, self.backend)


class Side(Protocol):
    """One process's part in a shuffle; ``begin``, ``frame`` and ``end`` are not timed."""

    def begin(self, turn: int) -> None: ...

    def produce(self, source: int) -> None:
        """Hash an input partition and hand its rows to the exchange."""

    def settle(self) -> None:
        """Complete the step between the last input and the first output."""

    def consume(self) -> dict[int, Any]:
        """Assemble the output partitions of this process, in the side's own form."""

    def frame(self, partition: int, output: Any) -> Frame:
        """Convert an output to a frame; raise if it has rows of another partition."""

    def counters(self) -> Mapping[str, float]:
        """Return the counters of this process so far."""

    def end(self) -> None: ...


class Gpurt:
    """A shuffle run of the runtime on a worker, created and closed here instead of by tasks."""

    def __init__(self, plan: Plan, addresses: Sequence[str], inputs: Mapping[int, Frame], barrier: Barrier):
        self.plan = plan
        self.addresses = addresses
        self.inputs = inputs
        self.barrier = barrier
        self.worker: Any = get_worker()
        self.plugin = self.worker.plugins["shuffle"]
        self.meta = make_random(0, 1, HIGHEST, plan.backend).iloc[:0]

    def begin(self, turn: int) -> None:
        meta = self._with_targets(self.meta)
        partitions = tuple(range(self.plan.partitions))
        spec = ShuffleSpec(
            id=ShuffleId(f"exchange-{turn}"),
            disk=False,
            npartitions=len(partitions),
            column=TARGETS,
            meta=pickle.dumps(meta),
            columns=tuple(meta.columns),
            parts_out=partitions,
            drop_column=True,
            ignore_index=not self.plan.index,
        )
        worker_for = {p: spec.pick_worker(p, self.addresses) for p in partitions}
        self.outputs = [p for p, owner in worker_for.items() if owner == self.worker.address]
        self.run: ShuffleRun = sync(self.worker.loop, self._register, spec, turn + 1, worker_for)

    async def _register(self, spec: ShuffleSpec, run_id: int, worker_for: dict[int, str]) -> ShuffleRun:
        """Create a run, and register it where Dask's handlers look up the run of a message."""
        run = spec.create_run_on_worker(run_id, None, worker_for, self.plugin)
        self.plugin.shuffle_runs._active_runs[spec.id] = run
        self.plugin.shuffle_runs._runs.add(run)
        return run

    def _with_targets(self, frame: Frame) -> Frame:
        """Add a column with the target partitions that Dask computes."""
        return AssignPartitioningIndex.operation(
            frame, ["key"], TARGETS, self.plan.partitions, self.meta, False
        )

    def produce(self, source: int) -> None:
        # The same as in a transfer task of a shuffle by columns, which includes hashing.
        frame = HashTargets.operation(
            self.inputs[source], ["key"], TARGETS, self.plan.partitions, self.meta, False
        )
        self.run.add_partition(frame, source)

    def settle(self) -> None:
        self.barrier.meet()
        sync(self.worker.loop, self.run._flush)
        self.barrier.meet()
        sync(self.worker.loop, self._seal)

    async def _seal(self) -> None:
        """Seal the run as the barrier task does: all inputs have been offered, each in one attempt."""
        shares = self.run._receiver._shares.values()
        inputs = {source: one.attempt for share in shares for source, one in share.inputs._inputs.items()}
        if (missing := self.run._receiver.seal(inputs)) or (shares and len(inputs) != self.plan.partitions):
            raise RuntimeError(
                f"{len(inputs)} of {self.plan.partitions} inputs arrived; incomplete: {missing}"
            )

    def consume(self) -> dict[int, Frame]:
        frames = {}
        for partition in self.outputs:
            key = ("output", partition)
            frames[partition] = self.run.get_output_partition(partition, key)
            self.worker.loop.add_callback(self.run.task_done, key)
        return frames

    def frame(self, partition: int, output: Frame) -> Frame:
        if not (self._with_targets(output)[TARGETS] == partition).all():
            raise ValueError(f"output partition {partition} has rows of another partition")
        return output

    def counters(self) -> Mapping[str, float]:
        counters: dict[str, float] = self.worker.plugins["gpurt"].metrics.snapshot()["counters"]
        return counters

    def end(self) -> None:
        sync(self.worker.loop, self._close)

    async def _close(self) -> None:
        self.plugin.shuffle_runs._active_runs.pop(self.run.id)
        await self.plugin.shuffle_runs.close(self.run)


class RapidsMPF:
    """A rank of RapidsMPF's shuffler over UCXX."""

    def __init__(self, plan: Plan, rank: int, root: Path, barrier: Barrier):
        self.plan = plan
        self.resource = self._make_resource()
        self.comm = self._connect(rank, root, barrier)
        self.inputs = {source: plan.source(source) for source in plan.sources(rank)}
        if plan.index:  # RapidsMPF moves an index only as a column
            self.inputs = {source: frame.reset_index() for source, frame in self.inputs.items()}
        self.tables = {source: frame.to_pylibcudf()[0] for source, frame in self.inputs.items()}

    def _make_resource(self) -> Any:
        import cudf  # noqa: F401 - lets cupy allocate where rmm does
        import rmm
        from cupy.cuda import runtime
        from rapidsmpf.memory.buffer_resource import BufferResource
        from rapidsmpf.statistics import Statistics

        size = int(runtime.memGetInfo()[1] * self.plan.rmm_pool_size) // 256 * 256
        pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=size)
        resource = BufferResource(pool, statistics=Statistics(enable=False))
        rmm.mr.set_current_device_resource(resource.device_mr_adaptor())
        return resource

    def _connect(self, rank: int, root: Path, barrier: Barrier) -> Any:
        """Join the communicator; the first rank leaves its address in ``root``."""
        from rapidsmpf.communicator.ucxx import barrier as ucxx_barrier
        from rapidsmpf.communicator.ucxx import get_root_ucxx_address, new_communicator
        from rapidsmpf.config import Options, get_environment_variables
        from rapidsmpf.progress_thread import ProgressThread
        from ucxx._lib.libucxx import UCXAddress

        options, progress = Options(get_environment_variables()), ProgressThread(self.resource.statistics)
        if rank == 0:
            comm = new_communicator(self.plan.workers, None, None, options, progress)
            root.write_bytes(get_root_ucxx_address(comm))
        barrier.meet()
        if rank > 0:
            address = UCXAddress.create_from_buffer(root.read_bytes())
            comm = new_communicator(self.plan.workers, None, address, options, progress)
        ucxx_barrier(comm)
        return comm

    def begin(self, turn: int) -> None:
        from rapidsmpf.shuffler import PartitionAssignment, Shuffler

        contiguous = PartitionAssignment.CONTIGUOUS
        self.shuffler = Shuffler(self.comm, turn, self.plan.partitions, self.resource, contiguous)

    def produce(self, source: int) -> None:
        from cudf_streaming.partition_utils import partition_and_pack
        from rmm.pylibrmm.stream import DEFAULT_STREAM

        table, key, partitions = self.tables[source], int(self.plan.index), self.plan.partitions
        chunks = partition_and_pack(table, [key], partitions, stream=DEFAULT_STREAM, br=self.resource)
        self.shuffler.insert_chunks(chunks)

    def settle(self) -> None:
        self.shuffler.insert_finished()
        self.shuffler.wait()

    def consume(self) -> dict[int, Any]:
        from cudf_streaming.partition_utils import unpack_and_concat
        from rmm.pylibrmm.stream import DEFAULT_STREAM

        extract, partitions = self.shuffler.extract, self.shuffler.local_partitions()
        return {p: unpack_and_concat(extract(p), stream=DEFAULT_STREAM, br=self.resource) for p in partitions}

    def frame(self, partition: int, output: Any) -> Frame:
        from cudf import DataFrame

        names = ["index", "key", "payload"] if self.plan.index else ["key", "payload"]
        return DataFrame.from_pylibcudf(output, {"columns": names})

    def counters(self) -> Mapping[str, float]:
        return {}

    def end(self) -> None:
        self.shuffler.shutdown()
        del self.shuffler


def wait_for_gpu(backend: str) -> None:
    """Block until the GPU has completed the work on the user's stream."""
    if backend == "cudf":
        from rmm.pylibrmm.stream import DEFAULT_STREAM

        DEFAULT_STREAM.synchronize()
