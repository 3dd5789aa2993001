"""Run Dask's worker state machine in virtual time, with simulated tasks and transfers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import dask
from dask.typing import Key
from dask.utils import key_split, parse_bytes
from distributed.comm.addressing import get_address_host
from distributed.worker_state_machine import (
    AcquireReplicasEvent,
    ComputeTaskEvent,
    Execute,
    ExecuteSuccessEvent,
    FindMissingEvent,
    FreeKeysEvent,
    GatherDep,
    GatherDepBusyEvent,
    GatherDepDoneEvent,
    GatherDepSuccessEvent,
    RefreshWhoHasEvent,
    RemoveReplicasEvent,
    RemoveWorkerEvent,
    RetryBusyWorkerEvent,
    RetryBusyWorkerLater,
    SendMessageToScheduler,
    StateMachineEvent,
    StealRequestEvent,
    TaskState,
    WorkerState,
)

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.links import Speed
from benchmarks.simulate.network import Network
from benchmarks.simulate.tiers import Capacity, RuntimeTiers, TierLink, Tiers
from benchmarks.simulate.work import Work
from dask_gpurt.memory.admission import FETCH, SEND, TASK, Admission, MemoryEstimator, MemoryRequest
from dask_gpurt.memory.spilling import next_use

#: The state machine event for each message of the scheduler.
EVENTS: Mapping[str, type[StateMachineEvent]] = {
    "acquire-replicas": AcquireReplicasEvent,
    "compute-task": ComputeTaskEvent,
    "free-keys": FreeKeysEvent,
    "refresh-who-has": RefreshWhoHasEvent,
    "remove-replicas": RemoveReplicasEvent,
    "remove-worker": RemoveWorkerEvent,
    "steal-request": StealRequestEvent,
}
#: Delays in seconds after which Dask's worker retries a busy peer, and looks for missing keys.
BUSY_RETRY_S, FIND_MISSING_S = 0.15, 1.0
#: Smaller transfers do not count as bandwidth measurements.
MIN_MEASURED_BYTES = 1_000_000
#: The shortest reported duration of a task: Dask interprets 0 as a task that has seceded.
CLOCK_RESOLUTION_S = 1e-6
#: Returns whether the request fits; starts it.
Request = tuple[Callable[[], bool], Callable[[], None]]


@dataclass(frozen=True)
class Overheads:
    """Set the overheads of Dask itself, in seconds.

    The defaults have the order of magnitude that Dask's documentation gives: about a millisecond per task.
    ``benchmarks.simulate.accuracy`` measures them.

    Parameters
    ----------
    message
        To deliver a message between a worker and the scheduler.
    scheduler
        For the scheduler to handle a message.
    task
        For a worker to start a task and report its result.
    transfer
        For two workers to set up a transfer.
    decision
        For the scheduler to choose a worker. With 0, this is part of ``scheduler``; for a realistic value
        take :attr:`Result.decision_us` of an earlier run.
    """

    message: float = 1e-3
    scheduler: float = 1e-4
    task: float = 1e-3
    transfer: float = 2e-3
    decision: float = 0.0


class Environment(Protocol):
    """Define the view that a worker has of the cluster."""

    clock: Clock
    network: Network
    overheads: Overheads
    works: Mapping[str, Work]

    def peer(self, address: str) -> VirtualWorker: ...

    def send_to_scheduler(self, worker: str, message: dict[str, Any]) -> None: ...

    def on_task_finished(self, work: Work) -> None: ...


class _VirtualTask(TaskState):
    """Give tasks a deterministic hash: the order of sets must not depend on memory addresses."""

    __slots__ = ("_order",)

    def __init__(self, key: str, order: int):
        self._order = order
        super().__init__(key)

    def __hash__(self) -> int:
        return self._order


class VirtualWorker:
    """Run Dask's worker state machine, and execute its instructions in virtual time.

    ``threads``: maximum number of concurrent tasks.
    ``speed``: relative speed: tasks take :attr:`Work.seconds` divided by it.
    """

    def __init__(
        self,
        address: str,
        threads: int,
        speed: float,
        capacity: Capacity,
        link_speed: Callable[[TierLink], Speed],
        environment: Environment,
    ):
        self.address = address
        self.speed = speed
        self.tiers = self._make_tiers(capacity, link_speed)
        self.bandwidth: float = parse_bytes(dask.config.get("distributed.scheduler.bandwidth"))
        self.state = WorkerState(
            address=address,
            nthreads=threads,
            data=self.tiers,
            validate=False,
            transfer_incoming_count_limit=dask.config.get("distributed.worker.connections.incoming"),
            transfer_incoming_bytes_limit=_incoming_limit(capacity.total),
            transfer_message_bytes_limit=parse_bytes(
                dask.config.get("distributed.worker.transfer.message-bytes-limit")
            ),
        )
        self._environment = environment
        self._clock = environment.clock
        self._host = get_address_host(address)
        self._order = itertools.count()
        self._outgoing = 0
        self._outgoing_limit: int = dask.config.get("distributed.worker.connections.outgoing")
        self._started: dict[str, float] = {}
        self._finding_missing = False
        self._moving_until = 0.0

    def _make_tiers(self, capacity: Capacity, link_speed: Callable[[TierLink], Speed]) -> Tiers:
        return Tiers(capacity, link_speed)

    # ---- messages --------------------------------------------------------------------

    def receive(self, *messages: dict[str, Any]) -> None:
        """Handle messages from the scheduler."""
        for message in messages:
            named = dict(message)
            event = EVENTS[named.pop("op")]
            self._make_tasks(named.get("who_has", ()))
            if event is ComputeTaskEvent:
                self._make_tasks([named["key"]])
            self._deliver(event(**named))

    def _make_tasks(self, keys: Iterable[str]) -> None:
        """Create the tasks that a message names, before the state machine would create its own."""
        for key in keys:
            if key not in self.state.tasks:
                self.state.tasks[key] = task = _VirtualTask(key, next(self._order))
                self.state.task_counter.new_task(task)

    def _stimulate(self, event: StateMachineEvent) -> None:
        for instruction in self.state.handle_stimulus(event):
            if isinstance(instruction, Execute):
                self._execute(instruction.key)  # type: ignore[arg-type]
            elif isinstance(instruction, GatherDep):
                self._gather(instruction)
            elif isinstance(instruction, SendMessageToScheduler):
                self._environment.send_to_scheduler(self.address, instruction.to_dict())
            elif isinstance(instruction, RetryBusyWorkerLater):
                retry = RetryBusyWorkerEvent(worker=instruction.worker, stimulus_id="retry")
                self._clock.after(BUSY_RETRY_S, self._deliver, retry)
        if self.state.missing_dep_flight and not self._finding_missing:
            self._finding_missing = True
            self._clock.after(FIND_MISSING_S, self._find_missing)

    def _deliver(self, event: StateMachineEvent) -> None:
        """Handle an event, possibly delayed."""
        self._stimulate(event)

    def _find_missing(self) -> None:
        self._finding_missing = False
        self._deliver(FindMissingEvent(stimulus_id="find-missing"))

    # ---- tasks -----------------------------------------------------------------------

    @property
    def executing(self) -> dict[str, float]:
        """Return how long each running task has been running, in seconds."""
        return {key: self._clock.now - start for key, start in self._started.items()}

    def _execute(self, key: str) -> None:
        work = self._environment.works[key]
        ready = self._after_moves(self.tiers.hold(work.needs, work.nbytes + work.workspace))
        self._begin(work, ready)

    def _begin(self, work: Work, ready: float) -> None:
        """Run a task once its inputs are live."""
        start = max(ready, self._clock.now) + self._environment.overheads.task
        self._started[work.key] = start
        run_id = self.state.tasks[work.key].run_id
        self._clock.at(start + work.seconds / self.speed, self._finish, work, run_id, start)

    def _finish(self, work: Work, run_id: int, start: float) -> None:
        del self._started[work.key]
        self.tiers.release(work.needs, work.nbytes + work.workspace)
        self._environment.on_task_finished(work)
        self._stimulate(
            ExecuteSuccessEvent(
                key=work.key,
                run_id=run_id,
                value=work.nbytes,
                start=start,
                stop=max(self._clock.now, start + CLOCK_RESOLUTION_S),
                nbytes=work.nbytes,
                type=bytes,
                stimulus_id="finished",
            )
        )

    def _after_moves(self, seconds: float) -> float:
        """Return the end of moves between tiers that take ``seconds``; a worker's moves are sequential."""
        if not seconds:
            return self._clock.now
        self._moving_until = max(self._moving_until, self._clock.now) + seconds
        return self._moving_until

    # ---- transfers -------------------------------------------------------------------

    def _gather(self, asked: GatherDep) -> None:
        self._clock.after(self._environment.overheads.transfer, self._ask, asked)

    def _ask(self, asked: GatherDep) -> None:
        source = self._environment.peer(asked.worker)
        about: dict[str, Any] = {"worker": asked.worker, "total_nbytes": asked.total_nbytes}
        if source.busy_for(self._host):
            self._stimulate(GatherDepBusyEvent(**about, stimulus_id="busy"))
        else:
            source.send(self, asked, about)

    def busy_for(self, host: str) -> bool:
        """Return whether to turn away a peer on a host; the limit is doubled for peers on the same host."""
        return self._outgoing >= self._outgoing_limit * (2 if host == self._host else 1)

    def send(self, target: VirtualWorker, asked: GatherDep, about: Mapping[str, Any]) -> None:
        """Send a peer those of the requested keys that this worker holds."""
        found: dict[Key, Any] = {
            key: self.tiers[key] for key in sorted(asked.to_gather, key=str) if key in self.tiers
        }
        nbytes = sum(found.values())
        began = self._clock.now
        self._outgoing += 1
        held, seconds = self._lend(found)
        ready = max(self._after_moves(seconds), target._after_moves(target._reserve(nbytes)))

        def arrived() -> None:
            self._outgoing -= 1
            self._release(held)
            target._unreserve(nbytes)
            target._learn_bandwidth(nbytes, self._clock.now - began)
            target._stimulate(GatherDepSuccessEvent(**about, data=found, stimulus_id="gathered"))

        self._clock.at(ready, self._environment.network.send, self.address, target.address, nbytes, arrived)

    def _reserve(self, nbytes: int) -> float:
        """Reserve bytes for an incoming transfer; return the seconds until they are free."""
        return self.tiers.hold((), nbytes)

    def _unreserve(self, nbytes: int) -> None:
        """Release the bytes of a finished transfer."""
        self.tiers.release((), nbytes)

    def _lend(self, keys: Collection[Key]) -> tuple[Collection[Key], float]:
        """Hold keys in the live tier while they are sent, as Dask does; return them and the seconds."""
        return keys, self.tiers.hold(keys, 0)

    def _release(self, keys: Collection[Key]) -> None:
        """Release keys that have been sent."""
        self.tiers.release(keys, 0)

    def _learn_bandwidth(self, nbytes: int, seconds: float) -> None:
        """Update the bandwidth as Dask's worker does; the next heartbeat reports it."""
        if nbytes > MIN_MEASURED_BYTES:
            self.bandwidth = 0.95 * self.bandwidth + 0.05 * nbytes / max(0.001, seconds)


