"""Run several workers' exchanges in one process, on a network that the test controls.

Real: the exchange, its pools in shared memory, the runs, and Dask's plugin that finds runs for messages.
Faked: connections, threads (everything runs on the event loop), time (pauses are skipped) and the scheduler.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from dask.context import thread_state
from distributed.comm import CommClosedError
from distributed.core import AsyncTaskGroup, Status, error_message
from distributed.shuffle._core import ShuffleId, ShuffleRunSpec
from distributed.shuffle._exceptions import P2PConsistencyError
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

from dask_gpurt import config
from dask_gpurt.exchange import Exchange, PeerLost, Shard, requests
from dask_gpurt.exchange.outgoing import Outbox
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.observe import Metrics
from dask_gpurt.shuffle import ShuffleSpec
from dask_gpurt.shuffle.owners import Owners, deal
from dask_gpurt.shuffle.run import NEW_OWNERS_OP, SEALED_OP, ShuffleRun


class Inline(Executor):
    """Run each function in ``submit``, on the calling thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **options))
        except BaseException as error:
            done.set_exception(error)
        return done


class Landed:
    """Fake the tiers: keep the bytes of pulled shards."""

    def __init__(self) -> None:
        self.kept: dict[str, list[np.ndarray]] = {}
        #: Whether every tier is full.
        self.full = False
        #: Number of calls to spill everything.
        self.made_room = 0

    def put(self, key: str, shard: Shard, sources: Sequence[Any], device: Any, bring: Any) -> None:
        if self.full:
            raise OSError("no tier has room") from None
        self.kept[key] = [np.array(source) for source in bring(sources)]

    def keeps(self, nbytes: int, kind: str) -> bool:
        return True

    def make_room(self) -> None:
        self.made_room += 1

    @contextmanager
    def reading(self, wanted: Iterable[tuple[str, int]], task: Any) -> Iterator[dict[Any, Any]]:
        yield {(key, which): (self.kept[key][which], {}) for key, which in wanted}

    def discard(self, key: str) -> None:
        self.kept.pop(key, None)


class AttemptFailed(Exception):
    """End a transfer task in the middle, as a MemoryError would."""


@dataclass(eq=False)
class Message:
    """Hold a call that is in flight."""

    sender: Process
    address: str
    op: str
    content: dict[str, Any]
    answer: asyncio.Future[Any]

    def __repr__(self) -> str:
        return f"{self.op} {self.sender.address} -> {self.address}"


class Network:
    """Carry messages between processes; each waits until the test delivers or loses it.

    Messages of the scheduler arrive in order, and are never lost while a process lives.
    """

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.messages: list[Message] = []
        self.streams: defaultdict[Process, deque[tuple[str, dict[str, Any]]]] = defaultdict(deque)
        #: Whether messages are delivered immediately.
        self.direct = False

    async def call(self, sender: Process, address: str, op: str, content: dict[str, Any]) -> Any:
        if self.direct:
            return received(await self._handle(address, op, content))
        message = Message(sender, address, op, content, asyncio.get_running_loop().create_future())
        self.messages.append(message)
        return await message.answer

    async def _handle(self, address: str, op: str, content: dict[str, Any]) -> Any:
        if address not in self.processes:
            raise CommClosedError(f"nothing listens at {address}")
        process = self.processes[address]
        handler = process.handlers.get(op)
        if handler is None:
            return None  # as Dask does
        answer = handler(**pickle.loads(pickle.dumps(content)))
        if not inspect.isawaitable(answer):
            return answer
        handling = asyncio.ensure_future(answer)
        process.handling[handling] = None
        handling.add_done_callback(process.handling.pop)
        return await handling

    async def deliver(self, message: Message, *, answered: bool = True) -> None:
        """Deliver a message; unless ``answered``, the connection breaks before the reply arrives."""
        self.messages.remove(message)
        try:
            answer = await self._handle(message.address, message.op, message.content)
        except asyncio.CancelledError:  # the receiver died meanwhile
            if not message.answer.done():
                message.answer.set_exception(CommClosedError("the connection was reset"))
            return
        except Exception as error:
            if not message.answer.done():
                message.answer.set_exception(error)
            return
        if not message.answer.done():
            if answered:
                message.answer.set_result(received(answer))
            else:
                message.answer.set_exception(CommClosedError("the connection was reset"))

    def lose(self, message: Message) -> None:
        """Break the connection before a message arrives."""
        self.messages.remove(message)
        if not message.answer.done():
            message.answer.set_exception(CommClosedError("the connection was reset"))

    def give_up(self, message: Message) -> None:
        """End the call of a message, since its receiver is silent; the message itself stays in flight."""
        if not message.answer.done():
            message.answer.set_exception(PeerLost(f"worker {message.address} does not reply"))

    def stream(self, process: Process, op: str, **content: Any) -> None:
        """Send a message from the scheduler to a process."""
        self.streams[process].append((op, content))

    async def deliver_stream(self, process: Process) -> None:
        """Deliver the next message of the scheduler to a process."""
        op, content = self.streams[process].popleft()
        process.stream_handlers[op](**content)


