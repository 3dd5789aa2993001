"""Measure matrix and elementwise kernels beside NCCL collectives, in one process per GPU.

PyTorch issues the collectives, at normal or at high stream priority. Compute is confined by the interposer,
which is preloaded into the processes, or to some of the SMs. The governor of each process learns the longest
times of all processes, so that all of them choose the same setting. ``--backend pandas`` rehearses with numpy
on the host, where the collectives are copies and nothing is confined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from benchmarks.common.processes import Child, one_of_each
from benchmarks.overlap.figures import OFF, Round
from benchmarks.overlap.plan import LEARNING, Plan, rotated
from benchmarks.overlap.workers import Board
from dask_gpurt.overlap.actuators import SERIAL_SPEED_SHARE, CompositeActuator, ResidencyCaps, SmShare
from dask_gpurt.overlap.governor import Governor, rows
from dask_gpurt.overlap.interposer import Interposer, NotLoadedError, library, redirect_context, with_preload
from dask_gpurt.overlap.occupancy import Residency
from dask_gpurt.overlap.samples import OFF as NO_PRIORITY
from dask_gpurt.overlap.samples import OverlapSample, Setting, SoloSample, StepSample
from dask_gpurt.overlap.statistics import MIN_SOLO_SAMPLES

COLLECTIVES = ("all-to-all", "all-reduce")
COMPUTE = ("bf16 GEMM", "fp32 GEMM", "elementwise")
CELLS = tuple(f"{compute} / {collective}" for collective in COLLECTIVES for compute in COMPUTE)
#: NVLink multicast stays off.
NCCL = {"NCCL_NVLS_ENABLE": "0"}
#: A rehearsal has one thread for compute and one for communication.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
#: The elementwise array has this many values per element of the matrices.
ELEMENTS = 4
#: Factors on the length of a leg and on the plan's rounds: legs are short here, and many.
LEG, ROUNDS = 1.5, 3
#: Timeout in seconds of a collective that some process does not join.
LOST = 60


@dataclass(frozen=True)
class Times:
    """Seconds until everything, compute, and communication were done."""

    total: float
    compute: float
    communication: float


class Side(Protocol):
    """Run one process of the comparison."""

    share: SmShare | None

    def choose(self, cell: str) -> None:
        """Prepare the compute and the collective of a cell."""

    def run(self, computes: int, collectives: int, *, first: bool) -> Times:
        """Run so many of each concurrently, and return the longest times of all processes."""


class Torch:
    """Run kernels and NCCL collectives on a GPU, with PyTorch."""

    def __init__(self, plan: Plan, rank: int, folder: Path):
        torch: Any = import_module("torch")
        self.torch, self.dist = torch, import_module("torch.distributed")
        self.plan, self.device = plan, torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        self.dist.init_process_group(
            "nccl",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=plan.workers,
            timeout=timedelta(seconds=LOST),
            device_id=self.device,
        )
        options = self.dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        self.groups = {
            False: self.dist.new_group(backend="nccl"),
            True: self.dist.new_group(backend="nccl", pg_options=options),
        }
        # A green context confines its default stream. Collectives wait for the stream they are called on.
        self.computing, self.calling = torch.cuda.default_stream(), torch.cuda.Stream()
        self.share = _share(rank, plan.sms)
        self.sent = torch.randn(plan.collective // 4, device=self.device)
        self.received = torch.empty_like(self.sent)
        self.compute: Callable[[], Any]
        self.communicate: Callable[[Any], Any]

    def choose(self, cell: str) -> None:
        compute, collective = cell.split(" / ")
        self.compute = self._compute(compute)
        self.communicate = {"all-to-all": self._all_to_all, "all-reduce": self._all_reduce}[collective]
        for first in (False, True):
            self.run(1, 2, first=first)

    def _compute(self, name: str) -> Callable[[], Any]:
        torch, side = self.torch, self.plan.side
        if name == "elementwise":
            values = torch.randn(ELEMENTS * side * side, device=self.device)
            product = torch.empty_like(values)
            return lambda: torch.mul(values, 1.0001, out=product)
        kind = {"bf16 GEMM": torch.bfloat16, "fp32 GEMM": torch.float32}[name]
        matrix = torch.randn(side, side, device=self.device, dtype=kind)
        product = torch.empty_like(matrix)
        return lambda: torch.mm(matrix, matrix, out=product)

    def _all_to_all(self, group: Any) -> Any:
        return self.dist.all_to_all_single(self.received, self.sent, group=group, async_op=True)

    def _all_reduce(self, group: Any) -> Any:
        # Repeated sums overflow to infinity, which does not change their duration.
        return self.dist.all_reduce(self.sent, group=group, async_op=True)

    def run(self, computes: int, collectives: int, *, first: bool) -> Times:
        torch = self.torch
        self.dist.barrier()
        torch.cuda.synchronize()
        begin, computed, communicated = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        began = perf_counter()
        self._launched(computes, begin, computed)
        work = None
        with torch.cuda.stream(self.calling):
            for _ in range(collectives):
                work = self.communicate(self.groups[first])
            self.calling.wait_event(begin)
            if work is not None:
                work.wait()
            communicated.record()
        torch.cuda.synchronize()
        total = perf_counter() - began
        ends = [begin.elapsed_time(event) / 1e3 for event in (computed, communicated)]
        longest = torch.tensor([total, *ends], dtype=torch.float64, device=self.device)
        self.dist.all_reduce(longest, op=self.dist.ReduceOp.MAX)
        return Times(*longest.tolist())

    def _launched(self, computes: int, begin: Any, computed: Any) -> None:
        """Launch ``computes`` kernels between two events, confined if there is a share of the SMs."""

        def launch() -> None:
            with self.torch.cuda.stream(self.computing):
                begin.record()
                for _ in range(computes):
                    self.compute()
                computed.record()

        if self.share:
            self.share.run(launch)
        else:
            launch()


class Rehearsal:
    """Run numpy copies and products instead, in a process without a GPU."""

    def __init__(self, plan: Plan, rank: int, folder: Path):
        self.board = Board(folder / "board", rank, plan.workers)
        self.sent = np.ones(plan.collective // 4, np.float32)
        self.matrix = np.ones((plan.side, plan.side), np.float32)
        self.threads = ThreadPoolExecutor(1)
        self.share = None

    def choose(self, cell: str) -> None:
        self.run(1, 1, first=True)

    def run(self, computes: int, collectives: int, *, first: bool) -> Times:
        self.board.meet()
        began = perf_counter()
        copying = self.threads.submit(self._seconds, self.sent.copy, collectives)
        compute = self._seconds(lambda: self.matrix @ self.matrix, computes)
        communication = copying.result()
        total = perf_counter() - began
        return Times(*(self.board.most(seconds) for seconds in (total, compute, communication)))

    def _seconds(self, call: Callable[[], Any], count: int) -> float:
        began = perf_counter()
        for _ in range(count):
            call()
        return perf_counter() - began


class Cell:
    """Run one process's part in a cell."""

    def __init__(self, plan: Plan, name: str, side: Side, caps: ResidencyCaps | None):
        self.plan, self.name, self.side, self.caps = plan, name, side, caps
        self.actuator = CompositeActuator(caps, side.share)
        side.choose(name)
        once = min(side.run(4, 0, first=True).total for _ in range(3)) / 4
        collective = min(side.run(0, 4, first=True).total for _ in range(3)) / 4
        self.leg = LEG * plan.task
        self.computes = max(2, round(self.leg / once))
        self.collectives = max(2, round(self.computes * once / collective))
        self.work, self.moved = float(self.computes), float(self.collectives * plan.collective)
        #: The last measured times of each alone.
        self.alone = Times(0.0, self.computes * once, self.collectives * collective)

    def measure_alone(self) -> Times:
        """Measure each alone; the total is their sum."""
        compute = self.side.run(self.computes, 0, first=True).total
        communication = self.side.run(0, self.collectives, first=True).total
        self.alone = Times(compute + communication, compute, communication)
        return self.alone

    def together(self, setting: Setting, *, first: bool = True) -> Times:
        """Measure both together under a setting."""
        self.actuator.apply(replace(setting, first=True))  # the process group sets the priority
        try:
            return self.side.run(self.computes, self.collectives, first=first)
        finally:
            self.actuator.clear()

    def governed(self, governor: Governor) -> Times:
        """Measure both together under a governor's choice, and report the times to it."""
        setting = governor.choose(self.name).setting
        times = self.together(setting, first=setting.first)
        governor.learn_step(step(self.name, setting, times, self.work, self.moved))
        return times

    def learn(self) -> Governor:
        """Let a governor explore for a while; return one with the normal budget that has its statistics."""
        candidates = {**(self.plan.candidates() if self.caps else {}), NO_PRIORITY: SERIAL_SPEED_SHARE}
        candidates |= self.side.share.settings() if self.side.share else {}
        governor = Governor(candidates, budget=LEARNING)
        for turn in range(max(8, round(self.plan.learn / (2 * self.leg)))):
            if turn % 8 == 0:
                for _ in range(1 if turn else MIN_SOLO_SAMPLES):
                    governor.learn(SoloSample(self.name, self.work, self.measure_alone().compute))
            self.governed(governor)
        return Governor(candidates, governor.known)

    def rounds(self, governor: Governor) -> Iterator[Round]:
        """Yield rounds: compute and communication alone, then together under each setting."""
        settings = self.plan.settings(caps=self.caps is not None, contexts=self.side.share is not None)
        for turn in range(ROUNDS * self.plan.repeat):
            alone = self.measure_alone()
            together = {name: self._under(name, settings[name], governor) for name in rotated(settings, turn)}
            yield Round(alone.compute, alone.communication, {name: together[name] for name in settings})

    def _under(self, name: str, setting: Setting | None, governor: Governor) -> float:
        if setting is None:
            return self.governed(governor).total
        return self.together(setting, first=name != OFF).total


