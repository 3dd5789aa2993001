"""Time the exchange alone, without Dask's scheduler, beside RapidsMPF where it is installed.

    python benchmarks/exchange.py --size 64GiB --partitions 64 --workers 4 --repeat 5 --json results.json

The data are random int64 keys with an int64 payload. The workers of a real cluster meet at a barrier, hash
and publish their inputs, meet again, put their outputs together, and meet a last time: that is timed, and
nothing in it waits for the scheduler. RapidsMPF gets the same sizes and counts, in processes of its own,
between two legs of ours. Every result is checked, after the clock has stopped. When ``--timeout`` is near,
what has been measured so far is printed.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import connection, get_context
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, Protocol

import click
import dask
import numpy as np
import psutil
from dask.dataframe.dask_expr._shuffle import AssignPartitioningIndex
from dask.utils import format_bytes, parse_bytes
from distributed import Client, as_completed, get_worker, wait
from distributed.diagnostics import nvml
from distributed.shuffle._core import ShuffleId
from distributed.utils import sync
from links import link_limit
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from shuffle import GIB, ROW_BYTES, WRAP, fingerprint, make_random, totals

import dask_gpurt
from dask_gpurt.cli.demo import BYTES_PREFIX, choose_backend, local_cluster
from dask_gpurt.cli.report import environment, speedups
from dask_gpurt.dataframe.expressions import HashTargets
from dask_gpurt.shuffle import ShuffleSpec
from dask_gpurt.shuffle.run import ShuffleRun

Frame = Any

TARGETS = "_partitions"
HIGHEST = 2**62
PHASES = ("produce", "settle", "consume", "wait")
SPAWN = get_context("spawn")
#: Seconds of ``--timeout`` that are kept to end processes and to print.
GRACE = 5.0
#: How UCX served RapidsMPF best between the GPUs of one host; what the user has set comes first.
UCX = {"UCX_TLS": "^rdmacm", "UCX_RNDV_FRAG_MEM_TYPES": "cuda", "UCX_MAX_RNDV_RAILS": "1"}


@dataclass(frozen=True)
class Plan:
    """What is shuffled, by how many, how often."""

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


class Barrier:
    """Where processes of one host meet: each counts its arrivals in its own line of a mapped file.

    Left by an exception it is broken, and the others raise with the same reason when they arrive.
    """

    LINE = 8  # of 8 bytes: no two processes write to the same cache line
    PAUSE = 20e-6  # in which the threads that copy can run
    BROKEN = np.iinfo(np.int64).min

    def __init__(self, file: Path, rank: int, parties: int):
        self._arrivals = np.memmap(file, np.int64, mode="r+", shape=(parties, self.LINE))[:, 0]
        self._rank = rank
        self._reason = file.with_suffix(".broken")

    @classmethod
    def prepare(cls, file: Path, parties: int) -> Path:
        """Make the file."""
        np.zeros((parties, cls.LINE), np.int64).tofile(file)
        return file

    def meet(self) -> None:
        """Wait for all the others."""
        self._arrivals[self._rank] += 1
        mine = int(self._arrivals[self._rank])
        while (self._arrivals < mine).any():
            if (self._arrivals == self.BROKEN).any():
                raise BrokenBarrierError(self._reason.read_text())
            time.sleep(self.PAUSE)

    def __enter__(self) -> Barrier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, BrokenBarrierError):
            self._reason.write_text("".join(traceback.format_exception(error)))
            self._arrivals[self._rank] = self.BROKEN


# ---- the two sides -----------------------------------------------------------------------------


class Side(Protocol):
    """The part of one process in a shuffle; ``begin``, ``frame`` and ``end`` are not timed."""

    def begin(self, turn: int) -> None: ...

    def produce(self, source: int) -> None:
        """Hash an input partition and give its rows away."""

    def settle(self) -> None:
        """Do what is needed between the last input and the first output."""

    def consume(self) -> dict[int, Any]:
        """Put the output partitions of this process together, in whatever form comes first."""

    def frame(self, partition: int, output: Any) -> Frame:
        """Make an output a frame; raise when it has rows of another partition."""

    def counters(self) -> Mapping[str, float]:
        """Tell what the process has counted so far."""

    def end(self) -> None: ...


class Gpurt:
    """A run of ours on a worker, made and ended here instead of by tasks."""

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
        """Put a run where Dask's handlers look for the one that a message is for."""
        run = spec.create_run_on_worker(run_id, None, worker_for, self.plugin)
        self.plugin.shuffle_runs._active_runs[spec.id] = run
        self.plugin.shuffle_runs._runs.add(run)
        return run

    def _with_targets(self, frame: Frame) -> Frame:
        """Have Dask say where rows belong."""
        return AssignPartitioningIndex.operation(
            frame, ["key"], TARGETS, self.plan.partitions, self.meta, False
        )

    def produce(self, source: int) -> None:
        # What a transfer task of a shuffle by columns gets: the hash is part of its work.
        frame = HashTargets.operation(
            self.inputs[source], ["key"], TARGETS, self.plan.partitions, self.meta, False
        )
        self.run.add_partition(frame, source)

    def settle(self) -> None:
        self.barrier.meet()
        sync(self.worker.loop, self.run.inputs_done)
        self.barrier.meet()

    def consume(self) -> dict[int, Frame]:
        frames = {}
        for partition in self.outputs:
            key = ("output", partition)
            frames[partition] = self.run.get_output_partition(partition, key)
            self.worker.loop.add_callback(self.run.task_done, key)
        return frames

    def frame(self, partition: int, output: Frame) -> Frame:
        if not (self._with_targets(output)[TARGETS] == partition).all():
            raise ValueError(f"output partition {partition} has rows of another one")
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
        if plan.index:  # which RapidsMPF does not move, except as a column
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