def received(answer: Any) -> Any:
    """Convert a reply as a comm would: buffers to its own bytes, lists to tuples."""
    if isinstance(answer, dict):
        answer = {name: tuple(value) if isinstance(value, list) else value for name, value in answer.items()}
    if isinstance(answer, dict) and answer.get("data"):
        return {**answer, "data": [bytes(one.data) for one in answer["data"]]}
    if isinstance(answer, dict) and answer.get("status") == "error":
        return {**answer, "exception": answer["exception"].data, "traceback": answer["traceback"].data}
    return answer


class Process:
    """Fake a worker process: the attributes that an exchange and Dask's shuffle plugin use."""

    def __init__(self, address: str, network: Network, scheduler: Any, *, pool: int, paths: Sequence[str]):
        loop = asyncio.get_running_loop()
        self.address = address
        self.handlers: dict[str, Any] = {}
        self.stream_handlers: dict[str, Any] = {
            "remove-worker": self._remove_worker,
            NEW_OWNERS_OP: self._renew,
        }
        self.extensions: dict[str, Any] = {}
        self.state = SimpleNamespace(tasks={}, nthreads=1)
        self.loop = SimpleNamespace(time=loop.time, add_callback=self._add_callback)
        self.scheduler = scheduler
        self.batched_stream = SimpleNamespace(send=scheduler.hear)
        self._ongoing_background_tasks = AsyncTaskGroup()
        self._loop, self._network, self._context = loop, network, contextvars.copy_context()
        self.alive, self.status = True, Status.running
        #: Handlers in flight, the oldest first, which end with their process.
        self.handling: dict[asyncio.Future[Any], None] = {}
        settings = config.load_over({"exchange": {"paths": list(paths), "pool": pool}})
        metrics = Metrics()
        tiers: Any = None  # replaced by `Landed`
        self.exchange = Exchange(
            self, Pools(settings.exchange.pool, 2**30, metrics), tiers, settings, metrics
        )
        self.exchange.executor = Inline()  # type: ignore[assignment]
        self.landed: Any = Landed()
        self.exchange.landing = self.landed
        self.plugins = {"gpurt": SimpleNamespace(exchange=self.exchange)}
        self.shuffles = ShuffleWorkerPlugin()
        self.shuffles.setup(self)  # type: ignore[arg-type]
        network.processes[address] = self

    @property
    def outbox(self) -> Outbox:
        return self.exchange.pools.outbox("host")

    def counted(self, name: str) -> float:
        return float(self.exchange.metrics.snapshot()["counters"].get(name, 0))

    def rpc(self, address: str) -> Any:
        class Rpc:
            def __getattr__(rpc, op: str) -> Any:
                return lambda **content: self._network.call(self, address, op, content)

        return Rpc()

    def _is_finalizing(self) -> bool:
        return False

    def _add_callback(self, function: Callable[..., Any], *args: Any) -> None:
        async def call() -> None:
            if inspect.isawaitable(done := function(*args)):
                await done

        def soon() -> None:
            if self.alive:
                self._ongoing_background_tasks.call_soon(call)

        # Not in the context of a task, whose allocations a test may fail.
        self._loop.call_soon_threadsafe(soon, context=self._context)

    def _remove_worker(self, worker: str) -> None:
        self.exchange.on_worker_removed(worker)

    def _renew(self, id: str, run_id: int, owners: Owners) -> None:
        run = self.run_of(id)
        if run is not None and run.run_id == run_id:
            run.renew(owners)

    def die(self) -> None:
        """Die as after kill -9: without a message; memory that peers have mapped stays readable."""
        self.alive = False
        del self._network.processes[self.address]
        self._network.streams.pop(self, None)
        for message in [message for message in self._network.messages if message.sender is self]:
            self._network.messages.remove(message)
            message.answer.cancel()
        for handling in list(self.handling):
            handling.cancel()
        self._ongoing_background_tasks.close()

    def run_of(self, shuffle: str) -> ShuffleRun | None:
        """Return this worker's part of the active run of a shuffle."""
        found: Any = self.shuffles.shuffle_runs._active_runs.get(ShuffleId(shuffle))
        return found

    @contextmanager
    def task(self, key: str, dispatch: int) -> Iterator[dict[str, Any]]:
        """Run the body as a task that the scheduler dispatched; yields the metadata it reports back."""
        self.state.tasks[key] = SimpleNamespace(run_id=dispatch, metadata={})
        thread_state.key = key
        try:
            yield self.state.tasks[key].metadata
        finally:
            del self.state.tasks[key], thread_state.key

    def close(self) -> None:
        self.exchange.close()