def _share(rank: int, sms: Sequence[int]) -> SmShare | None:
    """Return the actuator that confines compute to SMs; None if it is off or unavailable."""
    if not sms:
        return None
    contexts = import_module("dask_gpurt.device.green").GreenContexts(rank, redirect_context)
    try:
        for number in sms:
            contexts.try_out(number)
    except NotLoadedError:  # already reported for the caps
        return None
    return SmShare(contexts, _not_confined, sms)


def _not_confined(reason: str) -> None:
    raise RuntimeError(f"compute could not be confined: {reason}")


def step(name: str, setting: Setting, times: Times, work: float, moved: float) -> StepSample:
    """Report a leg to a governor.

    Parameters
    ----------
    times
        Times of both together.
    work, moved
        Work of compute and bytes of communication in the whole leg.
    """
    return StepSample(times.total - times.compute, moved, {name: OverlapSample(work, times.compute, setting)})


def rank_program(plan: Plan, names: Sequence[str], rank: int, folder: Path) -> Iterator[Any]:
    """Measure cells in one of the processes."""
    kind = Torch if plan.backend == "cudf" else Rehearsal
    side: Side = kind(plan, rank, folder)
    try:
        caps = ResidencyCaps(Residency(Interposer(), rank if plan.backend == "cudf" else 0))
        yield None
    except NotLoadedError as error:
        caps = None
        yield str(error)
    for name in names:
        cell = Cell(plan, name, side, caps)
        governor = cell.learn()
        rounds = [asdict(one) for one in cell.rounds(governor)]
        yield {
            "rounds": rounds,
            "computes": cell.computes,
            "collectives": cell.collectives,
            "learned": rows(governor.known),
            "launches": dict(cell.actuator.counters()),
        }


def collectives_part(plan: Plan, names: Sequence[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """Measure cells in one process per GPU, and yield each cell when it is done."""
    os.environ.update(environment(plan.backend))
    Board.prepare(folder / "board", plan.workers)
    ranks = []
    try:
        for rank in range(plan.workers):
            ranks.append(Child(rank_program, plan, names, rank, folder))
        yield "residency", one_of_each(ranks)
        for name in names:
            yield "cell", (name, one_of_each(ranks)[0])
    finally:
        for child in ranks:
            child.end()


def environment(backend: str) -> Mapping[str, str]:
    """Return the environment of the processes, with the interposer preloaded if it is built."""
    found = NCCL if backend == "cudf" else ONE_THREAD
    try:
        return {**found, "LD_PRELOAD": with_preload(os.environ.get("LD_PRELOAD", ""), library())}
    except NotLoadedError:
        return found
