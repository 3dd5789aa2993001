"""Dask's worker in virtual time: its own state machine, and a model of what takes time."""

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
    GatherDepNetworkFailureEvent,
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

from dask_gpurt.memory.admission import FETCH, SEND, TASK, Admission, Holder, Needs
from dask_gpurt.memory.policy import next_use
from dask_gpurt.simulate.clock import Clock
from dask_gpurt.simulate.network import Network
from dask_gpurt.simulate.tiers import Capacity, RuntimeTiers, Tiers
from dask_gpurt.simulate.work import Work
from dask_gpurt.topology import Link, Speed

#: What the scheduler sends, and what a worker makes of it.
EVENTS: Mapping[str, type[StateMachineEvent]] = {
    "acquire-replicas": AcquireReplicasEvent,
    "compute-task": ComputeTaskEvent,
    "free-keys": FreeKeysEvent,
    "refresh-who-has": RefreshWhoHasEvent,
    "remove-replicas": RemoveReplicasEvent,
    "remove-worker": RemoveWorkerEvent,
    "steal-request": StealRequestEvent,
}
#: Seconds after which Dask's worker asks again, where it had been told that a peer is busy, and for keys
#: that nobody seems to have.
BUSY_RETRY, FIND_MISSING = 0.15, 1.0
#: Transfers of fewer bytes tell a worker nothing of its bandwidth.
TELLING = 1_000_000
#: The shortest time, in seconds, that a clock tells of a task: of nothing Dask takes it to have seceded.
RESOLUTION = 1e-6
#: Whether there is room, and what to do then.
Turn = tuple[Callable[[], bool], Callable[[], None]]


@dataclass(frozen=True)
class Overheads:
    """Seconds that Dask itself takes.

    The defaults are of the order that Dask's documentation names: about a millisecond for a task.
    ``benchmarks/simulator.py`` measures them.

    Parameters
    ----------
    message
        Until a message between a worker and the scheduler has arrived.
    scheduler
        For the scheduler to handle a message.
    task
        For a worker to start a task and to send its result on its way.
    transfer
        For two workers to agree on a transfer.
    """

    message: float = 1e-3
    scheduler: float = 1e-4
    task: float = 1e-3
    transfer: float = 2e-3


class Peers(Protocol):
    """What a worker knows of all others, and they of it."""

    clock: Clock
    network: Network
    overheads: Overheads
    works: Mapping[str, Work]

    def peer(self, address: str) -> VirtualWorker | None: ...

    def tell_scheduler(self, worker: str, message: dict[str, Any]) -> None: ...

    def ran(self, worker: VirtualWorker, work: Work, start: float) -> None: ...


class _Task(TaskState):
    """A task whose place in a set does not depend on its address in memory."""

    __slots__ = ("_order",)

    def __init__(self, key: str, order: int):
        self._order = order
        super().__init__(key)

    def __hash__(self) -> int:
        return self._order