#: Column with the output of each row, and the schema of the tests' frames.
TARGET = "_target"
META = pd.DataFrame({"row": np.empty(0, "int64")})


def frame_of(rows: Sequence[int], outputs: int) -> pd.DataFrame:
    """Return a frame with these rows; row ``n`` belongs to output ``n % outputs``."""
    numbers = np.array(rows, "int64")
    return pd.DataFrame({"row": numbers, TARGET: numbers % outputs})


def spec_of(shuffle: str, outputs: int) -> ShuffleSpec:
    """Return a shuffle of such frames."""
    return ShuffleSpec(
        id=ShuffleId(shuffle),
        disk=False,
        npartitions=outputs,
        column=TARGET,
        meta=pickle.dumps(META),
        columns=(*META.columns, TARGET),
        parts_out=tuple(range(outputs)),
        drop_column=True,
        ignore_index=True,
    )


@dataclass
class Active:
    """Hold the scheduler's state of an active shuffle."""

    spec: ShuffleSpec
    run_spec: ShuffleRunSpec[int]
    participants: set[str]
    #: Results of transfer tasks, by input.
    transferred: dict[int, Any] = field(default_factory=dict)
    #: Outputs in memory, each with the worker that holds it.
    outputs: dict[int, tuple[str, pd.DataFrame]] = field(default_factory=dict)
    #: Whether the barrier has sealed the run, and whether it is done.
    sealed: bool = False
    done: bool = False

    @property
    def owners(self) -> Owners:
        assert isinstance(self.run_spec.worker_for, Owners)
        return self.run_spec.worker_for


