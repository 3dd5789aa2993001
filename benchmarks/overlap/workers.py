"""Measure a worker's compute beside shuffles of the runtime, in step with all workers.

Each worker of a real cluster runs one task per workload, in which one thread runs shuffles through the
worker's exchange and another thread computes. The worker's own actuators confine the compute: the exchange
notifies them of runs, and this module notifies them of compute as a worker does of tasks.
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
from benchmarks.overlap.plan import LEARNING, Plan, rotated
from dask_gpurt.cli.cluster import local_cluster
from dask_gpurt.device import PriorityError, SmsError
from dask_gpurt.observe import Decisions, Fallback
from dask_gpurt.overlap.actuators import CompositeActuator, ResidencyCaps, SmShare, StreamPriority
from dask_gpurt.overlap.control import Control
from dask_gpurt.overlap.governor import Fixed, Governor, Policy, rows
from dask_gpurt.overlap.interposer import NotLoadedError, redirect_context
from dask_gpurt.overlap.samples import PRIORITY, Setting
from dask_gpurt.overlap.stats_sync import StatsSync
from dask_gpurt.worker.overlap import cache_key

Frame = Any
#: Settings with which nannies preload the interposer.
LOADED = {
    "gpurt.enabled": True,
    "gpurt.overlap.residency": "auto",
    "distributed.nanny.preload": ["dask_gpurt.preload"],
    # A replacement worker would never arrive at the barrier: fail at once when a worker is lost.
    "distributed.scheduler.allowed-failures": 0,
}
#: While the governor learns: factor on legs with both; one turn in as many also runs compute alone.
MOSTLY = 4
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
        self.prioritised, self.told = self.device.prioritised, self.exchange.in_flight
        residency = self.plugin.residency.actuator
        self.caps = ResidencyCaps(residency) if residency else None
        self.share = self._share()
        self.priority = self._stream_priority()
        self.actuator = CompositeActuator(self.caps, self.share, self.priority)
        self.decisions = Decisions()
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="shuffles")
        self.key = 0
        self.work = overlap_workloads.make(name, plan.backend, plan.rows, plan.side)
        self.inner = self.tasks = self.shuffles = 1
        self.sharing: StatsSync | None = None

    def _share(self) -> SmShare | None:
        """Return the actuator for SMs, if the plan has any and the device supports it."""
        note = partial(self.plugin.metrics.fallback, Fallback.OVERLAP_TASK_UNCONFINED)
        try:
            contexts = self.device.sm_contexts(redirect_context)
            for sms in self.plan.sms:
                contexts.try_out(sms)
            return SmShare(contexts, note, self.plan.sms) if self.plan.sms else None
        except (SmsError, NotLoadedError) as error:
            note(str(error))
            return None

    def _stream_priority(self) -> StreamPriority | None:
        """Return the actuator for the priority of communication, if the device supports changing it."""
        try:
            self.device.try_priorities()
        except PriorityError as error:
            self.plugin.metrics.fallback(Fallback.OVERLAP_PRIORITY_FIXED, str(error))
            return None
        return StreamPriority(self.device)

    # ---- a leg -------------------------------------------------------------------------

    def leg(self, policy: Policy, tasks: int, shuffles: int, *, first: bool = True) -> float:
        """Compute, shuffle, or both concurrently; return the seconds until all workers are done.

        Parameters
        ----------
        policy
            Decides how tasks are confined.
        first
            Whether communication has the higher priority.
        """
        self.device.prioritised = first
        self.control = self._control(policy)
        self.exchange.in_flight = self.control.in_flight
        self.board.meet()
        began = perf_counter()
        shuffling = self.threads.submit(self._shuffle, shuffles) if shuffles else None
        self._compute(tasks)
        if shuffling:
            shuffling.result()
        seconds = self.board.most(perf_counter() - began)
        self._tell(self.control.close)
        return seconds

    def _control(self, policy: Policy) -> Control:
        metrics = self.plugin.metrics
        return Control(
            policy, self.actuator, lambda: self.exchange.moved, perf_counter, self.decisions, metrics
        )

    def _compute(self, tasks: int) -> None:
        """Run tasks one after the other; report the end of a task with the start of the next."""
        for number in range(tasks):
            self._tell(partial(self._next, ends=number > 0))
            if self.share:
                self.share.run(self._work)
            else:
                self._work()
        if tasks:
            self._tell(partial(self.control.ends, self.key))

    def _next(self, ends: bool) -> None:
        if ends:
            self.control.ends(self.key)
        self.key += 1
        self.control.begins(self.key, self.name, 1.0)

    def _work(self) -> None:
        for _ in range(self.inner):
            self.work()

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
        usual = Fixed(PRIORITY)
        self.work()
        seconds = min(self.leg(usual, 1, 0) for _ in range(3))
        self.inner = max(1, round(self.plan.task / seconds))
        task = min(self.leg(usual, 1, 0) for _ in range(2))
        self.leg(usual, 0, 1)
        shuffle = self.leg(usual, 0, FEW) / FEW
        self.tasks = max(2, round(self.plan.seconds / task))
        self.shuffles = max(1, round(self.tasks * task / shuffle))

    def learn(self) -> Governor:
        """Let a governor explore for a while; return one with the normal budget that has its statistics."""
        candidates = self.plan.candidates() if self.caps else {}
        for other in filter(None, (self.share, self.priority)):
            candidates |= other.settings()
        governor = Governor(candidates, budget=LEARNING)
        # As workers do.
        self.sharing = StatsSync(
            self.worker, cache_key(self.device.describe()), governor, self.plugin.metrics
        )
        self._tell(self.sharing.start)
        turns = max(2, round(self.plan.learn / (1.5 * MOSTLY * self.plan.seconds)))
        for turn in range(turns):
            if turn % MOSTLY == 0:
                self.leg(governor, self.tasks, 0)
            self.leg(governor, MOSTLY * self.tasks, MOSTLY * self.shuffles)
        learnt = Governor(candidates, governor.known)
        learnt.agree(governor.basis)
        self.sharing.governor = learnt
        return learnt

    def rounds(self, governor: Governor) -> Iterator[Round]:
        """Yield rounds: compute and communication alone, then together under each setting."""
        settings = self.plan.settings(caps=self.caps is not None, contexts=self.share is not None)
        for turn in range(self.plan.repeat):
            compute = self.leg(Fixed(PRIORITY), self.tasks, 0)
            communication = self.leg(Fixed(PRIORITY), 0, self.shuffles)
            together = {name: self._under(name, settings[name], governor) for name in rotated(settings, turn)}
            yield Round(compute, communication, {name: together[name] for name in settings})

    def _under(self, name: str, setting: Setting | None, governor: Governor) -> float:
        policy = governor if setting is None else Fixed(setting)
        return self.leg(policy, self.tasks, self.shuffles, first=name != OFF)

    def close(self) -> None:
        """Restore the worker's state."""
        if self.sharing is not None:
            self._tell(self.sharing.stop)
        self.device.prioritised = self.prioritised
        self.exchange.in_flight = self.told
        self.threads.shutdown(wait=False)

    def describe(self, governor: Governor) -> dict[str, Any]:
        """Return the work done in a leg, and the governor's decisions."""
        return {
            "tasks": self.tasks,
            "runs of a task": self.inner,
            "shuffles": self.shuffles,
            "learned": rows(governor.basis),
            "decisions": self.decisions.snapshot(),
            "launches": dict(self.actuator.counters()),
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
            governor = beside.learn()
            rounds = [asdict(one) for one in beside.rounds(governor)]
            return {"rounds": rounds, "turn": beside.turn, **beside.describe(governor)}
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
        yield "residency", client.run(_residency)
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
            yield "cell", (name, {**found[0], "others": [other["learned"] for other in found[1:]]})
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


def _residency(dask_worker: Any) -> dict[str, Any]:
    known: dict[str, Any] = dask_worker.plugins["gpurt"].residency.describe()
    return known
