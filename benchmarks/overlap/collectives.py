"""Measure matrix and elementwise kernels beside NCCL collectives, in one process per GPU.

PyTorch issues the collectives, at normal or at high stream priority. Compute is confined by the interposer,
which is preloaded into the processes. ``--backend pandas`` rehearses with numpy on the host, where the
collectives are copies and nothing is confined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from benchmarks.common.processes import Child, one_of_each
from benchmarks.overlap.figures import OFF, Round
from benchmarks.overlap.plan import Plan, rotated
from benchmarks.overlap.workers import Board
from dask_gpurt.overlap import Caps, Interposer, NotLoadedError, Residency
from dask_gpurt.overlap.interposer import library, with_preload

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
        # Collectives wait for the stream they are called on.
        self.computing, self.calling = torch.cuda.default_stream(), torch.cuda.Stream()
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
        """Launch ``computes`` kernels between two events."""
        with self.torch.cuda.stream(self.computing):
            begin.record()
            for _ in range(computes):
                self.compute()
            computed.record()


class Rehearsal:
    """Run numpy copies and products instead, in a process without a GPU."""

    def __init__(self, plan: Plan, rank: int, folder: Path):
        self.board = Board(folder / "board", rank, plan.workers)
        self.sent = np.ones(plan.collective // 4, np.float32)
        self.matrix = np.ones((plan.side, plan.side), np.float32)
        self.threads = ThreadPoolExecutor(1)

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

    def __init__(self, plan: Plan, name: str, side: Side, residency: Residency | None):
        self.plan, self.name, self.side, self.residency = plan, name, side, residency
        side.choose(name)
        once = min(side.run(4, 0, first=True).total for _ in range(3)) / 4
        collective = min(side.run(0, 4, first=True).total for _ in range(3)) / 4
        self.computes = max(2, round(LEG * plan.task / once))
        self.collectives = max(2, round(self.computes * once / collective))

    def together(self, cap: int | None, *, first: bool) -> float:
        """Measure both together, with a cap or without."""
        if self.residency is None:
            return self.side.run(self.computes, self.collectives, first=first).total
        self.residency.apply(Caps(cap))
        try:
            return self.side.run(self.computes, self.collectives, first=first).total
        finally:
            self.residency.clear()

    def rounds(self) -> Iterator[Round]:
        """Yield rounds: compute and communication alone, then together under each setting."""
        settings = self.plan.settings(caps=self.residency is not None)
        for turn in range(ROUNDS * self.plan.repeat):
            compute = self.side.run(self.computes, 0, first=True).total
            communication = self.side.run(0, self.collectives, first=True).total
            together = {
                name: self.together(settings[name], first=name != OFF) for name in rotated(settings, turn)
            }
            yield Round(compute, communication, {name: together[name] for name in settings})


def rank_program(plan: Plan, names: Sequence[str], rank: int, folder: Path) -> Iterator[Any]:
    """Measure cells in one of the processes."""
    kind = Torch if plan.backend == "cudf" else Rehearsal
    side: Side = kind(plan, rank, folder)
    try:
        residency = Residency(Interposer(), rank if plan.backend == "cudf" else 0)
        yield None
    except NotLoadedError as error:
        residency = None
        yield str(error)
    for name in names:
        cell = Cell(plan, name, side, residency)
        yield {
            "rounds": [asdict(one) for one in cell.rounds()],
            "computes": cell.computes,
            "collectives": cell.collectives,
            "launches": residency.counters() if residency is not None else {},
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