class Scheduler:
    """Fake Dask's p2p extension on the scheduler with our recovery, as far as runs need them."""

    def __init__(self, network: Network):
        self.network = network
        self.workers: set[str] = set()
        #: The workers that have fallen silent.
        self.silent: set[str] = set()
        self.active: dict[str, Active] = {}
        self._dispatches = itertools.count()
        self.restarts = 0
        self.recoveries = 0

    def next_dispatch(self) -> int:
        return next(self._dispatches)

    def begin(self, spec: ShuffleSpec) -> Active:
        workers = sorted(self.workers)
        worker_for = {output: spec.pick_worker(output, workers) for output in spec.output_partitions}
        run_spec = ShuffleRunSpec(spec=spec, worker_for=Owners.begin(worker_for), span_id=None)
        self.active[spec.id] = Active(spec, run_spec, set(worker_for.values()))
        return self.active[spec.id]

    def end(self, shuffle: str) -> None:
        """End a shuffle that is no longer needed."""
        ended = self.active.pop(shuffle)
        for address in ended.participants & self.network.processes.keys():
            self.network.stream(
                self.network.processes[address],
                "shuffle-fail",
                shuffle_id=shuffle,
                run_id=ended.run_spec.run_id,
                message=f"{shuffle} forgotten",
            )

    def restart(self, shuffle: str) -> None:
        spec = self.active[shuffle].spec
        self.end(shuffle)
        self.begin(spec)
        self.restarts += 1

    def joins(self, process: Process) -> None:
        self.workers.add(process.address)

    def leaves(self, address: str, *, results_survive: bool = False) -> None:
        """Handle the death of a worker.

        Parameters
        ----------
        results_survive
            Whether the results of its transfer tasks have replicas elsewhere.
        """
        self.workers.discard(address)
        for process in self.network.processes.values():
            if process.address in self.workers:
                self.network.stream(process, "remove-worker", worker=address)
        for active in self.active.values():
            if address not in active.participants:
                continue
            active.participants.discard(address)
            for output in [o for o, (where, _) in active.outputs.items() if where == address]:
                del active.outputs[output]
            if not results_survive:
                for source in [s for s, one in active.transferred.items() if one.producer == address]:
                    del active.transferred[source]
            self._move(active, {o for o, owner in active.owners.items() if owner == address}, [address])

    def _move(
        self, active: Active, outputs: Iterable[int], gone: Sequence[str] = (), avoiding: str | None = None
    ) -> None:
        """Reassign outputs, possibly to the same owners, and rerun the barrier."""
        self.recoveries += 1
        idle = {output for output in outputs if output in active.outputs}
        workers = sorted(self.workers - self.silent - {avoiding}) or [str(avoiding)]
        active.owners.move(deal(set(outputs) - idle, workers, {}), gone=gone, idle=deal(idle, workers, {}))
        self._moved(active)

    def balance(self, shuffle: str, outputs: Iterable[int], owner: str) -> None:
        """Move outputs that are not in memory yet to another owner, as when they turn out to be large.

        The barrier reruns if it has passed: the other side of a join may be late.
        """
        active = self.active[shuffle]
        if to := dict.fromkeys(set(outputs) - active.outputs.keys(), owner):
            active.owners.move(to)
            self._moved(active)

    def _moved(self, active: Active) -> None:
        """Rerun the barrier, and send the new owners to the workers."""
        active.sealed = active.done = False
        active.participants |= set(active.owners.values())
        for address in active.participants & self.network.processes.keys():
            self.network.stream(
                self.network.processes[address],
                NEW_OWNERS_OP,
                id=active.spec.id,
                run_id=active.run_spec.run_id,
                owners=active.owners.snapshot(),
            )

    # ---- what workers call -----------------------------------------------------------

    async def gpurt_gone(self, peers: list[str], closing: bool = False) -> list[str]:
        return [peer for peer in peers if peer not in self.workers or (closing and self._closes(peer))]

    async def gpurt_silent(self, id: str, run_id: int, worker: str) -> bool:
        return worker in self.silent and self._of(id, run_id) is not None

    def _closes(self, address: str) -> bool:
        process = self.network.processes.get(address)
        return process is not None and process.status is Status.closing

    async def gpurt_links(self, worker: str, peers: list[str]) -> dict[str, Any]:
        return {"links": {}, "classes": {}}

    async def shuffle_get(self, id: str, worker: str) -> Any:
        if id not in self.active or worker not in self.workers:
            return received(error_message(P2PConsistencyError(f"No active shuffle with id={id!r} found")))
        self.active[id].participants.add(worker)
        return {"status": "OK", "run_spec": self.active[id].run_spec}

    async def shuffle_get_or_create(self, shuffle_id: str, key: Any, worker: str) -> Any:
        return await self.shuffle_get(shuffle_id, worker)

    async def shuffle_restrict_task(self, id: str, run_id: int, key: str, worker: str) -> dict[str, str]:
        return {"status": "OK"}

    async def shuffle_barrier(self, id: str, run_id: int, consistent: bool) -> None:
        active = self.active[id]
        if active.run_spec.run_id != run_id:
            raise ValueError(f"{run_id=} does not match")
        assert not consistent
        self.restart(id)

    def _of(self, id: str, run_id: int) -> Active | None:
        active = self.active.get(id)
        return active if active is not None and active.run_spec.run_id == run_id else None

    async def gpurt_owners(self, id: str, run_id: int) -> dict[str, Owners | None]:
        active = self._of(id, run_id)
        return {"owners": active and active.owners.snapshot()}

    def hear(self, message: dict[str, Any]) -> None:
        """Handle a worker's stream message that a barrier, which is about to end, has sealed a run."""
        assert message["op"] == SEALED_OP
        if (active := self._of(message["id"], message["run_id"])) is not None:
            active.owners.seal(message["epoch"])

    async def gpurt_recover(
        self,
        id: str,
        run_id: int,
        epoch: int,
        reason: str,
        outputs: Sequence[int] = (),
        inputs: Sequence[str] = (),
        producers: Sequence[str] = (),
        unreachable: str | None = None,
    ) -> None:
        active = self._of(id, run_id)
        if active is None or active.owners.epoch != epoch:
            return
        lost = active.owners.received(outputs) - active.outputs.keys()
        avoided = {unreachable} | (self.silent & set(producers))
        lost |= {o for o, owner in active.owners.items() if owner in avoided} - active.outputs.keys()
        if lost or inputs or (outputs and active.done):
            for key in inputs:
                active.transferred.pop(int(key.removeprefix("transfer-")), None)
            self._move(active, lost, avoiding=unreachable)


