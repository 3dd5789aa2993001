"""Inject faults into a worker process: its messages, its file systems, its allocations.

Each fault wraps a function that the runtime calls (``worker.rpc``, ``os.write``, the devices, their pools,
``Exchange.take``), and ends when the wrapper is removed. A restarted process has no faults; Dask sets up the
plugin again in the new process.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from distributed import WorkerPlugin
from distributed.comm.core import CommClosedError

from benchmarks.common.faults import FailingCalls, Injector, allocations
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.device import PoolFull

NAME = "gpurt-chaos"
#: Delay in seconds before this process kills itself, so that the reply to the request is sent first.
KILL_DELAY_S = 0.01


@dataclass
class Rule:
    """Change messages of one operation that this worker sends to other workers.

    ``action``: ``delay``, ``repeat``, ``reset`` or ``kill``.
    ``op``: the handler of the messages, such as ``shuffle_receive``.
    ``one_in``: hit one in this many messages at random.
    ``nth``: hit only the message with this number, instead of ``one_in``.
    ``seconds``: maximum delay.
    """

    action: str
    op: str
    seed: int
    one_in: int = 1
    nth: int | None = None
    seconds: float = 1.0
    hits: int = 0
    _seen: int = 0
    _random: Random = field(default_factory=Random)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def hit(self) -> bool:
        """Count a message; return whether the rule hits it."""
        self._seen += 1
        hit = self._seen == self.nth if self.nth is not None else self._random.randrange(self.one_in) == 0
        self.hits += hit
        return hit

    def drawn_s(self) -> float:
        """Draw the delay of a message, in seconds."""
        return self._random.uniform(0, self.seconds)

    def flip(self) -> bool:
        """Draw one of two alternatives."""
        return self._random.random() < 0.5


class FaultyRpc:
    """Apply rules to messages of ``worker.rpc``; all else is passed through."""

    def __init__(self, pool: Any):
        self.pool = pool
        self.rules: dict[int, Rule] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _FaultyCalls(self.pool(*args, **kwargs), self.rules)


class _FaultyCalls:
    """Apply the rules to the operations of one peer."""

    def __init__(self, calls: Any, rules: dict[int, Rule]):
        self._calls = calls
        self._rules = rules

    def __getattr__(self, op: str) -> Any:
        send = getattr(self._calls, op)
        for rule in [rule for rule in self._rules.values() if rule.op == op]:
            send = _with(rule, send)
        return send


def _with(rule: Rule, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def faulty(**kwargs: Any) -> Any:
        return await (_ACTIONS[rule.action](rule, send, kwargs) if rule.hit() else send(**kwargs))

    return faulty


async def _delay(rule: Rule, send: Callable[..., Awaitable[Any]], message: dict[str, Any]) -> Any:
    """Send a message late, so that later messages overtake it."""
    await asyncio.sleep(rule.drawn_s())
    return await send(**message)


async def _repeat(rule: Rule, send: Callable[..., Awaitable[Any]], message: dict[str, Any]) -> Any:
    """Send a message twice: in a row, or the second time after other messages."""
    reply = await send(**message)
    if rule.flip():
        return await send(**message)
    late = asyncio.create_task(_late(rule, send, message))
    _LATE.add(late)
    late.add_done_callback(_LATE.discard)
    return reply


async def _late(rule: Rule, send: Callable[..., Awaitable[Any]], message: dict[str, Any]) -> None:
    await asyncio.sleep(rule.drawn_s())
    try:
        await send(**message)
    except OSError:
        rule.hits -= 1  # its receiver has left in the meantime


async def _reset(rule: Rule, send: Callable[..., Awaitable[Any]], message: dict[str, Any]) -> Any:
    """Break the connection before or after the message arrives; the sender cannot tell which."""
    if rule.flip():
        await send(**message)
    raise CommClosedError(f"injected: the connection was reset by the peer during {rule.op!r}")


async def _kill(rule: Rule, send: Callable[..., Awaitable[Any]], message: dict[str, Any]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


_ACTIONS = {"delay": _delay, "repeat": _repeat, "reset": _reset, "kill": _kill}
#: Strong references to running tasks, since the event loop only has weak ones.
_LATE: set[asyncio.Task[None]] = set()


class FullFileSystem(Injector):
    """Make this process's writes to files below some directories fail with ENOSPC."""

    def __init__(self, *prefixes: str):
        super().__init__()
        self._prefixes = prefixes
        for name in ("write", "pwrite", "posix_fallocate"):
            self.replace(os, name, self._failing(getattr(os, name)))

    def _failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def failing(fd: int, *args: Any) -> Any:
            if self._is_below(fd):
                self.hits += 1
                raise OSError(errno.ENOSPC, "injected: no space left on device")
            return original(fd, *args)

        return failing

    def _is_below(self, fd: int) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(self._prefixes)
        except OSError:
            return False


