"""Define the faults: a class for each kind."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import dask
import psutil
from distributed import Client

import dask_gpurt
from benchmarks.chaos import worker_side
from benchmarks.chaos.cluster import PATIENCE_S, NannyLog, keeps_address, restart_given_up
from benchmarks.chaos.plan import FaultSpec, Setup
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.protocol import DRAIN_HANDLER, FETCH_HANDLER, FORGET_HANDLER, RELEASE_HANDLER, TICKET_HANDLER

logger = logging.getLogger(__name__)

#: Handlers of workers that their peers call, by their name in fault names.
MESSAGES = {
    "offers": "shuffle_receive",
    "releases": RELEASE_HANDLER,
    "drains": DRAIN_HANDLER,
    "forgets": FORGET_HANDLER,
    "tickets": TICKET_HANDLER,
    "fetches": FETCH_HANDLER,
}
#: Lower limits of ``one_in``. Resets hit at most every other message, otherwise no call could succeed.
MIN_ONE_IN = {"delay": 1, "repeat": 1, "reset": 2}
#: Timeout for workers to answer, in seconds; a stopped worker does not answer within it.
ASK_S = 20.0
SHM = "/dev/shm"
#: Bytes left free in /dev/shm, and the maximum fraction of free memory for filling it.
SHM_MARGIN, SHM_OF_FREE = 2**20, 0.1
#: Little memory: producers wait for room, and shards and partitions spill to disk. Only Dask retries tasks
#: that run out of memory, possibly on other workers.
TIGHT = {
    "gpurt.exchange.pool": "1 MiB",
    "gpurt.memory.device": "4 MiB",
    "gpurt.memory.host": "1 MiB",
    "gpurt.memory.retries": 0,
}
COMMS = {"gpurt.exchange.paths": ["comms"]}

_numbers = itertools.count()


class Site:
    """Give faults access to the cluster.

    ``cluster``: the cluster object, which can be scaled; None for an existing cluster.
    ``workers``: the number of workers when nothing is broken.
    """

    def __init__(self, client: Client, cluster: Any, workers: int):
        self.client = client
        self.cluster = cluster
        self.workers = self.wanted = workers
        #: The number of nannies that had failed, and were replaced.
        self.given_up = 0
        self.log = NannyLog()

    def addresses(self) -> list[str]:
        """Return the addresses of workers in the order of their names, which replacements inherit."""
        return [address for address, _ in sorted(self.names().items(), key=lambda item: str(item[1]))]

    def names(self) -> dict[str, Any]:
        """Return the name of each worker, by address."""
        identity = self.client.sync(self.client.scheduler.identity, n_workers=-1)  # type: ignore[union-attr]
        return {address: worker["name"] for address, worker in identity["workers"].items()}

    def ask(
        self, function: Callable[..., Any], *args: Any, workers: list[str] | None = None
    ) -> dict[str, Any]:
        """Run a function on workers; return the replies that arrive in time, by address."""
        try:
            replies: dict[str, Any] = self.client.sync(
                self._run, function, args, workers, callback_timeout=ASK_S
            )
        except (OSError, TimeoutError):
            return {}
        return replies

    async def _run(self, function: Callable[..., Any], args: Sequence[Any], workers: list[str] | None) -> Any:
        return await self.client.run(function, *args, workers=workers, on_error="ignore")

    def enable(self, setup: Setup) -> None:
        """Switch the runtime on with a setup."""
        with dask.config.set({**(TIGHT if setup.tight else {}), **(COMMS if setup.comms else {})}):
            dask_gpurt.enable(self.client)

    def wait_for_workers(self) -> None:
        """Wait until the cluster has the wanted number of workers."""
        ends = time.monotonic() + PATIENCE_S
        while len(self.names()) != self.wanted:
            if time.monotonic() > ends:
                raise TimeoutError(
                    f"the cluster did not come back to {self.wanted} workers in {PATIENCE_S} s"
                )
            time.sleep(0.05)
            if self.cluster is not None:
                self.given_up += restart_given_up(self.cluster)


class Fault(ABC):
    """Inject one fault. ``begin`` and ``end`` are each called once, on one thread."""

    #: Regular expressions for the errors that this fault may cause.
    explains: ClassVar[tuple[str, ...]] = ()
    #: Whether it requires a cluster started by chaos.
    own_cluster: ClassVar[bool] = False
    #: Whether it ends after other faults: the runtime cannot be switched on without memory for its pools.
    ends_last: ClassVar[bool] = False
    #: The messages, allocations or processes that it has hit so far.
    hits = 1

    def __init__(self, spec: FaultSpec, site: Site):
        self.spec = spec
        self.site = site

    @abstractmethod
    def begin(self) -> None:
        """Inject the fault."""

    def end(self) -> int:
        """End the fault, unless it ends by itself; return the number of hits."""
        return self.hits

    def target(self, workers: list[str] | None = None) -> str | None:
        """Return the targeted worker."""
        workers = self.site.addresses() if workers is None else workers
        return workers[self.spec.target % len(workers)] if workers else None


# ---- processes -----------------------------------------------------------------------

#: Dask's own errors for a task that was on too many workers that died.
KILLED = (r"KilledWorker", r"P2PConsistencyError.*given up after")


class Kill(Fault):
    """Kill a worker by SIGKILL; its nanny restarts it at another address."""

    explains = KILLED
    same_address = False
    hits = 0

    def begin(self) -> None:
        workers = [
            address
            for address, name in sorted(self.site.names().items(), key=lambda item: str(item[1]))
            if self.site.cluster is None or keeps_address(name) == self.same_address
        ]
        if (target := self.target(workers)) is not None:
            self.hits = len(self.site.ask(worker_side.kill, workers=[target]))
            _wait_until(lambda: target not in self.site.addresses() or self._is_new(target))

    def _is_new(self, address: str) -> bool:
        return self.same_address


class Replace(Kill):
    """Kill a worker with fixed ports by SIGKILL; its nanny restarts it at the same address."""

    same_address = True
    own_cluster = True

    def begin(self) -> None:
        before = self.site.ask(_pid)
        super().begin()
        if self.hits:
            _wait_until(lambda: self._is_back(before))

    def _is_back(self, before: dict[str, int]) -> bool:
        now = self.site.ask(_pid)
        return set(before) <= set(now) and now != before


class KillAtOffer(Fault):
    """Kill a worker by SIGKILL at its n-th offer, that is in the middle of a transfer."""

    explains = KILLED

    def begin(self) -> None:
        self.number = next(_numbers)
        options = {"action": "kill", "op": MESSAGES["offers"], "seed": self.spec.seed, "nth": self.spec.nth}
        self.hit_worker = self.target()
        self.before = self.site.ask(_pid)
        workers = [self.hit_worker] if self.hit_worker else []
        self.site.ask(worker_side.begin, self.number, "messages", options, workers=workers)

    def end(self) -> int:
        self.site.ask(worker_side.stop, self.number)
        now = self.site.ask(_pid)
        return int(now.get(self.hit_worker or "") != self.before.get(self.hit_worker or ""))


class Stop(Fault):
    """Stop a worker with SIGSTOP, and continue it with SIGCONT some seconds later."""

    def begin(self) -> None:
        target = self.target()
        workers = [target] if target else []
        self.hits = len(self.site.ask(worker_side.pause, self.spec.lasting_s, workers=workers))


# ---- messages ------------------------------------------------------------------------


class OnWorkers(Fault):
    """Inject a fault on all workers until it is ended."""

    kind: ClassVar[str]

    def options(self) -> dict[str, Any]:
        """Return the options for the worker's side."""
        return {"one_in": self.spec.one_in, "seed": self.spec.seed}

    def begin(self) -> None:
        self.number = next(_numbers)
        self.site.ask(worker_side.begin, self.number, self.kind, self.options())

    def end(self) -> int:
        return sum(self.site.ask(worker_side.stop, self.number).values())