class TieredWorker(VirtualWorker):
    """Manage memory like the runtime, with its admission, estimates and eviction policy.

    Data are sent from the tier that they are in.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._estimator = MemoryEstimator()
        # Simulated tasks never wait for each other and always finish, so requests need no deadline.
        self._admission = Admission(patience=math.inf)
        self._numbers = itertools.count()
        self._requests: dict[MemoryRequest, Request] = {}
        #: The fetch in flight, by peer.
        self._fetches: dict[str, MemoryRequest] = {}
        #: The bytes reserved for it, by peer.
        self._promised: dict[str, int] = {}

    def _make_tiers(self, capacity: Capacity, link_speed: Callable[[TierLink], Speed]) -> Tiers:
        return RuntimeTiers(capacity, link_speed, self._next_use)

    def _next_use(self, key: Key) -> tuple[Any, ...] | None:
        return next_use(self.state.tasks.get(key))

    # ---- tasks -----------------------------------------------------------------------

    def _execute(self, key: str) -> None:
        work = self._environment.works[key]
        need = min(self._estimator.estimate(key_split(key), self._inputs(work)), self.tiers.capacity.live)
        begin = partial(super()._execute, key)
        self._admit(MemoryRequest(TASK, key), (partial(self.tiers.fits, work.needs, need), begin))

    def _finish(self, work: Work, run_id: int, start: float) -> None:
        self._estimator.learn(key_split(work.key), self._inputs(work), work.nbytes + work.workspace)
        super()._finish(work, run_id, start)
        self._leave(MemoryRequest(TASK, work.key))

    def _inputs(self, work: Work) -> int:
        return sum(self.tiers[key] for key in work.needs if key in self.tiers)

    # ---- transfers -------------------------------------------------------------------

    def _gather(self, asked: GatherDep) -> None:
        self._fetches[asked.worker] = holder = MemoryRequest(FETCH, next(self._numbers))
        self._admit(holder, (partial(self.tiers.fits, (), asked.total_nbytes), partial(self._ask_now, asked)))

    def _ask_now(self, asked: GatherDep) -> None:
        """Reserve the bytes before the peer reads the request, lest another request takes them meanwhile."""
        self._promised[asked.worker] = asked.total_nbytes
        ready = self._after_moves(self.tiers.hold((), asked.total_nbytes))
        self._clock.at(ready, super()._gather, asked)

    def _reserve(self, nbytes: int) -> float:
        return 0.0

    def _unreserve(self, nbytes: int) -> None:
        """Do nothing: :meth:`_stimulate` releases the bytes when the fetch ends."""

    def _stimulate(self, event: StateMachineEvent) -> None:
        ended = None
        if isinstance(event, GatherDepDoneEvent):
            ended = self._fetches.pop(event.worker)
            self.tiers.release((), self._promised.pop(event.worker, 0))
        super()._stimulate(event)
        if ended is not None:
            self._leave(ended)

    def busy_for(self, host: str) -> bool:
        """Return whether to turn away a peer, also while a task waits for memory that is being sent."""
        return self._admission.short or super().busy_for(host)

    def _lend(self, keys: Collection[Key]) -> tuple[Any, float]:
        held, seconds = self.tiers.lend(keys)
        holder = MemoryRequest(SEND, next(self._numbers))
        self._admission.ask(holder, True, self._clock.now)
        return (holder, held), seconds

    def _release(self, lent: Any) -> None:
        holder, held = lent
        super()._release(held)
        self._leave(holder)

    # ---- admission -------------------------------------------------------------------

    def _admit(self, holder: MemoryRequest, request: Request) -> None:
        fits, begin = request
        if self._admission.ask(holder, fits(), self._clock.now):
            self._requests.pop(holder, None)
            begin()
        else:
            self._requests[holder] = request

    def _leave(self, holder: MemoryRequest) -> None:
        """Release the memory of a holder, and admit waiting requests until one does not fit."""
        next_holder = self._admission.leave(holder, self._clock.now)
        while next_holder in self._requests:
            self._admit(next_holder, self._requests[next_holder])
            next_holder = None if next_holder in self._requests else self._admission.first


def _incoming_limit(memory: int) -> float:
    """Return the maximum bytes in flight to a worker."""
    part = dask.config.get("distributed.worker.memory.transfer")
    return int(memory * part) if part else float("inf")