class FailingTransfers(Injector):
    """Make transfer tasks fail while they pack, after a simulated full pool has made them publish a part."""

    def __init__(self, pools: list[Any], one_in: int, seed: int):
        super().__init__()
        self._random = Random(seed)
        self._one_in = one_in
        self._thread = threading.local()
        for pool in pools:
            self.replace(pool, "allocate", self._failing(pool.allocate))

    def _failing(self, allocate: Callable[[int], Any]) -> Callable[[int], Any]:
        def failing(nbytes: int) -> Any:
            # First simulate a full pool, so that the task publishes what it has packed. Its next allocation
            # then fails the task.
            if getattr(self._thread, "fails", False):
                self._thread.fails = False
                raise RuntimeError("injected by chaos: a transfer task fails")
            if self._random.randrange(self._one_in) == 0:
                self.hits += 1
                self._thread.fails = True
                raise PoolFull(nbytes)
            return allocate(nbytes)

        return failing


class ChaosWorkerPlugin(WorkerPlugin):
    """Hold the faults of a worker."""

    name = NAME
    idempotent = True

    def setup(self, worker: WorkerServer) -> None:
        self.worker = worker
        self.rpc = FaultyRpc(worker.rpc)
        worker.rpc = cast(Any, self.rpc)
        self.faults: dict[int, Any] = {}

    def teardown(self, worker: WorkerServer) -> None:
        for number in list(self.faults):
            self.stop(number)
        if cast(Any, worker.rpc) is self.rpc:
            worker.rpc = self.rpc.pool

    def begin(self, number: int, kind: str, options: dict[str, Any]) -> None:
        """Begin a fault under a number; a no-op for faults that need the runtime while it is off."""
        runtime: Any = self.worker.plugins.get("gpurt")
        if kind == "messages":
            self.faults[number] = self.rpc.rules[number] = Rule(**options)
        elif kind == "full":
            self.faults[number] = FullFileSystem(*options["prefixes"] or [self.worker.local_directory])
        elif runtime is not None:
            self.faults[number] = OF_THE_RUNTIME[kind](runtime.exchange, **options)

    def stop(self, number: int) -> int:
        """End a fault; return its number of hits."""
        self.rpc.rules.pop(number, None)
        fault = self.faults.pop(number, None)
        if hasattr(fault, "stop"):
            fault.stop()
        return 0 if fault is None else int(fault.hits)


#: Faults of an exchange by name: its transfer tasks fail, its devices' allocations, and offers to it.
OF_THE_RUNTIME: dict[str, Callable[..., Injector]] = {
    "transfers": lambda exchange, **options: FailingTransfers(
        [exchange.pools.known(kind).pool for kind in exchange.pools.devices], **options
    ),
    "allocations": lambda exchange, **options: FailingCalls(allocations(exchange), **options),
    "offers": lambda exchange, **options: FailingCalls([(exchange, "take")], **options),
}


# ---- called by the client ------------------------------------------------------------


def begin(number: int, kind: str, options: dict[str, Any], dask_worker: WorkerServer) -> None:
    """Begin a fault on a worker."""
    plugin: Any = dask_worker.plugins[NAME]
    plugin.begin(number, kind, options)


def stop(number: int, dask_worker: WorkerServer) -> int:
    """End a fault on a worker; return its number of hits."""
    plugin: Any = dask_worker.plugins.get(NAME)
    return 0 if plugin is None else int(plugin.stop(number))


def kill(dask_worker: WorkerServer) -> int:
    """Kill this process with SIGKILL, as the OOM killer would, after the reply."""
    threading.Timer(KILL_DELAY_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return 1


def pause(seconds: float, dask_worker: WorkerServer) -> int:
    """Stop this process, and start another process that continues it."""
    me = os.getpid()
    script = f"sleep {KILL_DELAY_S}; kill -STOP {me}; sleep {seconds}; kill -CONT {me}"
    subprocess.Popen(["sh", "-c", script], start_new_session=True)
    return 1


def reset_connections(dask_worker: WorkerServer) -> int:
    """Abort all connections to other workers, including those in use."""
    pool, scheduler = dask_worker.rpc, dask_worker.scheduler.addr
    comms = [
        comm
        for known in (pool.available, pool.occupied)
        for peer, of_peer in list(known.items())
        if peer != scheduler
        for comm in list(of_peer)
    ]
    for comm in comms:
        comm.abort()
    return len(comms)