@contextmanager
def without_pauses(calls: int = 4) -> Iterator[None]:
    """Skip pauses of the exchange, shorten those of runs to a millisecond, and limit the number of calls."""
    from dask_gpurt.exchange import calls as module
    from dask_gpurt.shuffle import retired_shares, run

    kept = module.FIRST_PAUSE_S, module.LONGEST_PAUSE_S, module.MAX_CALLS, requests.PEER_RETRY_INTERVAL_S
    module.FIRST_PAUSE_S = module.LONGEST_PAUSE_S = requests.PEER_RETRY_INTERVAL_S = 0.0
    module.MAX_CALLS = calls
    kept_here = run.sync, run.FIRST_PAUSE_S, run.LONGEST_PAUSE_S, retired_shares.LONGEST_PAUSE_S
    run.sync = _without_waiting
    run.FIRST_PAUSE_S = run.LONGEST_PAUSE_S = retired_shares.LONGEST_PAUSE_S = 0.001
    try:
        yield
    finally:
        run.sync, run.FIRST_PAUSE_S, run.LONGEST_PAUSE_S, retired_shares.LONGEST_PAUSE_S = kept_here
        module.FIRST_PAUSE_S, module.LONGEST_PAUSE_S, module.MAX_CALLS, requests.PEER_RETRY_INTERVAL_S = kept


_doing: set[asyncio.Future[Any]] = set()


