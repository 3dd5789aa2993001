"""A workload on a cluster, in virtual time."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks.graph import Task
from dask_gpurt.observe import Metrics
from dask_gpurt.simulate.clock import Clock, Name, Stuck
from dask_gpurt.simulate.cluster import Cluster, Machine, address
from dask_gpurt.simulate.network import Network, Transfer
from dask_gpurt.simulate.report import Result, Trace
from dask_gpurt.simulate.scheduler import VirtualScheduler
from dask_gpurt.simulate.tiers import Tiers
from dask_gpurt.simulate.work import Submission, Work, Workload
from dask_gpurt.simulate.worker import Overheads, VirtualWorker

#: Seconds after which the scheduler has noticed that a worker is gone.
NOTICED = 0.1


class WorkloadFailed(RuntimeError):
    """Dask has given up a task: its inputs are too large for a worker, or it took too many with it."""


@dataclass(frozen=True)
class Leave:
    """At a time, a worker is gone with all that it had.

    Parameters
    ----------
    when
        Virtual seconds.
    worker
        Its number in the cluster; those that join later follow.
    """

    when: float
    worker: int


@dataclass(frozen=True)
class Join:
    """At a time, another worker comes."""

    when: float
    machine: Machine


class Simulation:
    """The real scheduler with as many workers as you like, none of which is a process.

    Parameters
    ----------
    cluster
        The workers at the beginning.
    workload
        What they have to do.
    changes
        Workers that leave or join while they do it.
    overheads
        What Dask itself takes.
    bind
        Called with the simulation when all workers are there: it may change how decisions are made.
    worker
        What every worker is: Dask's own, or one with the tiers of the runtime.
    name
        What the result calls this way to decide.

    Attributes
    ----------
    result
        The figures, when it is over.
    runs
        How often each task has been run to its end.
    metrics
        What placement counts.
    """

    result: Result

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        *,
        changes: Sequence[Leave | Join] = (),
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
        #: The links as they are. Whoever decides gets a picture of his own, since he may learn.
        self.topology = cluster.topology()
        self.trace = Trace()
        self.network = Network(
            self.clock, self.topology, racks=cluster.racks, uplink=cluster.uplink, moved=self._moved
        )
        with _quiet():
            self.scheduler = VirtualScheduler(self.clock, self.overheads.scheduler, self._reported)
        self.workers: dict[str, VirtualWorker] = {}
        self.runs: Counter[str] = Counter()
        self._arrived: list[Name] = []
        self._machines: dict[str, Machine] = {}
        self._waiting: set[Key] = set()
        self._submissions = list(workload.submissions)
        self.metrics = Metrics()
        self._done = False
        self._makespan = 0.0
        for machine in cluster.machines:
            self._join(machine)
        if bind is not None:
            bind(self)
        self.scheduler.time_decisions()
        for change in changes:
            if isinstance(change, Join):
                self.clock.at(change.when, self._join, change.machine)
            else:
                self.clock.at(change.when, self._leave, change.worker)

    def run(self) -> Result:
        """Let the workload come to its end.

        Raises
        ------
        Stuck
            When it does not, because no worker is left for instance.
        WorkloadFailed
            When Dask gives a task up.
        """
        self._submit()
        with _quiet():
            try:
                self.clock.run(until=lambda: self._done)
            except Stuck as stuck:
                raise Stuck(
                    f"{len(self._waiting)} keys of {self.workload.name} never came: {stuck}"
                ) from None
        self.result = Result.of(self, self._makespan)
        return self.result

    def machine(self, worker: str) -> Machine:
        """What a worker is."""
        return self._machines[worker]

    # ---- what the client does --------------------------------------------------------

    def _submit(self) -> None:
        submission = self._submissions.pop(0)
        self._submission = submission
        self._waiting = set(submission.wanted)
        graph: dict[Key, Task] = {work.key: work.task() for work in submission.works}
        self.scheduler.submit(graph, submission.wanted)

    def _reported(self, *messages: Mapping[str, Any]) -> None:
        for message in messages:
            key = message["key"]
            if message["op"] == "key-in-memory":
                self._waiting.discard(key)
            elif message["op"] == "lost-data":
                self._waiting.add(key)
            elif message["op"] == "task-erred":
                reason = pickle.loads(message["exception"])
                raise WorkloadFailed(f"{key} was given up after {self.clock.now:.3f} s: {reason}")
        if not self._waiting:
            self.clock.after(0.0, self._next, self._submission)

    def _next(self, submission: Submission) -> None:
        """Go on after a submission, if all that was wanted of it is there still."""
        if self._waiting or submission is not self._submission or self._done:
            return
        self._makespan = self.clock.now
        if self._submissions:
            self._submit()
        else:
            self._done = True
        if not submission.keep:
            self.scheduler.release(submission.wanted)

    # ---- what workers see of the others ----------------------------------------------

    def peer(self, address: str) -> VirtualWorker | None:
        """A worker that is there."""
        return self.workers.get(address)

    def tell_scheduler(self, worker: str, message: dict[str, Any]) -> None:
        """Send a message to the scheduler."""
        self.clock.after(self.overheads.message, self.scheduler.receive, worker, message)

    def ran(self, worker: VirtualWorker, work: Work, start: float) -> None:
        """A task has been run to its end."""
        self.runs[work.key] += 1
        self.trace.ran(start, self.clock.now)

    def _moved(self, transfer: Transfer) -> None:
        here, there = self.machine(transfer.source).place, self.machine(transfer.target).place
        self.trace.moved(self.clock.now, transfer.link, transfer.nbytes, here.host != there.host)

    # ---- who is there ----------------------------------------------------------------

    def _join(self, machine: Machine) -> None:
        name = address(len(self._arrived), machine)
        self._arrived.append(name)
        self._machines[name] = machine
        self.topology.add(name, machine.place)
        tiers = Tiers(machine.capacity, lambda link: self.topology.tier_speed(link, name))
        worker = self._worker(name, machine.threads, machine.speed, tiers, self)
        self.workers[name] = worker

        def send(*messages: dict[str, Any]) -> None:
            self.clock.after(self.overheads.message, worker.receive, *messages)

        self.scheduler.join(name, machine.threads, machine.capacity.total, send)
        self._beat(worker)

    def _beat(self, worker: VirtualWorker) -> None:
        """Have a worker tell the scheduler of itself, again and again, each at its own time."""

        def beat() -> bool:
            if not worker.gone:
                self.scheduler.heartbeat(
                    worker.address, worker.bandwidth, worker.executing, worker.tiers.spilled_bytes
                )
            return not worker.gone

        phase = hash(worker.address) % 1000 / 1000
        self.clock.every(lambda: self.scheduler.heartbeat_interval, beat, first=phase)

    def _leave(self, index: int) -> None:
        if index >= len(self._arrived) or self._arrived[index] not in self.workers:
            raise ValueError(f"worker {index} can not leave at {self.clock.now} s: it is not there")
        worker = self.workers.pop(self._arrived[index])
        worker.gone = True
        self.trace.left(worker.tiers)
        self.network.cut(worker.address)
        self.clock.after(NOTICED, self.scheduler.leave, worker.address)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Dask's log from telling of workers that left as it was asked for."""
    logger = logging.getLogger("distributed.scheduler")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
