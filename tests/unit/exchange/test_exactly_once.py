"""Deliver each row exactly once, whatever happens to messages, attempts, pools and processes.

In this state machine three workers transfer the inputs of two shuffles, one after the other. Messages wait
until the machine delivers them, in any order, or loses them, before or after they have arrived, or delivers
them after their sender has given up. Attempts fail in the middle, since a pool is full, and are retried
elsewhere. Runs fail, since an owner has no memory for an offer, and begin again. Outputs move to other
workers, with and without a loss. Processes are killed, replaced at the same address, and join at a new one.
In the end all pending messages are delivered: then every row has arrived once, no shard is held, and no
task is blocked.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from distributed._async_taskgroup import AsyncTaskGroupClosedError
from distributed.exceptions import Reschedule
from distributed.shuffle._exceptions import P2PConsistencyError
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dask_gpurt.exchange.incoming import ShardState
from dask_gpurt.exchange.outgoing import Outbox
from dask_gpurt.shuffle.messages import Retire, Transferred
from dask_gpurt.shuffle.run import ShuffleRun
from tests.helpers.allocations import failing_allocations, none_fails, nth_fails
from tests.helpers.examples import examples
from tests.helpers.exchange_processes import AttemptFailed, Message, Network, Process
from tests.helpers.exchange_scheduler import Scheduler, frame_of, spec_of
from tests.helpers.exchanges import quiet, without_pauses
from tests.helpers.turns import VirtualLoop

ADDRESSES, NEW_ADDRESS = ["tcp://a:1", "tcp://b:1", "tcp://c:1"], "tcp://d:1"
INPUTS, OUTPUTS, ROWS = 3, 4, 400
#: Bytes of a pool: room for some shards, or for all.
SMALL, LARGE = 2**12, 2**17


class ExactlyOnce(RuleBasedStateMachine):
    """Drive a cluster whose every step is drawn by hypothesis."""

    @initialize(
        pool=st.sampled_from([SMALL, LARGE]), paths=st.sampled_from([("shared-memory", "comms"), ("comms",)])
    )
    def begins(self, pool: int, paths: tuple[str, ...]) -> None:
        self.pool, self.paths = pool, paths
        self.loop = VirtualLoop()
        self.pauses = without_pauses()
        self.pauses.__enter__()
        self.wait_for_room = Outbox.wait_for_room
        Outbox.wait_for_room = _fail_in_place_of_waiting  # type: ignore[method-assign]
        logging.disable()  # injected failures would flood the log
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self.background: set[asyncio.Task[Any]] = set()
        self.network = Network()
        self.scheduler = Scheduler(self.network)
        self.everyone: list[Process] = []
        self.addresses: list[str] = []
        for address in ADDRESSES:
            self._start(address)
        self.number = 0
        self._next_shuffle()

    def _start(self, address: str) -> None:
        if address not in self.addresses:
            self.addresses.append(address)

        async def start() -> Process:
            return Process(address, self.network, self.scheduler, pool=self.pool, paths=self.paths)

        process = self._do(start())
        self.everyone.append(process)
        self.scheduler.joins(process)

    def _next_shuffle(self) -> None:
        self.number += 1
        self.shuffle = f"shuffle-{self.number}"
        self.scheduler.begin(spec_of(self.shuffle, OUTPUTS))

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, and then everything that is not blocked on this machine's choices."""

        async def run() -> Any:
            task = self.loop.create_task(coroutine)
            await quiet()
            self.background.add(task)
            task.add_done_callback(self.background.discard)
            return task.result() if task.done() else None

        return self.loop.run_until_complete(run())

    def _settle(self) -> None:
        self.loop.run_until_complete(quiet())

    @property
    def active(self) -> Any:
        return self.scheduler.active[self.shuffle]

    def _alive(self) -> list[Process]:
        return [
            process
            for process in self.network.processes.values()
            if process.address in self.scheduler.workers
        ]

    # ---- tasks -----------------------------------------------------------------------

    def _rows(self, source: int) -> range:
        return range(source * ROWS, (source + 1) * ROWS)

    @rule(source=st.integers(0, INPUTS - 1), where=st.integers(0, 2), again=st.booleans())
    def transfer(self, source: int, where: int, again: bool) -> None:
        """Run a transfer task, possibly again, as when its result was lost."""
        alive = self._alive()
        if alive and not self.active.sealed and (again or source not in self.active.transferred):
            self._do(self._transfer(alive[where % len(alive)], self.active, source))

    @rule(
        source=st.integers(0, INPUTS - 1),
        where=st.integers(0, 2),
        first=st.integers(0, 20),
        times=st.integers(1, 12),
    )
    def transfer_with_little_memory(self, source: int, where: int, first: int, times: int) -> None:
        """Run a transfer task of which some allocations fail: it is split, or fails in the middle."""
        alive = self._alive()
        if alive and not self.active.sealed:
            process = alive[where % len(alive)]
            self._do(self._transfer(process, self.active, source, nth_fails(first, times)))

    async def _transfer(
        self, process: Process, active: Any, source: int, fails: Callable[[int, int], bool] = none_fails
    ) -> None:
        active.transferred.pop(source, None)
        await self._hear(process)
        key = f"transfer-{source}"
        try:
            run: Any = await process.shuffles.shuffle_runs.get_or_create(self.shuffle, key)
            dispatch = self.scheduler.next_dispatch()
            frame = frame_of(self._rows(source), OUTPUTS)
            with process.task(key, dispatch) as metadata, failing_allocations(fails):
                result = run.add_partition(frame, source)
        except (AttemptFailed, MemoryError, Reschedule, P2PConsistencyError):
            return  # the scheduler reruns the task
        # The form in which the scheduler passes the result to the barrier.
        ended: Any = SimpleNamespace(key=key, state="memory", run_id=dispatch, metadata=metadata)
        active.transferred[source] = Transferred.of_task(ended, run.run_id)
        assert vars(active.transferred[source]) == vars(result)

    @precondition(lambda self: len(self.active.transferred) == INPUTS and not self.active.sealed)
    @rule(where=st.integers(0, 2))
    def barrier(self, where: int) -> None:
        alive = self._alive()
        if alive:
            self._do(self._barrier(alive[where % len(alive)], self.active))

    async def _barrier(self, process: Process, active: Any) -> None:
        active.sealed = True  # one at a time
        await self._hear(process)
        try:
            results = list(active.transferred.values())
            run: Any = await process.shuffles.shuffle_runs.get_most_recent(self.shuffle, results)
            await run.barrier(results)
            active.done = active.sealed  # False if the scheduler has restarted the barrier meanwhile
        except (Reschedule, P2PConsistencyError, MemoryError, asyncio.CancelledError):
            active.sealed = False  # to rerun, on another worker if this one has died or failed
        except AsyncTaskGroupClosedError:
            assert not process.alive  # only in this test a task continues on a dead worker
            active.sealed = False

    @precondition(lambda self: self.active.done)
    @rule(output=st.integers(0, OUTPUTS - 1))
    def unpack(self, output: int) -> None:
        self._unpack_if_there(output)

    async def _hear(self, process: Process) -> None:
        """Deliver the scheduler's earlier messages to a worker before a task that is sent later."""
        while self.network.streams[process]:
            await self.network.deliver_stream(process)

    async def _unpack(self, process: Process, output: int) -> None:
        await self._hear(process)
        run: ShuffleRun | None = process.run_of(self.shuffle)
        if run is None or run.run_id != self.active.run_spec.run_id:
            return
        received = run._receiver._share_of.get(output)
        incoming_shards = received.outputs.get(output, ()) if received else ()
        if any(
            incoming.state is ShardState.MOVING and not incoming._landed.done()
            for incoming in incoming_shards
        ):
            return  # its thread would block
        key = f"unpack-{output}"
        try:
            self.active.outputs[output] = process.address, run.get_output_partition(output, key)
        except (Reschedule, P2PConsistencyError, MemoryError):
            return
        run.task_done(key)

    @precondition(lambda self: len(self.active.outputs) == OUTPUTS and self.number < 2)
    @rule()
    def end(self) -> None:
        self._check_outputs()
        self.scheduler.end(self.shuffle)
        self._next_shuffle()

    @rule(outputs=st.sets(st.integers(0, OUTPUTS - 1), min_size=1), where=st.integers(0, 2))
    def balance(self, outputs: set[int], where: int) -> None:
        """Move outputs that are not in memory yet, without losing a worker."""
        alive = self._alive()
        if alive:
            self.scheduler.balance(self.shuffle, outputs, alive[where % len(alive)].address)
            self._settle()

    @rule(where=st.integers(0, 2))
    def owner_without_memory(self, where: int) -> None:
        """Let a worker run out of memory when it takes its next shard: the run fails at the producer."""
        alive = self._alive()
        exchange: Any = alive[where % len(alive)].exchange if alive else SimpleNamespace()

        def take(*_: Any) -> None:
            del exchange.take
            raise MemoryError("no memory for a shard")

        exchange.take = take

    # ---- messages --------------------------------------------------------------------

    def _message(self, which: int) -> Message:
        return self.network.messages[which % len(self.network.messages)]

    @precondition(lambda self: self.network.messages)
    @rule(which=st.integers(0, 50))
    def deliver(self, which: int) -> None:
        self._do(self.network.deliver(self._message(which)))

    @precondition(lambda self: self.network.messages)
    @rule(which=st.integers(0, 50))
    def deliver_and_lose_the_answer(self, which: int) -> None:
        self._do(self.network.deliver(self._message(which), answered=False))

    @precondition(lambda self: self.network.messages)
    @rule(which=st.integers(0, 50))
    def lose(self, which: int) -> None:
        self.network.lose(self._message(which))
        self._settle()

    @precondition(lambda self: self._awaited())
    @rule(which=st.integers(0, 50))
    def give_up(self, which: int) -> None:
        """End a call to a silent worker, which handles the message later."""
        awaited = self._awaited()
        self.network.give_up(awaited[which % len(awaited)])
        self._settle()

    def _awaited(self) -> list[Message]:
        """Return the messages whose replies a run may wait for."""
        return [
            message
            for message in self.network.messages
            if message.op == "gpurt_fetch"
            or (
                message.op == "shuffle_receive"
                and not isinstance(pickle.loads(message.content["data"])[2], Retire)
            )
        ]

    @rule(where=st.integers(0, 2))
    def hear_of_the_scheduler(self, where: int) -> None:
        waiting = [process for process in self._alive() if self.network.streams[process]]
        if waiting:
            self._do(self.network.deliver_stream(waiting[where % len(waiting)]))

    @rule()
    def pause_ends(self) -> None:
        """Let time pass until the next pause of a run is over."""
        self.loop.pass_until_next_timer()
        self._settle()

    # ---- processes -------------------------------------------------------------------

    @rule(where=st.integers(0, 2))
    def kill(self, where: int) -> None:
        alive = self._alive()
        if len(alive) > 1:
            alive[where % len(alive)].die()
            self._settle()

    @rule(where=st.integers(0, 2))
    def close(self, where: int) -> None:
        """End the runs of a worker, as a worker does before it leaves."""
        alive = [process for process in self._alive() if not process.shuffles.shuffle_runs.closed]
        if len(alive) > 1:
            self._do(alive[where % len(alive)].shuffles.shuffle_runs.teardown())

    @precondition(lambda self: NEW_ADDRESS not in self.addresses)
    @rule(outputs=st.sets(st.integers(0, OUTPUTS - 1)))
    def join(self, outputs: set[int]) -> None:
        """Start a worker at a new address, and give it outputs that are not in memory yet."""
        self._start(NEW_ADDRESS)
        self.scheduler.balance(self.shuffle, outputs, NEW_ADDRESS)
        self._settle()

    @rule(results_survive=st.booleans())
    def notice(self, results_survive: bool) -> None:
        """Make the scheduler notice a dead worker, and its nanny start another at the same address."""
        for address in self.addresses:
            if address in self.scheduler.workers and address not in self.network.processes:
                self._notice(address, results_survive)
                return

    def _notice(self, address: str, results_survive: bool = False) -> None:
        self.scheduler.leaves(address, results_survive=results_survive)
        self._start(address)

    # ---- the end ---------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self._finish()
        finally:
            Outbox.wait_for_room = self.wait_for_room  # type: ignore[method-assign]
            self.pauses.__exit__(None, None, None)
            logging.disable(logging.NOTSET)
            for process in self.everyone:
                process.close()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(quiet())
            self.loop.close()

    def _finish(self) -> None:
        self._until(lambda: len(self.active.outputs) == OUTPUTS, self._go_on)
        self._check_outputs()
        self.scheduler.end(self.shuffle)
        self._until(self._nothing_waits, self._deliver_all)
        for process in self._alive():
            assert process.outbox.pool.used == 0, "a block is held"
            assert not any(process.exchange._incoming.values()), "a shard is held"
            assert not process.landed.kept, "a pulled shard is held"
            assert not process.exchange.requests._released, "a release waits"
            assert not process.exchange._receiving, "a run is not over"
            assert process.exchange.puller.nbytes == 0
        assert not self.errors, self.errors

    def _until(self, done: Callable[[], bool], step: Callable[[], None]) -> None:
        for _ in range(200):
            if done():
                return
            step()
        raise AssertionError(
            f"a hang: {self.network.messages}, {self.background}, {self.errors}, "
            f"{self.active.owners.shares}, {self.active.transferred}, outputs {list(self.active.outputs)}"
        )

    def _nothing_waits(self) -> bool:
        if len(self._alive()) < len(self.addresses):  # a death has yet to be noticed
            return False
        if any(process.shuffles.shuffle_runs.closed for process in self._alive()):
            return False
        if any(run._retired.asked for process in self._alive() if (run := process.run_of(self.shuffle))):
            return False
        return not self.network.messages and not any(self.network.streams.values()) and not self.background

    def _deliver_all(self) -> None:
        for process in self._alive():
            if process.shuffles.shuffle_runs.closed:
                process.die()
        for address in self.addresses:
            if address not in self.network.processes:
                self._notice(address)
        for process in self._alive():
            while self.network.streams[process]:
                self._do(self.network.deliver_stream(process))
        for message in list(self.network.messages):
            if message in self.network.messages:
                self._do(self.network.deliver(message))
        self.pause_ends()

    def _go_on(self) -> None:
        """Take the next step of a cluster without faults, whenever nothing is in flight."""
        self._until(self._nothing_waits, self._deliver_all)
        alive = self._alive()
        if any(list(map(self._has_failed, alive))):
            self.scheduler.restart(self.shuffle)
            return
        for source in range(INPUTS):
            if source not in self.active.transferred and not self.active.sealed:
                self._do(self._transfer(alive[source % len(alive)], self.active, source))
                self._until(self._nothing_waits, self._deliver_all)
                if source not in self.active.transferred:
                    self._make_room(alive)
        if len(self.active.transferred) == INPUTS and not self.active.sealed:
            self._do(self._barrier(alive[0], self.active))
            self._until(self._nothing_waits, self._deliver_all)
        if self.active.done:
            for output in range(OUTPUTS):
                self._unpack_if_there(output)

    def _has_failed(self, process: Process) -> bool:
        """Return whether the run has failed on a worker; assert that it then holds no block."""
        run = process.run_of(self.shuffle)
        if run is None or run.is_open:
            return False
        assert not process.exchange.pools.owners(run._key), "a failed run holds blocks"
        return True

    def _make_room(self, alive: list[Process]) -> None:
        """Free the room that a transfer would have got by waiting for a full pool.

        Owners have read its blocks by now, but instead of continuing it has ended, and would cut the same
        blocks again next to the old ones.
        """
        for process in alive:
            process.outbox.reclaim_all()

    def _unpack_if_there(self, output: int) -> None:
        process = self.network.processes.get(self.active.owners[output])
        if (
            output not in self.active.outputs
            and process is not None
            and process.address in self.scheduler.workers
        ):
            self._do(self._unpack(process, output))

    def _check_outputs(self) -> None:
        for output, (_, frame) in self.active.outputs.items():
            wanted = [
                row for source in range(INPUTS) for row in self._rows(source) if row % OUTPUTS == output
            ]
            assert list(frame["row"]) == wanted, f"output {output} has other rows"


def _fail_in_place_of_waiting(self: Outbox, nbytes: int, seen: int, check: Any) -> None:
    """Ask for room as a waiting producer does, then end the attempt."""
    check()
    self._hooks.ask_for_room(self.readers())
    raise AttemptFailed


TestExactlyOnce = ExactlyOnce.TestCase
TestExactlyOnce.settings = examples(15, steps=40)