class Messages(OnWorkers):
    """Delay, repeat, or lose (by a reset connection) messages of one kind."""

    kind = "messages"

    def __init__(self, spec: FaultSpec, site: Site):
        super().__init__(spec, site)
        action, _, word = spec.kind.partition("-")
        self.action, self.op = action, MESSAGES[word]

    def options(self) -> dict[str, Any]:
        return {
            "action": self.action,
            "op": self.op,
            "one_in": min(max(self.spec.one_in, MIN_ONE_IN[self.action]), 5),
            "seed": self.spec.seed,
            "seconds": min(self.spec.lasting_s, 2),
        }


class ResetConnections(Fault):
    """Abort all connections between workers."""

    def begin(self) -> None:
        self.hits = sum(self.site.ask(worker_side.reset_connections).values())


# ---- memory --------------------------------------------------------------------------

OUT_OF_MEMORY = (r"MemoryError", r"NoRoom", r"no tier has room", r"no space left", r"No space left")


class Allocations(OnWorkers):
    """Fail one in several allocations of each worker's devices."""

    kind = "allocations"
    explains = OUT_OF_MEMORY


class RefusedOffers(OnWorkers):
    """Make workers run out of memory when they process an offer, including their own."""

    kind = "offers"
    explains = OUT_OF_MEMORY


class FailingTransfers(OnWorkers):
    """Fail transfer tasks after they have published a part; Dask may retry them on another worker."""

    kind = "transfers"
    explains = (r"injected by chaos: a transfer task fails",)

    def options(self) -> dict[str, Any]:
        return {"one_in": max(5, self.spec.one_in), "seed": self.spec.seed}