class VirtualWorker:
    """A worker: Dask's state machine decides; what it asks for takes virtual time.

    Parameters
    ----------
    address
        The worker's name on the network.
    threads
        Tasks at a time.
    speed
        How many times as fast as :attr:`Work.seconds` says.
    capacity
        Bytes of each of its tiers.
    link_speed
        Returns how fast bytes go over a link between two of its tiers.
    peers
        All that is around it.

    Attributes
    ----------
    tiers
        Where its data lie.
    """

    def __init__(
        self,
        address: str,
        threads: int,
        speed: float,
        capacity: Capacity,
        link_speed: Callable[[Link], Speed],
        peers: Peers,
    ):
        self.address = address
        self.speed = speed
        self.tiers = self._make_tiers(capacity, link_speed)
        self.gone = False
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
        self._peers = peers
        self._clock = peers.clock
        self._host = get_address_host(address)
        self._order = itertools.count()
        self._outgoing = 0
        self._outgoing_limit: int = dask.config.get("distributed.worker.connections.outgoing")
        self._started: dict[str, float] = {}
        self._looking = False
        self._moving_until = 0.0

    def _make_tiers(self, capacity: Capacity, link_speed: Callable[[Link], Speed]) -> Tiers:
        return Tiers(capacity, link_speed)

    # ---- messages --------------------------------------------------------------------

    def receive(self, *messages: dict[str, Any]) -> None:
        """Messages from the scheduler have arrived."""
        for message in messages:
            named = dict(message)
            event = EVENTS[named.pop("op")]
            self._know(named.get("who_has", ()))
            if event is ComputeTaskEvent:
                self._know([named["key"]])
            self._hear(event(**named))

    def _know(self, keys: Iterable[str]) -> None:
        """Make the tasks that the state machine is about to hear of, as it would itself."""
        for key in keys:
            if key not in self.state.tasks:
                self.state.tasks[key] = task = _Task(key, next(self._order))
                self.state.task_counter.new_task(task)

    def _stimulate(self, event: StateMachineEvent) -> None:
        for instruction in self.state.handle_stimulus(event):
            if isinstance(instruction, Execute):
                self._execute(instruction.key)  # type: ignore[arg-type]
            elif isinstance(instruction, GatherDep):
                self._gather(instruction)
            elif isinstance(instruction, SendMessageToScheduler):
                self._peers.tell_scheduler(self.address, instruction.to_dict())
            elif isinstance(instruction, RetryBusyWorkerLater):
                retry = RetryBusyWorkerEvent(worker=instruction.worker, stimulus_id="retry")
                self._clock.after(BUSY_RETRY, self._hear, retry)
        if self.state.missing_dep_flight and not self._looking:
            self._looking = True
            self._clock.after(FIND_MISSING, self._find_missing)

    def _hear(self, event: StateMachineEvent) -> None:
        """Something happens that was put off, unless the worker is gone by now."""
        if not self.gone:
            self._stimulate(event)

    def _find_missing(self) -> None:
        self._looking = False
        self._hear(FindMissingEvent(stimulus_id="find-missing"))

    # ---- tasks -----------------------------------------------------------------------

    @property
    def executing(self) -> dict[str, float]:
        """For how long each running task has been running."""
        return {key: self._clock.now - start for key, start in self._started.items()}

    def _execute(self, key: str) -> None:
        work = self._peers.works[key]
        ready = self._after_moves(self.tiers.hold(work.needs, work.nbytes + work.workspace))
        start = ready + self._peers.overheads.task
        self._started[key] = start
        run_id = self.state.tasks[key].run_id
        self._clock.at(start + work.seconds / self.speed, self._finish, work, run_id, start)

    def _finish(self, work: Work, run_id: int, start: float) -> None:
        if self.gone:
            return
        del self._started[work.key]
        self.tiers.let_go(work.needs, work.nbytes + work.workspace)
        self._peers.ran(self, work, start)
        self._stimulate(
            ExecuteSuccessEvent(
                key=work.key,
                run_id=run_id,
                value=work.nbytes,
                start=start,
                stop=max(self._clock.now, start + RESOLUTION),
                nbytes=work.nbytes,
                type=bytes,
                stimulus_id="finished",
            )
        )

    def _after_moves(self, seconds: float) -> float:
        """When moves between tiers are over that take so long; a worker makes them one by one."""
        if not seconds:
            return self._clock.now
        self._moving_until = max(self._moving_until, self._clock.now) + seconds
        return self._moving_until

    # ---- transfers -------------------------------------------------------------------

    def _gather(self, asked: GatherDep) -> None:
        self._clock.after(self._peers.overheads.transfer, self._ask, asked)

    def _ask(self, asked: GatherDep) -> None:
        if self.gone:
            return
        source = self._peers.peer(asked.worker)
        about: dict[str, Any] = {"worker": asked.worker, "total_nbytes": asked.total_nbytes}
        if source is None:
            self._stimulate(GatherDepNetworkFailureEvent(**about, stimulus_id="gone"))
        elif source.busy_for(self._host):
            self._stimulate(GatherDepBusyEvent(**about, stimulus_id="busy"))
        else:
            source.give(self, asked, about)

    def busy_for(self, host: str) -> bool:
        """Whether a peer is told to ask later; those of the same host are so half as soon."""
        return self._outgoing >= self._outgoing_limit * (2 if host == self._host else 1)

    def give(self, target: VirtualWorker, asked: GatherDep, about: Mapping[str, Any]) -> None:
        """Send what is here of the keys that a peer has asked for."""
        found: dict[Key, Any] = {
            key: self.tiers[key] for key in sorted(asked.to_gather, key=str) if key in self.tiers
        }
        nbytes = sum(found.values())
        began = self._clock.now
        self._outgoing += 1
        held, seconds = self._lend(found)
        ready = max(self._after_moves(seconds), target._after_moves(target._expect(nbytes)))

        def over() -> None:
            self._outgoing -= 1
            self._get_back(held)
            target._expect_no_more(nbytes)

        def arrived() -> None:
            over()
            target._learn_bandwidth(nbytes, self._clock.now - began)
            target._stimulate(GatherDepSuccessEvent(**about, data=found, stimulus_id="gathered"))

        def lost() -> None:
            over()
            if not target.gone:
                target._stimulate(GatherDepNetworkFailureEvent(**about, stimulus_id="lost"))

        def begin() -> None:
            if self.gone or target.gone:
                lost()
            else:
                self._peers.network.send(self.address, target.address, nbytes, arrived, lost)

        self._clock.at(ready, begin)

    def _expect(self, nbytes: int) -> float:
        """Reserve room for what a peer begins to send; tell the seconds until it is there."""
        return self.tiers.hold((), nbytes)

    def _expect_no_more(self, nbytes: int) -> None:
        """It has come, or will not."""
        self.tiers.let_go((), nbytes)

    def _lend(self, keys: Collection[Key]) -> tuple[Collection[Key], float]:
        """Hold keys while they are sent; Dask reads what it sends into the live tier."""
        return keys, self.tiers.hold(keys, 0)

    def _get_back(self, keys: Collection[Key]) -> None:
        """What was lent has been sent."""
        self.tiers.let_go(keys, 0)

    def _learn_bandwidth(self, nbytes: int, seconds: float) -> None:
        """As Dask's worker does; the next heartbeat tells the scheduler."""
        if nbytes > TELLING:
            self.bandwidth = 0.95 * self.bandwidth + 0.05 * nbytes / max(0.001, seconds)