def _without_waiting(loop: Any, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Schedule a coroutine on the event loop; tasks run on the loop here, so they cannot block on it."""
    doing = asyncio.ensure_future(function(*args, **options))
    _doing.add(doing)
    doing.add_done_callback(_doing.discard)


async def quiet() -> None:
    """Return once everything waits for an event that has not happened yet."""
    loop: Any = asyncio.get_running_loop()
    calm = 0
    while calm < 3:  # callbacks from another thread need an iteration to become ready
        calm = 0 if loop._ready else calm + 1
        await asyncio.sleep(0)


class Cluster:
    """Run shuffles across processes whose messages are delivered immediately.

    Parameters
    ----------
    paths, pool
        Settings of the exchanges.
    """

    OUTPUTS, INPUTS, ROWS = 4, 3, 40

    def __init__(self, *addresses: str, paths: Sequence[str] = ("shared-memory", "comms"), pool: int = 2**16):
        self.network = Network()
        self.network.direct = True
        self.scheduler = Scheduler(self.network)
        self._paths, self._pool = paths, pool
        self._all: list[Process] = []
        for address in addresses:
            self.start(address)

    def start(self, address: str) -> Process:
        """Start a worker."""
        process = Process(address, self.network, self.scheduler, pool=self._pool, paths=self._paths)
        self.scheduler.joins(process)
        self._all.append(process)
        return process

    def replace(self, process: Process) -> Process:
        """Kill a worker and start another at its address. Its peers have not received the news yet."""
        process.die()
        self.scheduler.leaves(process.address)
        return self.start(process.address)

    async def hear(self) -> None:
        """Deliver all pending messages of the scheduler."""
        for process in self.network.processes.values():
            while self.network.streams[process]:
                await self.network.deliver_stream(process)
        await quiet()

    def rows(self, source: int) -> range:
        """Return the rows of an input."""
        return range(source * self.ROWS, (source + 1) * self.ROWS)

    async def transfer(self, shuffle: str, source: int, process: Process) -> Any:
        """Run a transfer task on a worker and return its result."""
        key = f"transfer-{source}"
        run: Any = await process.shuffles.shuffle_runs.get_or_create(ShuffleId(shuffle), key)
        with process.task(key, self.scheduler.next_dispatch()):
            result = run.add_partition(frame_of(self.rows(source), self.OUTPUTS), source)
        await quiet()
        return result

    async def transfer_all(self, shuffle: str) -> list[Any]:
        """Begin a shuffle and transfer its inputs, one after the other, across the workers."""
        self.scheduler.begin(spec_of(shuffle, self.OUTPUTS))
        where = list(self.network.processes.values())
        return [
            await self.transfer(shuffle, source, where[source % len(where)]) for source in range(self.INPUTS)
        ]

    async def barrier(self, shuffle: str, results: Sequence[Any]) -> None:
        """Run the barrier task."""
        process = next(iter(self.network.processes.values()))
        run = await process.shuffles.shuffle_runs.get_most_recent(ShuffleId(shuffle), results)
        await run.barrier(results)

    async def outputs(self, shuffle: str) -> dict[int, list[int]]:
        """Run the unpack tasks and return the rows of each output."""
        active = self.scheduler.active[shuffle]
        for output, address in active.owners.items():
            process = self.network.processes[address]
            run: Any = process.run_of(shuffle)
            active.outputs[output] = address, run.get_output_partition(output, f"unpack-{output}")
            run.task_done(f"unpack-{output}")
        return {output: list(frame["row"]) for output, (_, frame) in active.outputs.items()}

    async def shuffle(self, shuffle: str) -> dict[int, list[int]]:
        """Run a whole shuffle and return the rows of each output."""
        await self.barrier(shuffle, await self.transfer_all(shuffle))
        return await self.outputs(shuffle)

    def expected(self) -> dict[int, list[int]]:
        """Return the expected rows of each output."""
        rows = [row for source in range(self.INPUTS) for row in self.rows(source)]
        return {
            output: [row for row in rows if row % self.OUTPUTS == output] for output in range(self.OUTPUTS)
        }

    async def end(self, shuffle: str) -> None:
        """End a shuffle, and assert that no worker keeps any of it."""
        self.scheduler.end(shuffle)
        await self.hear()
        for process in self.network.processes.values():
            if not self.scheduler.active:
                assert process.outbox.pool.used == 0
            assert not any(process.exchange._incoming.values())

    def close(self) -> None:
        for process in self._all:
            process.close()


def in_process(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on an event loop, without pauses."""

    def run() -> None:
        with without_pauses():
            asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def intercept(cluster: Cluster, meddle: Callable[..., Coroutine[Any, Any, Any]]) -> None:
    """Let ``meddle`` handle each message; its first argument is the usual handler."""
    handle = cluster.network._handle
    cluster.network._handle = lambda *message: meddle(handle, *message)  # type: ignore[method-assign]


def never_answering(cluster: Cluster, op: str, address: str) -> asyncio.Event:
    """Block a worker's handler for ever, as while connections are retried, or when its process is stopped."""
    called = asyncio.Event()

    async def hang(handle: Any, to: str, called_op: str, content: dict[str, Any]) -> Any:
        if (called_op, to) == (op, address):
            called.set()
            await asyncio.Event().wait()
        return await handle(to, called_op, content)

    intercept(cluster, hang)
    return called