class FullDisk(OnWorkers):
    """Fail writes to the local directory of each worker with ENOSPC."""

    kind = "full"
    explains = OUT_OF_MEMORY

    def options(self) -> dict[str, Any]:
        return {"prefixes": []}


class FullShm(OnWorkers):
    """Leave no space in /dev/shm.

    If this takes little memory, /dev/shm is filled with an unnamed file. Otherwise, since its pages are host
    memory, allocations in it are made to fail inside the workers.
    """

    kind = "full"
    explains = (*OUT_OF_MEMORY, r"SharedMemoryFull")
    _file: int | None = None

    def options(self) -> dict[str, Any]:
        return {"prefixes": [SHM, "/memfd:"]}

    def begin(self) -> None:
        self._file = _fill_shm()
        if self._file is None:
            super().begin()

    def end(self) -> int:
        if self._file is None:
            return super().end()
        os.close(self._file)
        return 1


def _fill_shm() -> int | None:
    """Fill /dev/shm except for a margin; return the open file, or None if that would take too much memory."""
    shm = os.statvfs(SHM)
    nbytes = shm.f_bavail * shm.f_frsize - SHM_MARGIN
    if not 0 < nbytes <= SHM_OF_FREE * psutil.virtual_memory().available:
        return None
    file = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.close(file)
        return None
    return file


# ---- the cluster ---------------------------------------------------------------------


class ScaleDown(Fault):
    """Retire a worker, and start another when the operations have ended."""

    own_cluster = True

    def begin(self) -> None:
        self._scale(max(1, self.site.workers - 1))

    def end(self) -> int:
        changed = self.site.wanted != self.site.workers
        self._scale(self.site.workers)
        return int(changed)

    def _scale(self, workers: int) -> None:
        self.site.wanted = workers
        self.site.cluster.scale(workers)
        with contextlib.suppress(TimeoutError):  # the runner checks the number of workers and reports it
            self.site.wait_for_workers()


class ScaleUp(ScaleDown):
    """Start a worker, and retire it when the operations have ended."""

    def begin(self) -> None:
        self._scale(self.site.workers + 1)


class SwitchRuntime(Fault):
    """Switch the runtime off, and on again when the operations have ended."""

    explains = (
        r"the runtime was switched off",
        r"the runtime is not on",
        # Dask's own barrier, of a run that ended as the runtime was switched off.
        r"P2PConsistencyError.*No active shuffle",
        # Dask's own p2p, to which a rechunk falls back, supports arrays in host memory only.
        r"Accessing a CuPy ndarry on CPU is not allowed",
    )
    ends_last = True

    def begin(self) -> None:
        dask_gpurt.disable(self.site.client)

    def end(self) -> int:
        self.site.enable(self.spec.setup)
        return 1


class SwitchRuntimeTwice(SwitchRuntime):
    """Switch the runtime off, and on again from two threads at once."""

    #: Whether switching on failed, because of another fault.
    is_off = False

    def begin(self) -> None:
        dask_gpurt.disable(self.site.client)
        threads = [threading.Thread(target=self._enable) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _enable(self) -> None:
        try:
            self.site.enable(self.spec.setup)
        except Exception as error:
            logger.warning("the runtime could not be switched on: %r", error)
            self.is_off = True

    def end(self) -> int:
        return super().end() if self.is_off else 1


class WrongRow(Fault):
    """Change a row of a result before it is checked, to show that the check can fail."""

    def begin(self) -> None:
        pass


def _pid(dask_worker: WorkerServer) -> int:
    return os.getpid()


def _wait_until(happened: Callable[[], bool]) -> None:
    """Wait for an event of the cluster, up to :data:`ASK_S`; callers check the outcome themselves."""
    ends = time.monotonic() + ASK_S
    while not happened() and time.monotonic() < ends:
        time.sleep(0.05)


#: The fault that changes a result before it is checked; injected only if it is named explicitly.
CHECKS_THE_CHECKER = "wrong-row"

FAULTS: dict[str, type[Fault]] = {
    "kill": Kill,
    "kill-at-offer": KillAtOffer,
    "replace": Replace,
    "stop": Stop,
    "reset-connections": ResetConnections,
    **{f"{action}-{word}": Messages for action in ("delay", "repeat", "reset") for word in MESSAGES},
    "allocations": Allocations,
    "refuse-offers": RefusedOffers,
    "fail-transfers": FailingTransfers,
    "full-disk": FullDisk,
    "full-shm": FullShm,
    "scale-down": ScaleDown,
    "scale-up": ScaleUp,
    "switch": SwitchRuntime,
    "switch-twice": SwitchRuntimeTwice,
    CHECKS_THE_CHECKER: WrongRow,
}