class TieredWorker(VirtualWorker):
    """Take memory as the runtime does: by its own admission, its estimates and its eviction policy.

    Data that are sent are read from the tier that they lie in.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._needs = Needs()
        # Simulated tasks never wait for each other, and take as long as the workload says.
        self._admission = Admission(patience=math.inf)
        self._numbers = itertools.count()
        self._turns: dict[Holder, Turn] = {}
        #: The one fetch from a peer that is on its way, and what is being sent.
        self._fetches: dict[str, Holder] = {}
        #: What they will take, by peer.
        self._promised: dict[str, int] = {}

    def _make_tiers(self, capacity: Capacity, link_speed: Callable[[Link], Speed]) -> Tiers:
        return RuntimeTiers(capacity, link_speed, self._next_use)

    def _next_use(self, key: Key) -> tuple[Any, ...] | None:
        return next_use(self.state.tasks.get(key))

    # ---- tasks -----------------------------------------------------------------------

    def _execute(self, key: str) -> None:
        work = self._peers.works[key]
        need = min(self._needs.of(key_split(key), self._inputs(work)), self.tiers.capacity.live)
        begin = partial(super()._execute, key)
        self._admit(Holder(TASK, key), (partial(self.tiers.fits, work.needs, need), begin))

    def _finish(self, work: Work, run_id: int, start: float) -> None:
        if not self.gone:
            self._needs.learn(key_split(work.key), self._inputs(work), work.nbytes + work.workspace)
        super()._finish(work, run_id, start)
        self._leave(Holder(TASK, work.key))

    def _inputs(self, work: Work) -> int:
        return sum(self.tiers[key] for key in work.needs if key in self.tiers)

    # ---- transfers -------------------------------------------------------------------

    def _gather(self, asked: GatherDep) -> None:
        self._fetches[asked.worker] = who = Holder(FETCH, next(self._numbers))
        self._admit(who, (partial(self.tiers.fits, (), asked.total_nbytes), partial(self._ask_now, asked)))

    def _ask_now(self, asked: GatherDep) -> None:
        """The room is promised at once: until the peer has read the request others would take it."""
        self._promised[asked.worker] = asked.total_nbytes
        ready = self._after_moves(self.tiers.hold((), asked.total_nbytes))
        self._clock.at(ready, super()._gather, asked)

    def _expect(self, nbytes: int) -> float:
        return 0.0

    def _expect_no_more(self, nbytes: int) -> None:
        """That is known when the fetch is over."""

    def _stimulate(self, event: StateMachineEvent) -> None:
        over = None
        if isinstance(event, GatherDepDoneEvent):
            over = self._fetches.pop(event.worker)
            self.tiers.let_go((), self._promised.pop(event.worker, 0))
        super()._stimulate(event)
        if over is not None:
            self._leave(over)

    def busy_for(self, host: str) -> bool:
        """Peers are told to ask later, too, while a task waits for what is being sent."""
        return self._admission.short or super().busy_for(host)

    def _lend(self, keys: Collection[Key]) -> tuple[Any, float]:
        held, seconds = self.tiers.lend(keys)
        who = Holder(SEND, next(self._numbers))
        self._admission.ask(who, True, self._clock.now)
        return (who, held), seconds

    def _get_back(self, lent: Any) -> None:
        who, held = lent
        super()._get_back(held)
        self._leave(who)

    # ---- admission -------------------------------------------------------------------

    def _admit(self, who: Holder, turn: Turn) -> None:
        fits, begin = turn
        if self._admission.ask(who, fits(), self._clock.now):
            self._turns.pop(who, None)
            begin()
        else:
            self._turns[who] = turn

    def _leave(self, who: Holder) -> None:
        """Something is over: those that wait have their turns, until one has to go on waiting."""
        following = self._admission.leave(who, self._clock.now)
        while following in self._turns and not self.gone:
            self._admit(following, self._turns[following])
            following = None if following in self._turns else self._admission.first


def _incoming_limit(memory: int) -> float:
    """Bytes that may be on their way to a worker at a time."""
    part = dask.config.get("distributed.worker.memory.transfer")
    return int(memory * part) if part else float("inf")
