"""Measure a worker's compute beside shuffles of the runtime, in step with all workers.

Each worker of a real cluster runs one task per workload, in which one thread runs shuffles through the
worker's exchange and another thread computes. The worker itself caps kernels while runs are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import dask
import numpy as np
from distributed import Client, as_completed, get_worker, wait
from distributed.utils import sync

import dask_gpurt
from benchmarks.common.processes import Barrier
from benchmarks.exchange import sides as exchange_sides
from benchmarks.exchange.sides import Gpurt, wait_for_gpu
from benchmarks.overlap import workloads as overlap_workloads
from benchmarks.overlap.figures import OFF, Round
from benchmarks.overlap.plan import Plan, rotated
from dask_gpurt.cli.cluster import local_cluster
from dask_gpurt.device import Streams
from dask_gpurt.overlap import Caps

Frame = Any
#: Settings with which nannies preload the interposer.
LOADED = {
    "gpurt.enabled": True,
    "gpurt.overlap.mode": 8,
    "distributed.nanny.preload": ["dask_gpurt.preload"],
    # A replacement worker would never arrive at the barrier: fail at once when a worker is lost.
    "distributed.scheduler.allowed-failures": 0,
}
#: Shuffles to time for an estimate of how many fill a leg.
FEW = 3


class Board(Barrier):
    """A barrier at which workers exchange a number."""

    def __init__(self, file: Path, rank: int, parties: int):
        super().__init__(file, rank, parties)
        self._numbers = np.memmap(file.with_suffix(".numbers"), np.float64, mode="r+", shape=(parties,))
        self._me = rank

    @classmethod
    def prepare(cls, file: Path, parties: int) -> Path:
        np.zeros(parties).tofile(file.with_suffix(".numbers"))
        return super().prepare(file, parties)

    def most(self, number: float) -> float:
        """Block until all workers have given a number, and return the largest."""
        self._numbers[self._me] = number
        self.meet()
        largest = float(self._numbers.max())
        self.meet()
        return largest


class WorkloadSide:
    """Run a workload and shuffles beside it on one worker."""

    def __init__(
        self,
        plan: Plan,
        name: str,
        addresses: Sequence[str],
        inputs: Mapping[int, Frame],
        board: Board,
        turn: int,
    ):
        self.plan, self.name, self.inputs, self.board, self.turn = plan, name, inputs, board, turn
        self.sides = [Gpurt(shuffles_of(plan), addresses, inputs, board) for _ in range(2)]
        self.worker = get_worker()
        self.plugin = self.worker.plugins["gpurt"]
        self.exchange = self.plugin.exchange
        self.device = self.exchange.pools.device(self.exchange.pools.main)
        self.before = self.device.prioritised if isinstance(self.device, Streams) else True
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="shuffles")
        self.work = overlap_workloads.make(name, plan.backend, plan.rows, plan.side)
        self.inner = self.tasks = self.shuffles = 1

    # ---- a leg -------------------------------------------------------------------------

    def leg(self, tasks: int, shuffles: int, *, cap: int | None = None, first: bool = True) -> float:
        """Compute, shuffle, or both concurrently; return the seconds until all workers are done.

        Parameters
        ----------
        cap
            The most blocks of a kernel on an SM while a run is in flight.
        first
            Whether communication has the higher priority.
        """
        self._prioritise(first)
        if self.plugin.overlap.residency is not None:
            self._tell(partial(self.plugin.overlap.use, Caps(cap)))
        self.board.meet()
        began = perf_counter()
        shuffling = self.threads.submit(self._shuffle, shuffles) if shuffles else None
        for _ in range(tasks * self.inner):
            self.work()
        if shuffling:
            shuffling.result()
        return self.board.most(perf_counter() - began)

    def _tell(self, call: Callable[[], None]) -> None:
        """Make a call on the event loop, where a worker would make it."""

        async def told() -> None:
            call()

        sync(self.worker.loop, told)

    def _shuffle(self, count: int) -> None:
        """Shuffle, creating each run before the previous one ends: one is always in flight."""
        last = self.turn + count - 1
        self.sides[self.turn % 2].begin(self.turn)
        self.board.meet()
        for turn in range(self.turn, last + 1):
            side = self.sides[turn % 2]
            if turn < last:
                self.sides[(turn + 1) % 2].begin(turn + 1)
            for source in self.inputs:
                side.produce(source)
            side.settle()
            side.consume()
            wait_for_gpu(self.plan.backend)
            self.board.meet()
            side.end()
        self.turn += count

    # ---- a cell ------------------------------------------------------------------------

    def fit(self) -> None:
        """Determine the amounts of compute and shuffles that fill a leg, equal on all workers."""
        self.work()
        seconds = min(self.leg(1, 0) for _ in range(3))
        self.inner = max(1, round(self.plan.task / seconds))
        task = min(self.leg(1, 0) for _ in range(2))
        self.leg(0, 1)
        shuffle = self.leg(0, FEW) / FEW
        self.tasks = max(2, round(self.plan.seconds / task))
        self.shuffles = max(1, round(self.tasks * task / shuffle))

    def rounds(self) -> Iterator[Round]:
        """Yield rounds: compute and communication alone, then together under each setting."""
        settings = self.plan.settings(caps=self.plugin.overlap.residency is not None)
        for turn in range(self.plan.repeat):
            compute, communication = self.leg(self.tasks, 0), self.leg(0, self.shuffles)
            together = {
                name: self.leg(self.tasks, self.shuffles, cap=settings[name], first=name != OFF)
                for name in rotated(settings, turn)
            }
            yield Round(compute, communication, {name: together[name] for name in settings})

    def _prioritise(self, first: bool) -> None:
        if isinstance(self.device, Streams):
            self.device.prioritised = first

    def close(self) -> None:
        """Restore the worker's state."""
        self._prioritise(self.before)
        self.threads.shutdown(wait=False)

    def describe(self) -> dict[str, Any]:
        """Return the work done in a leg, and the counts of launches."""
        return {
            "tasks": self.tasks,
            "runs of a task": self.inner,
            "shuffles": self.shuffles,
            "launches": self.plugin.overlap.counters(),
        }