# ---- a turn ------------------------------------------------------------------------------------


def play(side: Side, plan: Plan, turn: int, inputs: Mapping[int, Frame], barrier: Barrier) -> dict[str, Any]:
    """Shuffle once, in step with the other processes.

    Returns
    -------
    dict
        The ``stamps`` at which the phases began and the last one ended, what was counted meanwhile,
        and what the rows ``given`` and ``received`` add up to.
    """
    side.begin(turn)
    gc.collect()
    wait_for_gpu(plan.backend)
    before = side.counters()
    barrier.meet()
    stamps = [time.perf_counter()]
    for source in inputs:
        side.produce(source)
    stamps.append(time.perf_counter())
    side.settle()
    stamps.append(time.perf_counter())
    outputs = side.consume()
    wait_for_gpu(plan.backend)
    stamps.append(time.perf_counter())
    barrier.meet()
    stamps.append(time.perf_counter())
    counters = {name: n - before.get(name, 0) for name, n in side.counters().items()}
    received = add_up(side.frame(partition, output) for partition, output in outputs.items())
    del outputs
    side.end()
    return {"stamps": stamps, "counters": counters, "given": add_up(inputs.values()), "received": received}


def wait_for_gpu(backend: str) -> None:
    """Wait until the GPU has done what was asked of it on the user's stream."""
    if backend == "cudf":
        from rmm.pylibrmm.stream import DEFAULT_STREAM

        DEFAULT_STREAM.synchronize()


def add_up(frames: Iterable[Frame]) -> list[int]:
    """Add up rows, keys, payloads and their products, modulo 2**64 and so in any order."""
    return [total or 0 for total in totals([fingerprint(frame) for frame in frames])[:4]]


