"""Run whole shuffles in one process: exchanges, a network that the test controls, and a scheduler.

Time is faked too: pauses are skipped.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from distributed.comm import CommClosedError
from distributed.shuffle._core import ShuffleId

from dask_gpurt.exchange import requests
from tests.helpers.exchange_processes import Network, Process
from tests.helpers.exchange_scheduler import Active, Scheduler, frame_of, spec_of

#: Addresses of workers.
A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"
RESET = CommClosedError("the connection was reset")


@contextmanager
def without_pauses(calls: int = 4) -> Iterator[None]:
    """Skip pauses of the exchange, shorten those of runs to a millisecond, and limit the number of calls."""
    from dask_gpurt.exchange import calls as module
    from dask_gpurt.shuffle import offers, run

    kept = module.FIRST_PAUSE_S, module.LONGEST_PAUSE_S, module.MAX_CALLS, requests.PEER_RETRY_INTERVAL_S
    module.FIRST_PAUSE_S = module.LONGEST_PAUSE_S = requests.PEER_RETRY_INTERVAL_S = 0.0
    module.MAX_CALLS = calls
    kept_here = run.sync, run.FIRST_PAUSE_S, run.LONGEST_PAUSE_S, offers.LONGEST_PAUSE_S
    run.sync = _without_waiting
    run.FIRST_PAUSE_S = run.LONGEST_PAUSE_S = offers.LONGEST_PAUSE_S = 0.001
    try:
        yield
    finally:
        run.sync, run.FIRST_PAUSE_S, run.LONGEST_PAUSE_S, offers.LONGEST_PAUSE_S = kept_here
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


#: Clusters of the test that runs on an event loop of its own.
_clusters: list[Cluster] | None = None


class Cluster:
    """Run shuffles across processes whose messages are delivered immediately.

    ``paths``, ``pool``: settings of the exchanges.
    """

    OUTPUTS, INPUTS, ROWS = 4, 3, 40

    def __init__(self, *addresses: str, paths: Sequence[str] = ("shared-memory", "comms"), pool: int = 2**16):
        self.network = Network()
        self.network.direct = True
        self.scheduler = Scheduler(self.network)
        self._paths, self._pool = paths, pool
        self._all: list[Process] = []
        if _clusters is not None:
            _clusters.append(self)
        for address in addresses:
            self.start(address)

    @property
    def workers(self) -> list[Process]:
        """Return the workers, the oldest first."""
        return list(self.network.processes.values())

    @property
    def a(self) -> Process:
        return self.network.processes[A]

    @property
    def b(self) -> Process:
        return self.network.processes[B]

    @property
    def c(self) -> Process:
        return self.network.processes[C]

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

    def begin(self, shuffle: str = "a shuffle") -> Active:
        """Begin a shuffle."""
        return self.scheduler.begin(spec_of(shuffle, self.OUTPUTS))

    async def transfer_all(self, shuffle: str = "a shuffle") -> list[Any]:
        """Begin a shuffle and transfer its inputs, one after the other, across the workers."""
        self.begin(shuffle)
        where = self.workers
        return [
            await self.transfer(shuffle, source, where[source % len(where)]) for source in range(self.INPUTS)
        ]

    async def barrier(self, shuffle: str, results: Sequence[Any]) -> None:
        """Run the barrier task."""
        process = next(iter(self.network.processes.values()))
        run = await process.shuffles.shuffle_runs.get_most_recent(ShuffleId(shuffle), results)
        await run.barrier(results)

    async def outputs(self, shuffle: str = "a shuffle") -> dict[int, list[int]]:
        """Run the unpack tasks and return the rows of each output."""
        active = self.scheduler.active[shuffle]
        for output, address in active.owners.items():
            process = self.network.processes[address]
            run: Any = process.run_of(shuffle)
            active.outputs[output] = address, run.get_output_partition(output, f"unpack-{output}")
            run.task_done(f"unpack-{output}")
        return {output: list(frame["row"]) for output, (_, frame) in active.outputs.items()}

    async def shuffle(self, shuffle: str = "a shuffle") -> dict[int, list[int]]:
        """Run a whole shuffle and return the rows of each output."""
        await self.barrier(shuffle, await self.transfer_all(shuffle))
        return await self.outputs(shuffle)

    def expected(self) -> dict[int, list[int]]:
        """Return the expected rows of each output."""
        rows = [row for source in range(self.INPUTS) for row in self.rows(source)]
        return {
            output: [row for row in rows if row % self.OUTPUTS == output] for output in range(self.OUTPUTS)
        }

    async def end(self, shuffle: str = "a shuffle") -> None:
        """End a shuffle, and assert that no worker keeps any of it."""
        self.scheduler.end(shuffle)
        await self.hear()
        for process in self.network.processes.values():
            if not self.scheduler.active:
                assert process.outbox.pool.used == 0
            assert not any(process.exchange._incoming.values())

    async def finish(self, shuffle: str = "a shuffle") -> None:
        """Read all outputs, assert that they have their rows, and end the shuffle."""
        assert await self.outputs(shuffle) == self.expected()
        await self.end(shuffle)

    def close(self) -> None:
        for process in self._all:
            process.close()


def in_process(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on an event loop, without pauses, and close the clusters that it has made."""

    async def closing() -> None:
        global _clusters
        _clusters = made = []
        try:
            await test()
            for cluster in made:
                cluster.close()
        finally:
            _clusters = None

    def run() -> None:
        with without_pauses():
            asyncio.run(asyncio.wait_for(closing(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def on_exchanges(*more: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test with a cluster of two workers and ``more``, and its fixtures.

    ``settings``: those of :class:`Cluster`.
    """

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            async def with_cluster() -> None:
                await test(Cluster(A, B, *more, **settings), **fixtures)

            in_process(with_cluster)()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        _, *fixtures = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def failing(cluster: Cluster, op: str, address: str | None, *errors: Exception) -> list[str]:
    """Make the handler of a worker, or of each, fail with these errors, then work; returns its calls."""
    left, calls = list(errors), list[str]()

    async def fail(handle: Any, to: str, called: str, content: dict[str, Any]) -> Any:
        if called == op and address in (None, to):
            calls.append(op)
            if left:
                raise left.pop(0)
        return await handle(to, called, content)

    intercept(cluster, fail)
    return calls


def intercept(cluster: Cluster, meddle: Callable[..., Coroutine[Any, Any, Any]]) -> None:
    """Let ``meddle`` handle each message; its first argument is the usual handler."""
    handle = cluster.network._handle
    cluster.network._handle = lambda *message: meddle(handle, *message)  # type: ignore[method-assign]


def held_back(cluster: Cluster, op: str, *, to: str | None = None, containing: bytes = b"") -> asyncio.Event:
    """Hold messages back until the returned event is set."""
    arrives = asyncio.Event()

    async def hold_back(handle: Any, address: str, called_op: str, content: dict[str, Any]) -> Any:
        if called_op == op and to in (None, address) and containing in content.get("data", b""):
            await arrives.wait()
        return await handle(address, called_op, content)

    intercept(cluster, hold_back)
    return arrives


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
