"""Run a cluster of one process step by step: the test decides what happens next."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

from distributed.core import Status

from dask_gpurt.scheduler import recovery, worker_calls
from tests.helpers.computations import Computation, Witness
from tests.helpers.exchange_processes import Message
from tests.helpers.exchanges import without_pauses
from tests.helpers.scheduled import RELIABLE, DaskScheduler, ScheduledWorker, Wire, stable_hashes
from tests.helpers.turns import Turn, Turns, VirtualLoop, threads_in_turn

#: When nothing is broken: how long each message and each step of a task takes, in seconds, and after how many
#: of them something hangs.
ROUND_S, ROUNDS = 0.01, 1000
#: Events by which a worker asks for a key that the scheduler has released but not forgotten, each second: it
#: was to copy the key from a worker that retired.
_POLL = re.compile(r"\S+ asks who has data|request-refresh-who-has of .*|(refresh-who-has(, )?)+ -> .*")


class Event(NamedTuple):
    """Hold what can happen next: a method, and what it takes."""

    name: str
    happen: Callable[[Any], None]
    of: Any


class StepwiseCluster:
    """Run a computation on workers under Dask's scheduler, one event at a time.

    ``retries``: the setting ``gpurt.shuffle.retries``.
    ``pool``, ``paths``: settings of the workers' exchanges.
    ``story``: the names of the events so far.
    ``lost_messages``: the number of messages that were lost, before or after they had arrived.
    """

    def __init__(
        self, computation: Computation, *, workers: int, retries: int, pool: int, paths: Sequence[str]
    ):
        self.computation = computation
        self._pool, self._paths = pool, paths
        self.loop = VirtualLoop()
        self.errors: list[Any] = []
        self.loop.set_exception_handler(self._note_error)
        self.turns = Turns(self.loop)
        self.wire = Wire(self.turns)
        self.everyone: list[ScheduledWorker] = []
        self._free_addresses: list[str] = []
        self.lost_messages = 0
        #: Whether a call was given up although its receiver lived, and whether runs have failed.
        self.gave_up = self.failed_runs = False
        self.story: list[str] = []
        self._patches = ExitStack()
        for patch in (
            without_pauses(),
            threads_in_turn(),
            stable_hashes(),
            mock.patch.object(recovery, "time", self.loop.time),
            mock.patch.object(
                worker_calls, "time", return_value=0.0
            ),  # heartbeats of all workers arrive in time
        ):
            self._patches.enter_context(patch)
        logging.disable()  # injected failures would flood the log
        self.scheduler = DaskScheduler(self.wire, retries, self.errors)
        self.witness = Witness(self.scheduler, computation)
        for _ in range(workers):
            self.start()
        while any(self.wire.up.values()):  # the workers switch the runtime on
            self.all_happen()
        self.submit()

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception", context))

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine, and run everything that does not wait for the test."""
        task = self.turns.spawn(coroutine)
        self.loop.settle()
        if task.done():
            task.result()  # raises its error

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the event loop, and run everything that does not wait for the test."""

        async def call() -> None:
            function(*args)

        self.do(call())

    def submit(self) -> None:
        """Submit the computation, or what has been released of it."""
        self.call(self.scheduler.submit, self.computation.graph, self.computation.wanted)

    # ---- what can happen next --------------------------------------------------------

    def events(self, *, time: bool = True) -> list[Event]:
        """Return what can happen next without a fault; with or without that ``time`` passes."""
        found = []
        for worker in self.everyone:
            if down := self.wire.down[worker]:
                ops = ", ".join(message["op"] for message in down[0])
                found.append(Event(f"{ops} -> {worker.address}", self._deliver_batch, worker))
            if up := self.wire.up[worker]:
                found.append(Event(f"{up[0]['op']} of {worker.address}", self._hear, worker))
            if worker.alive and worker.closed:
                found.append(Event(f"{worker.address} ends", self._end, worker))
            if not worker.alive and self.scheduler.knows(worker):
                found.append(Event(f"the loss of {worker.address}", self._notice, worker))
            if worker.alive and worker.state.missing_dep_flight:
                found.append(Event(f"{worker.address} asks who has data", self._find_missing, worker))
        found += [Event(str(message), self.deliver, message) for message in self.wire.messages]
        found += [Event(str(turn), self._give, turn) for turn in self.turns.waiting]
        if time and self.loop.next_timer() is not None:
            found.append(Event("a timer ends", self._end_timer, None))
        return found

    def happen(self, event: Event) -> None:
        """Let an event happen, unless an earlier one has made it impossible."""
        self.story.append(event.name)
        event.happen(event.of)

    def all_happen(self) -> None:
        """Let everything happen that can happen now."""
        for event in self.events():
            self.happen(event)

    def happen_named(self, name: str) -> None:
        """Let the event of this name happen; raise if it is impossible."""
        (event,) = [event for event in self.events() if event.name == name]
        self.happen(event)

    def _deliver_batch(self, worker: ScheduledWorker) -> None:
        if self.wire.down[worker]:
            self.call(self.wire.deliver_batch, worker)

    def _hear(self, worker: ScheduledWorker) -> None:
        if self.wire.up[worker]:
            self.call(self.wire.hear, worker)

    def deliver(self, message: Message) -> None:
        """Deliver a message between workers, or a call of the scheduler."""
        if message in self.wire.messages:
            self.do(self.wire.deliver(message))

    def _give(self, turn: Turn) -> None:
        self.call(self.turns.give, turn)

    def _end_timer(self, _: None) -> None:
        self.call(self.loop.pass_until_next_timer)

    def _find_missing(self, worker: ScheduledWorker) -> None:
        if worker.alive:
            self.call(worker.find_missing)

    def _end(self, worker: ScheduledWorker) -> None:
        if worker.alive:
            self.kill(worker)
        self._notice(worker)

    def _notice(self, worker: ScheduledWorker) -> None:
        if self.scheduler.knows(worker):
            self.do(self.scheduler.leaves(worker))

    # ---- messages --------------------------------------------------------------------

    def unreliable_messages(self) -> list[Message]:
        """Return the messages that can be lost."""
        return [message for message in self.wire.messages if message.op not in RELIABLE]

    def lose(self, message: Message) -> None:
        """Lose a message."""
        self.lost_messages += 1
        self.call(self.wire.lose, message)

    def lose_answer(self, message: Message) -> None:
        """Deliver a message, and lose the answer."""
        self.lost_messages += 1
        self.do(self.wire.deliver(message, answered=False))

    def awaited_messages(self) -> list[Message]:
        """Return the messages whose answers a run may wait for until their receiver counts as silent."""
        return [
            message
            for message in self.wire.messages
            if message.op == "gpurt_fetch"
            or (message.op == "shuffle_receive" and b"Retire" not in message.content["data"])
        ]

    def give_up(self, message: Message) -> None:
        """End the call of a message, since its receiver is silent; the message itself stays in flight."""
        self.gave_up = True
        self.call(self.wire.give_up, message)

    # ---- workers ---------------------------------------------------------------------

    def alive(self) -> list[ScheduledWorker]:
        """Return the processes that run."""
        return [worker for worker in self.everyone if worker.alive]

    def workers(self, *statuses: Status) -> list[ScheduledWorker]:
        """Return the workers that the scheduler lists in one of the statuses, by default not closing."""
        listed = [worker for worker in self.alive() if self.scheduler.knows(worker)]
        statuses = statuses or (Status.running, Status.closing_gracefully)
        return [worker for worker in listed if worker.status in statuses]

    def start(self, *, replaces: bool = False) -> None:
        """Start a worker, at the address of one that has left if it ``replaces`` it and there is one."""
        free = [address for address in self._free_addresses if address not in self.scheduler.workers]
        if replaces and free:
            address = free[0]
            self._free_addresses.remove(address)
        else:
            address = f"tcp://host-{len(self.everyone)}:1"

        async def start() -> None:
            worker = ScheduledWorker(
                address, self.wire, self.computation.run, pool=self._pool, paths=self._paths
            )
            self.everyone.append(worker)
            self.scheduler.joins(worker)

        self.do(start())

    def kill(self, worker: ScheduledWorker) -> None:
        """Kill a worker; the scheduler notices later."""
        self.call(worker.die)
        self._free_addresses.append(worker.address)

    def fail_next_offer(self, worker: ScheduledWorker) -> None:
        """Let a worker have no memory for the next shard that it is offered."""
        exchange: Any = worker.exchange

        def take(*_: Any) -> None:
            del exchange.take
            self.failed_runs = True
            raise MemoryError("no memory for a shard")

        exchange.take = take

    def cut_off(self, worker: ScheduledWorker) -> None:
        """Remove a worker that is alive: its connection to the scheduler has broken."""
        self.do(self.scheduler.leaves(worker, close=True))

    # ---- the end ---------------------------------------------------------------------

    def until(self, done: Callable[[], bool]) -> None:
        """Let everything happen, without faults, until a condition holds; raise if that takes too long."""
        for _ in range(ROUNDS):
            if done():
                return
            if not self.workers(Status.running):
                self.start()
            for event in self.events(time=False) or self.events():
                self.happen(event)
            self.call(self.loop.pass_time, ROUND_S)
        tasks = {key: task.state for key, task in self.scheduler.tasks.items()}
        raise AssertionError(f"a hang: {tasks}, {[event.name for event in self.events()]}, {self.said()}")

    def finish(self) -> None:
        """Compute the results without further faults, check them, release them, and check what is left."""
        for worker in self.alive():
            if not self.scheduler.knows(worker):
                self.kill(worker)
        self.submit()
        self.until(self._is_computed)
        for key in self.computation.wanted:
            (holder, *_) = self.scheduler.tasks[key].who_has
            self.computation.check_result(key, self.scheduler.processes[holder.address].data[key])
        self.call(self.scheduler.release, self.computation.wanted)
        self.until(lambda: not self.events())
        self._check_nothing_is_held()
        assert not self.errors, self.said()
        assert self.gave_up or not self.witness.in_vain, f"{self.witness.in_vain}, {self.said()}"

    def _is_computed(self) -> bool:
        tasks = [self.scheduler.tasks.get(key) for key in self.computation.wanted]
        if any(task is None for task in tasks):  # the computation was given up, and released
            self.submit()
            return False
        for task in tasks:
            if task.state == "erred":
                said = task.exception_blame.exception_text
                assert "is given up after" in said or self.failed_runs, said
                self.call(self.scheduler.release, self.computation.wanted)
                return False
        if not all(task.state == "memory" for task in tasks):
            return False
        return all(_POLL.fullmatch(event.name) for event in self.events())

    def _check_nothing_is_held(self) -> None:
        assert not self.scheduler.tasks, "a task is held"
        assert not self.scheduler.active(), "a run is active"
        self.scheduler.check_nothing_is_held()
        for worker in self.alive():
            assert not worker.state.tasks, f"{worker.state.tasks} are held, {self.said()}"
            assert worker.outbox.pool.used == 0, "a block is held"
            assert not any(worker.exchange._incoming.values()), "a shard is held"
            assert not worker.landed.kept, "a pulled shard is held"
            assert not worker.exchange.requests._released, "a release waits"
            assert not worker.exchange._receiving, "a run is not over"
            assert worker.exchange.puller.nbytes == 0

    def said(self) -> str:
        """Return all errors and events so far."""
        errors = ["".join(traceback.format_exception(error)) for error in self.errors]
        return "\n".join([*errors, "after:", *self.story])

    def close(self) -> None:
        """End all processes."""
        logging.disable(logging.NOTSET)
        for worker in self.everyone:
            if worker.alive:
                self.kill(worker)
            worker.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.settle()
        self.loop.close()
        self._patches.close()
