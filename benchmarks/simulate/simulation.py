"""Simulate a workload on a cluster, in virtual time."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dask.typing import Key

from benchmarks.simulate.clock import Clock, DeadlockError, Name
from benchmarks.simulate.cluster import Cluster, Machine, address
from benchmarks.simulate.network import Network, Transfer
from benchmarks.simulate.report import Result
from benchmarks.simulate.scheduler import VirtualScheduler
from benchmarks.simulate.work import Submission, Work, Workload
from benchmarks.simulate.worker import Overheads, VirtualWorker
from dask_gpurt.dask_hooks.types import GraphNode
from dask_gpurt.observe import Metrics


class WorkloadFailed(RuntimeError):
    """Dask has failed a task: its inputs are too large for a worker."""


class Simulation:
    """Run the real scheduler with any number of simulated workers, without processes.

    Parameters
    ----------
    bind
        Called with the simulation when all workers have joined; may override decisions.
    worker
        The class of all workers: Dask's worker, or a worker with the runtime's tiers.

    Attributes
    ----------
    result
        The figures, after :meth:`run` has returned.
    runs
        How often each task has finished.
    ends
        Virtual times at which the submissions finished, in seconds.
    """

    result: Result

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        *,
        overheads: Overheads | None = None,
        bind: Callable[[Simulation], object] | None = None,
        worker: type[VirtualWorker] = VirtualWorker,
        name: str = "stock",
    ):
        self.cluster = cluster
        self.workload = workload
        self.name = name
        self.works: Mapping[str, Work] = workload.works
        self.overheads = overheads or Overheads()
        self._worker = worker
        self.clock = Clock()
        self.topology = cluster.topology()
        #: Bytes moved between workers, by class of link, and those between hosts.
        self._moved: Counter[str] = Counter()
        self._between_hosts = 0
        self.network = Network(
            self.clock,
            self.topology,
            racks=cluster.racks,
            uplink=cluster.uplink,
            moved=self._on_transfer,
        )
        with _quiet():
            self.scheduler = VirtualScheduler(
                self.clock, self.overheads.scheduler, self._on_client_messages, self.overheads.decision
            )
        self.workers: dict[str, VirtualWorker] = {}
        self.runs: Counter[str] = Counter()
        self._arrived: list[Name] = []
        self._machines: dict[str, Machine] = {}
        self._waiting: set[Key] = set()
        self._submissions = list(workload.submissions)
        self.metrics = Metrics()
        self._done = False
        self._makespan = 0.0
        self.ends: list[float] = []
        for machine in cluster.machines:
            self._join(machine)
        if bind is not None:
            bind(self)
        self.scheduler.time_decisions()

    def run(self) -> Result:
        """Run the workload to its end.

        Raises
        ------
        DeadlockError
            If it never ends.
        WorkloadFailed
            If Dask fails a task.
        """
        self._submit()
        with _quiet():
            try:
                self.clock.run(until=lambda: self._done)
            except DeadlockError as stuck:
                raise DeadlockError(
                    f"{len(self._waiting)} keys of {self.workload.name} were never computed: {stuck}"
                ) from None
        self.result = self._sum_up()
        return self.result

    def machine(self, worker: str) -> Machine:
        """Return the machine of a worker."""
        return self._machines[worker]

    def _sum_up(self) -> Result:
        tiers = [worker.tiers for worker in self.workers.values()]
        stealing = self.scheduler.stealing
        return Result(
            workload=self.workload.name,
            cluster=self.cluster.name,
            placement=self.name,
            workers=len(tiers),
            tasks=len(self.works),
            makespan=self._makespan,
            bytes=dict(sorted(self._moved.items())),
            between_hosts=self._between_hosts,
            spilled=sum(one.spilled for one in tiers),
            worst_memory=max(one.peak / one.capacity.live for one in tiers),
            over_memory=sum(one.over for one in tiers),
            too_large=_too_large(self.works, max(one.capacity.live for one in tiers)),
            runs=sum(self.runs.values()),
            steals=stealing._request_counter if stealing else 0,
            decisions=self.scheduler.deciding.count,
            decision_us=self.scheduler.deciding.microseconds,
            scheduler_us=1e6 * self.scheduler.busy.seconds / max(1, len(self.works)),
            fallbacks=sum(known["count"] for known in self.metrics.snapshot()["fallbacks"].values()),
        )

    # ---- the client --------------------------------------------------------

    def _submit(self) -> None:
        submission = self._submissions.pop(0)
        self._submission = submission
        self._waiting = set(submission.wanted)
        graph: dict[Key, GraphNode] = {work.key: work.task() for work in submission.works}
        workers: dict[Key, str] = {
            work.key: self._arrived[work.worker] for work in submission.works if work.worker is not None
        }
        self.scheduler.submit(graph, submission.wanted, workers)

    def _on_client_messages(self, *messages: Mapping[str, Any]) -> None:
        for message in messages:
            key = message["key"]
            if message["op"] == "key-in-memory":
                self._waiting.discard(key)
            elif message["op"] == "task-erred":
                reason = pickle.loads(message["exception"])
                raise WorkloadFailed(f"{key} failed after {self.clock.now:.3f} s: {reason}")
        if not self._waiting:
            self.clock.after(0.0, self._next, self._submission)

    def _next(self, submission: Submission) -> None:
        """Continue after a submission, if all of its results are still in memory."""
        if self._waiting or submission is not self._submission or self._done:
            return
        self._makespan = self.clock.now
        self.ends.append(self.clock.now)
        if self._submissions:
            self._submit()
        else:
            self._done = True
        if not submission.keep:
            self.scheduler.release(submission.wanted)

    # ---- the environment of workers ----------------------------------------------

    def peer(self, address: str) -> VirtualWorker:
        """Return a worker."""
        return self.workers[address]

    def send_to_scheduler(self, worker: str, message: dict[str, Any]) -> None:
        """Send a message to the scheduler."""
        self.clock.after(self.overheads.message, self.scheduler.receive, worker, message)

    def on_task_finished(self, work: Work) -> None:
        """Record a task that has ended."""
        self.runs[work.key] += 1

    def _on_transfer(self, transfer: Transfer) -> None:
        here, there = self.machine(transfer.source).place, self.machine(transfer.target).place
        self._moved[transfer.link.value] += transfer.nbytes
        if here.host != there.host:
            self._between_hosts += transfer.nbytes

    # ---- joining workers ----------------------------------------------------------------

    def _join(self, machine: Machine) -> None:
        name = address(len(self._arrived), machine)
        self._arrived.append(name)
        self._machines[name] = machine
        self.topology.add(name, machine.place)
        worker = self._worker(
            name,
            machine.threads,
            machine.speed,
            machine.capacity,
            self.topology.speeds.__getitem__,
            self,
        )
        self.workers[name] = worker

        def send(*messages: dict[str, Any]) -> None:
            delay = self.scheduler.decided_s + self.overheads.message
            self.clock.after(delay, worker.receive, *messages)

        self.scheduler.join(name, machine.threads, machine.capacity.total, send)
        self._beat(worker)

    def _beat(self, worker: VirtualWorker) -> None:
        """Send periodic heartbeats of a worker, with a different phase for each worker."""

        def beat() -> None:
            self.scheduler.heartbeat(
                worker.address, worker.bandwidth, worker.executing, worker.tiers.spilled_bytes
            )

        phase = hash(worker.address) % 1000 / 1000
        self.clock.every(lambda: self.scheduler.heartbeat_interval, beat, first=phase)


def _too_large(works: Mapping[str, Work], largest: int) -> int:
    """Return the number of tasks that need more memory than the largest live tier."""
    needed = (
        sum(works[need].nbytes for need in work.needs) + work.nbytes + work.workspace
        for work in works.values()
    )
    return sum(nbytes > largest for nbytes in needed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Dask's log, which would warn of workers that leave as planned."""
    logger = logging.getLogger("distributed.scheduler")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