def combine(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make one record of what all processes tell of a turn; raise when rows got lost or changed."""
    given, received = (
        [sum(column) % WRAP for column in zip(*(part[which] for part in parts), strict=True)]
        for which in ("given", "received")
    )
    if given != received:
        raise ValueError(f"rows and checksums of the outputs are {received}, of the inputs {given}")
    counters = Counter[str]()
    for part in parts:
        counters.update(part["counters"])
    durations = [[end - start for start, end in itertools.pairwise(part["stamps"])] for part in parts]
    return {
        "seconds": max(part["stamps"][-1] - part["stamps"][0] for part in parts),
        "rows": received[0],
        "workers": [dict(zip(PHASES, phases, strict=True)) for phases in durations],
        "counters": dict(counters),
    }


# ---- legs: each runs in a process of its own and yields what it finds out ----------------------


def gpurt_leg(plan: Plan, folder: Path) -> Iterator[tuple[str, Any]]:
    """Shuffle with the runtime on a fresh cluster."""
    file = Barrier.prepare(folder / "barrier", plan.workers)
    # A worker that is lost would not take its place at the barrier again: say so at once.
    config = dask.config.set({"distributed.scheduler.allowed-failures": 0})
    cluster = local_cluster(plan.backend, plan.workers, plan.protocol, plan.rmm_pool_size)
    with config, cluster as started, Client(started) as client:
        dask_gpurt.enable(client)
        yield "link_limit", link_limit(client, plan.backend)
        addresses = list(client.scheduler_info(n_workers=-1)["workers"])
        inputs = [
            client.map(plan.source, list(plan.sources(rank)), workers=[address], pure=False)
            for rank, address in enumerate(addresses)
        ]
        wait(inputs)
        for turn in range(plan.repeat + 1):
            futures = [
                client.submit(
                    gpurt_turn, plan, turn, rank, addresses, inputs[rank], file, workers=[address], pure=False
                )
                for rank, address in enumerate(addresses)
            ]
            for future in as_completed(futures):
                future.result()  # one that failed while others wait shall be seen
            yield "turn", combine(client.gather(futures))
            yield "report", dask_gpurt.report(client)


def gpurt_turn(
    plan: Plan, turn: int, rank: int, addresses: Sequence[str], frames: Sequence[Frame], file: Path
) -> dict[str, Any]:
    """Shuffle once; the task of one worker."""
    inputs = dict(zip(plan.sources(rank), frames, strict=True))
    with Barrier(file, rank, plan.workers) as barrier:
        return play(Gpurt(plan, addresses, inputs, barrier), plan, turn, inputs, barrier)


def rapidsmpf_leg(plan: Plan, folder: Path) -> Iterator[tuple[str, Any]]:
    """Shuffle with RapidsMPF in processes of its own."""
    Barrier.prepare(folder / "barrier", plan.workers)
    rotated = importlib.import_module("dask_cuda.utils").cuda_visible_devices
    devices = [rotated(rank) for rank in range(plan.workers)]
    ranks = []
    try:
        for rank, visible in enumerate(devices):
            os.environ.update({**UCX, **os.environ, "CUDA_VISIBLE_DEVICES": visible})
            ranks.append(Child(rapidsmpf_rank, plan, rank, folder))
        for _ in range(plan.repeat + 1):
            yield "turn", combine(one_of_each(ranks))
    finally:
        for child in ranks:
            child.end()


def rapidsmpf_rank(plan: Plan, rank: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Shuffle time and again; one of the processes."""
    with Barrier(folder / "barrier", rank, plan.workers) as barrier:
        side = RapidsMPF(plan, rank, folder / "root", barrier)
        for turn in range(plan.repeat + 1):
            yield play(side, plan, turn, side.inputs, barrier)


LEGS: dict[str, Callable[[Plan, Path], Iterator[tuple[str, Any]]]] = {
    "gpurt": gpurt_leg,
    "rapidsmpf": rapidsmpf_leg,
}


class Child:
    """A process that runs a generator and hands over what it yields."""

    def __init__(self, generator: Callable[..., Iterator[Any]], *arguments: Any):
        self.pipe, theirs = SPAWN.Pipe(duplex=False)
        self.process = SPAWN.Process(target=hand_over, args=(theirs, generator, *arguments))
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """Wait for the next value; EOFError after the last one."""
        try:
            failed, value = self.pipe.recv()
        except EOFError:
            self.process.join(GRACE)
            if self.process.exitcode == 0:
                raise
            raise RuntimeError(f"a process ended with exit code {self.process.exitcode}") from None
        if failed:
            raise RuntimeError(value)
        return value

    def values(self, limit: float) -> Iterator[Any]:
        """Receive all values, within ``limit`` seconds."""
        deadline = time.monotonic() + limit
        with suppress(EOFError):
            while self.pipe.poll(max(0.0, deadline - time.monotonic())):
                yield self.receive()
            raise TimeoutError(f"it was not done after {limit:.0f} s")

    def end(self) -> None:
        """End the process, and those that it started, where they have not ended."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for one in [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.join(GRACE)


def hand_over(pipe: Any, generator: Callable[..., Iterator[Any]], *arguments: Any) -> None:
    """Send what a generator yields, and what it raises as text, which any process can read."""
    try:
        for value in generator(*arguments):
            pipe.send((False, value))
    except Exception:
        pipe.send((True, traceback.format_exc()))


def one_of_each(children: Sequence[Child]) -> list[Any]:
    """Receive the next value of every child, from whichever has one; the first failure is raised."""
    values: dict[int, Any] = {}
    waiting: dict[Any, int] = {child.pipe: rank for rank, child in enumerate(children)}
    while waiting:
        for pipe in connection.wait(list(waiting)):
            rank = waiting.pop(pipe)
            values[rank] = children[rank].receive()
    return [values[rank] for rank in range(len(children))]


def measure(plan: Plan, sides: Sequence[str], deadline: float) -> dict[str, Any]:
    """Run the legs one after another; one that fails or takes too long does not keep the others back."""
    found: dict[str, Any] = {"turns": [], "errors": [], "report": {"workers": {}}, "link_limit": None}
    for leg, side in enumerate(sides):
        left = deadline - time.monotonic()
        limit = left if leg == len(sides) - 1 else left / 2
        try:
            run_leg(plan, side, leg, limit, found)
        except (RuntimeError, TimeoutError) as error:
            found["errors"].append({"leg": leg, "side": side, "error": str(error)})
            say(f"{side}, leg {leg}: {str(error).strip().splitlines()[-1]}")
    return found


def run_leg(plan: Plan, side: str, leg: int, limit: float, found: dict[str, Any]) -> None:
    """Run a leg and put what it tells into ``found`` as it comes."""
    # Not on a disk, where a page can not be written to while it is written back.
    with tempfile.TemporaryDirectory(prefix="gpurt-exchange-", dir="/dev/shm") as folder:
        child = Child(LEGS[side], plan, Path(folder))
        turns = itertools.count()
        try:
            for kind, value in child.values(limit):
                if kind == "turn":
                    found["turns"].append({"side": side, "leg": leg, "turn": next(turns), **value})
                    say(f"{side}, leg {leg}: {value['seconds'] * 1e3:.1f} ms")
                else:
                    found[kind] = value
        finally:
            child.end()


def say(line: str) -> None:
    """Tell how it goes, apart from the results."""
    Console(stderr=True).print(line, style="dim", highlight=False)


# ---- what comes of it --------------------------------------------------------------------------


def summarise(turns: Sequence[Mapping[str, Any]], plan: Plan, limit: float | None) -> list[dict[str, Any]]:
    """Derive the figures of each leg from its warm turns.

    The share of the link limit counts the bytes that have to change their worker: all but one part in
    ``workers``. Phases and what the runtime counted are means, of a turn on a worker.
    """
    figures = []
    crossing = (plan.workers - 1) / plan.workers if plan.workers > 1 else 1.0
    for leg, warm in warm_turns(turns).items():
        seconds = [turn["seconds"] for turn in warm]
        rate = plan.size / statistics.median(seconds)
        workers = [worker for turn in warm for worker in turn["workers"]]
        counted = sum((Counter(turn["counters"]) for turn in warm), Counter[str]())
        figures.append(
            {
                "side": warm[0]["side"],
                "leg": leg,
                "median_seconds": statistics.median(seconds),
                "min_seconds": min(seconds),
                "max_seconds": max(seconds),
                "gib_per_second": rate / GIB,
                "share_of_link_limit": rate * crossing / limit if limit else None,
                "phases": {phase: statistics.mean(w[phase] for w in workers) for phase in PHASES},
                "counters": {name: n / len(workers) for name, n in counted.items() if "peak" not in name},
            }
        )
    return figures


def warm_turns(turns: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Collect all but the first turns, by leg."""
    warm: dict[int, list[Mapping[str, Any]]] = {}
    for turn in turns:
        if turn["turn"] > 0:
            warm.setdefault(turn["leg"], []).append(turn)
    return warm


def compare(turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Tell how many times as fast as the other side ours is, by the medians of all warm turns."""
    seconds: dict[str, list[float]] = {}
    for warm in warm_turns(turns).values():
        seconds.setdefault(warm[0]["side"], []).extend(turn["seconds"] for turn in warm)
    return speedups({"exchange": seconds})


def print_summary(results: Mapping[str, Any]) -> None:
    """Print a line per leg, what the runtime counted, and what went wrong."""
    parameters, limit = results["parameters"], results["link_limit"]
    console = Console(highlight=False, markup=False)
    console.print(
        f"{format_bytes(parameters['size'])} in {parameters['partitions']} partitions, "
        f"{parameters['backend']}, {parameters['workers']} workers"
    )
    if limit:
        console.print(f"Link limit: {limit['bytes_per_second'] / GIB:.1f} GiB/s, {limit['what']}")
    console.print(_summary_table(results["figures"]))
    for figure in results["figures"]:
        for line in _counted(figure["counters"]):
            console.print(f"{figure['side']}, leg {figure['leg']}, per turn and worker: {line}")
    for what, reason in results["fallbacks"].items():
        console.print(f"Fallback: {what}: {reason}")
    for side, ratio in results["speedups"].items():
        console.print(f"gpurt against {side}: {ratio:.2f} times as fast (medians, warm)")
    for failed in results["errors"]:
        console.print(f"{failed['side']}, leg {failed['leg']}, failed: {failed['error']}")


def _summary_table(figures: Sequence[Mapping[str, Any]]) -> Table:
    caption = "Milliseconds of the warm turns, and of their phases on average"
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("leg", no_wrap=True)
    for heading in ("median", "min", "max", "GiB/s", "of limit", *PHASES):
        table.add_column(heading, justify="right")
    for figure in figures:
        times = (f"{figure[f'{which}_seconds'] * 1e3:.1f}" for which in ("median", "min", "max"))
        share = figure["share_of_link_limit"]
        rates = (f"{figure['gib_per_second']:.1f}", "" if share is None else f"{share:.1%}")
        phases = (f"{figure['phases'][phase] * 1e3:.1f}" for phase in PHASES)
        table.add_row(figure["side"], *times, *rates, *phases)
    return table


def _counted(counters: Mapping[str, float]) -> Iterator[str]:
    """Say which way the bytes went, and where threads spent their time."""
    moved = [
        f"{n / GIB:.3f} GiB {name.removeprefix(BYTES_PREFIX)}"
        for name, n in counters.items()
        if name.startswith(BYTES_PREFIX)
    ]
    spent = [
        f"{n * 1e3:.1f} ms {name.rpartition('.')[2]}" for name, n in counters.items() if ".seconds." in name
    ]
    yield from (", ".join(parts) for parts in (moved, spent) if parts)


def choose_sides(backend: str, rapidsmpf: bool) -> list[str]:
    """Choose ours, RapidsMPF, and ours again; ours alone where RapidsMPF can not run."""
    missing = [name for name in ("rapidsmpf", "cudf_streaming") if find_spec(name) is None]
    if not rapidsmpf or backend != "cudf" or missing:
        return ["gpurt"]
    return ["gpurt", "rapidsmpf", "gpurt"]


def describe(plan: Plan, found: Mapping[str, Any]) -> dict[str, Any]:
    """Make the results as they are written: figures, what they depend on, and all that was measured."""
    about, limit, workers = environment(), found["link_limit"], found["report"]["workers"].values()
    for name in ("rapidsmpf", "rapidsmpf-cu13", "rapidsmpf-cu12"):
        with suppress(PackageNotFoundError):
            about["versions"]["rapidsmpf"] = version(name)
    fallbacks = [item for worker in workers for item in worker.get("fallbacks", {}).items()]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": asdict(plan),
        "settings": dask.config.get("gpurt"),
        **about,
        "link_limit": limit,
        "figures": summarise(found["turns"], plan, limit and limit["bytes_per_second"]),
        "speedups": compare(found["turns"]),
        "fallbacks": {what: known["reason"] for what, known in fallbacks},
        "pools": [worker.get("pools") for worker in workers],
        "errors": found["errors"],
        "turns": found["turns"],
    }


@click.command(help=__doc__.partition("\n")[0])
@click.option("--size", default="64GiB", show_default=True, callback=lambda _, __, text: parse_bytes(text))
@click.option("--partitions", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="[default: 2, or one per GPU]")
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Warm turns.")
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--rapidsmpf/--no-rapidsmpf", default=True, show_default=True, help="Compare with it.")
@click.option("--index/--no-index", default=False, show_default=True, help="Move the index too.")
@click.option("--rmm-pool-size", type=click.FloatRange(0, 1), default=0.6, show_default=True)
@click.option("--timeout", type=click.FloatRange(min=2 * GRACE), default=300.0, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(timeout: float, rapidsmpf: bool, output: Path | None, **parameters: Any) -> None:
    deadline = time.monotonic() + timeout - GRACE
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # our processes end with us
    backend = parameters["backend"] = choose_backend(parameters["backend"])
    parameters["workers"] = parameters["workers"] or (nvml.device_get_count() if backend == "cudf" else 2)
    plan = Plan(**parameters)
    results = describe(plan, measure(plan, choose_sides(backend, rapidsmpf), deadline))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
    print_summary(results)
    sys.exit(bool(results["errors"]))


if __name__ == "__main__":
    # By its own name, by which all the processes find what is sent to them.
    importlib.import_module("exchange").main()
