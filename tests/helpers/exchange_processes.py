"""Run the exchanges of several workers in one process, on a network that the test controls.

Real: the exchange, its pools in shared memory, the runs, and Dask's plugin that finds runs for messages.
Faked: connections, and threads (everything runs on the event loop).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from dask.context import thread_state
from distributed.comm import CommClosedError
from distributed.core import AsyncTaskGroup, Status
from distributed.shuffle._core import ShuffleId
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

from dask_gpurt import config
from dask_gpurt.exchange import Exchange, PeerLost, Shard
from dask_gpurt.exchange.outgoing import Outbox
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.observe import Metrics
from dask_gpurt.protocol import NEW_OWNERS_OP
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.run import ShuffleRun


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

    def keeps(self, nbytes: int, coming: int, kind: str) -> bool:
        return True

    def make_room(self) -> None:
        self.made_room += 1

    @contextmanager
    def reading(self, wanted: Iterable[tuple[str, int]], task: Any) -> Iterator[dict[Any, Any]]:
        yield {(key, which): (self.kept[key][which], {}) for key, which in wanted}

    def discard(self, key: str) -> None:
        self.kept.pop(key, None)


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
        # A long traceback is not sent.
        sent = {name: each and each.data for name in ("exception", "traceback") for each in [answer[name]]}
        return {**answer, **sent}
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