def cell(
    plan: Plan, name: str, rank: int, addresses: Sequence[str], frames: Sequence[Frame], file: Path, turn: int
) -> dict[str, Any]:
    """Measure one workload, as the task of one worker."""
    inputs = dict(zip(range(rank, plan.partitions, plan.workers), frames, strict=True))
    with Board(file, rank, plan.workers) as board:
        beside = WorkloadSide(plan, name, addresses, inputs, board, turn)
        try:
            beside.fit()
            rounds = [asdict(one) for one in beside.rounds()]
            return {"rounds": rounds, "turn": beside.turn, **beside.describe()}
        finally:
            beside.close()


def workers_part(plan: Plan, names: Sequence[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """Measure workloads on a fresh cluster, and yield each when it is done."""
    with (
        dask.config.set(LOADED),
        local_cluster(plan.backend, plan.workers, plan.protocol, plan.rmm_pool_size) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        yield "overlap", client.run(_overlap)
        addresses = list(client.nthreads())
        inputs = scattered(client, plan, addresses)
        turn = 0
        for name in names:
            file = Board.prepare(folder / f"board-{turn}", plan.workers)
            futures = [
                client.submit(
                    cell, plan, name, rank, addresses, inputs[rank], file, turn, workers=[address], pure=False
                )
                for rank, address in enumerate(addresses)
            ]
            for future in as_completed(futures):
                future.result()  # raise a failure while other workers still wait at the barrier
            found = client.gather(futures)
            turn = found[0]["turn"]
            yield "cell", (name, found[0])
        report = dask_gpurt.report(client)["workers"]
        yield "fallbacks", {name: reply.fallbacks.to_dict() for name, reply in report.items()}


def shuffles_of(plan: Plan) -> exchange_sides.Plan:
    """Return the plan of the shuffles, for the sides of the exchange benchmark."""
    return exchange_sides.Plan(
        size=plan.size,
        partitions=plan.partitions,
        workers=plan.workers,
        repeat=0,
        backend=plan.backend,
        protocol=plan.protocol,
        index=False,
        rmm_pool_size=plan.rmm_pool_size,
    )


def scattered(client: Client, plan: Plan, addresses: Sequence[str]) -> list[list[Any]]:
    """Make the inputs of the shuffles on the workers that shuffle them."""
    shuffles = shuffles_of(plan)
    inputs = [
        client.map(shuffles.source, list(shuffles.sources(rank)), workers=[address], pure=False)
        for rank, address in enumerate(addresses)
    ]
    wait(inputs)
    return inputs


def _overlap(dask_worker: Any) -> dict[str, Any]:
    known: dict[str, Any] = dask_worker.plugins["gpurt"].overlap.report()
    return known
