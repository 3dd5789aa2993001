"""Break things: a class for each kind of fault."""

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
from dask_gpurt.chaos import worker_side
from dask_gpurt.chaos.cluster import PATIENCE_S, NannyLog, keeps_address, restart_given_up
from dask_gpurt.chaos.plan import FaultSpec, Setup

logger = logging.getLogger(__name__)

#: Handlers of workers that other workers call, by the word that a fault has for them.
MESSAGES = {
    "offers": "shuffle_receive",
    "releases": "gpurt_release",
    "drains": "gpurt_drain",
    "forgets": "gpurt_forget",
    "tickets": "gpurt_ticket",
    "fetches": "gpurt_fetch",
}
#: A connection that breaks each time is none: a reset leaves at least every other message alone.
MIN_ONE_IN = {"delay": 1, "repeat": 1, "reset": 2}
#: Seconds for a worker to answer; a worker that is stopped answers after that.
ASK_S = 20.0
SHM = "/dev/shm"
#: Bytes that are left free in /dev/shm, and the most of the free memory that filling it may take.
SHM_MARGIN, SHM_OF_FREE = 2**20, 0.1
#: With little memory producers wait for room, and shards and partitions go down to the disk.
#: Tasks that run out of memory are retried by Dask only, so also on other workers.
TIGHT = {
    "gpurt.exchange.pool": "1 MiB",
    "gpurt.memory.device": "4 MiB",
    "gpurt.memory.host": "1 MiB",
    "gpurt.memory.retries": 0,
}
COMMS = {"gpurt.exchange.paths": ["comms"]}

_numbers = itertools.count()


class Site:
    """Show faults the cluster.

    Parameters
    ----------
    client
        Connected to it.
    cluster
        What can be scaled; None for a cluster that others started.
    workers
        How many there are when nothing is broken.
    """

    def __init__(self, client: Client, cluster: Any, workers: int):
        self.client = client
        self.cluster = cluster
        self.workers = self.wanted = workers
        #: The number of nannies that had given up, and were replaced.
        self.given_up = 0
        self.log = NannyLog()

    def addresses(self) -> list[str]:
        """List the workers in the order of their names, which stay when a worker is replaced."""
        return [address for address, _ in sorted(self.names().items(), key=lambda item: str(item[1]))]

    def names(self) -> dict[str, Any]:
        """Map the address of each worker to its name."""
        identity = self.client.sync(self.client.scheduler.identity, n_workers=-1)  # type: ignore[union-attr]
        return {address: worker["name"] for address, worker in identity["workers"].items()}

    def ask(
        self, function: Callable[..., Any], *args: Any, workers: list[str] | None = None
    ) -> dict[str, Any]:
        """Run a function on workers; those that do not answer in time are left out."""
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
        """Switch the runtime on."""
        with dask.config.set({**(TIGHT if setup.tight else {}), **(COMMS if setup.comms else {})}):
            dask_gpurt.enable(self.client)

    def wait_for_workers(self) -> None:
        """Wait until the cluster has its size."""
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
    """Inject one fault. ``begin`` and ``end`` are called once each, on one thread.

    Parameters
    ----------
    spec
        As it was drawn.
    site
        Where.
    """

    #: Errors that an operation may end in because of this fault: regular expressions for their text.
    explains: ClassVar[tuple[str, ...]] = ()
    #: Whether it takes a cluster of our own.
    own_cluster: ClassVar[bool] = False
    #: Whether it is mended after others: the runtime does not go on while there is no memory for its pools.
    ends_last: ClassVar[bool] = False

    def __init__(self, spec: FaultSpec, site: Site):
        self.spec = spec
        self.site = site

    @abstractmethod
    def begin(self) -> None:
        """Break something."""

    def end(self) -> int:
        """Mend what does not mend itself; returns how often something was hit."""
        return 1

    def target(self, workers: list[str] | None = None) -> str | None:
        """Choose the worker that is hit."""
        workers = self.site.addresses() if workers is None else workers
        return workers[self.spec.target % len(workers)] if workers else None


# ---- processes -----------------------------------------------------------------------

#: Messages of Dask itself where a task has been on too many workers that died.
KILLED = (r"KilledWorker", r"P2PConsistencyError.*given up after")


class Kill(Fault):
    """Kill a worker by SIGKILL; its nanny starts another one, at another address."""

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

    def end(self) -> int:
        return self.hits


class Replace(Kill):
    """Kill a worker that has fixed ports by SIGKILL: another process comes up at the same address."""

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
    """Kill a worker by SIGKILL as it makes its n-th offer, so in the middle of a transfer."""

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
    """Stop a worker by SIGSTOP, and continue it by SIGCONT some seconds later."""

    def begin(self) -> None:
        target = self.target()
        workers = [target] if target else []
        self.hits = len(self.site.ask(worker_side.pause, self.spec.lasting_s, workers=workers))

    def end(self) -> int:
        return self.hits


# ---- messages ------------------------------------------------------------------------


class OnWorkers(Fault):
    """Have all workers do something wrong, until it is ended."""

    kind: ClassVar[str]

    def options(self) -> dict[str, Any]:
        """Return what the worker's side needs to know."""
        return {"one_in": self.spec.one_in, "seed": self.spec.seed}

    def begin(self) -> None:
        self.number = next(_numbers)
        self.site.ask(worker_side.begin, self.number, self.kind, self.options())

    def end(self) -> int:
        return sum(self.site.ask(worker_side.stop, self.number).values())


class Messages(OnWorkers):
    """Delay or repeat messages of one kind, or lose them with their connection."""

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

    hits: int

    def begin(self) -> None:
        self.hits = sum(self.site.ask(worker_side.reset_connections).values())

    def end(self) -> int:
        return self.hits


# ---- memory --------------------------------------------------------------------------

OUT_OF_MEMORY = (r"MemoryError", r"NoRoom", r"no tier has room", r"no space left", r"No space left")


class Allocations(OnWorkers):
    """Fail one of so many allocations of a worker's devices."""

    kind = "allocations"
    explains = OUT_OF_MEMORY


class RefusedOffers(OnWorkers):
    """Let a worker run out of memory as it takes an offer, also one of its own."""

    kind = "offers"
    explains = OUT_OF_MEMORY


class FailingTransfers(OnWorkers):
    """Fail transfer tasks after a part was published; Dask may run them again on another worker."""

    kind = "transfers"
    explains = (r"injected by chaos: a transfer task fails",)

    def options(self) -> dict[str, Any]:
        return {"one_in": max(5, self.spec.one_in), "seed": self.spec.seed}


class FullDisk(OnWorkers):
    """Fail writes to the directory of a worker for want of space."""

    kind = "full"
    explains = OUT_OF_MEMORY

    def options(self) -> dict[str, Any]:
        return {"prefixes": []}


class FullShm(OnWorkers):
    """Leave no space in /dev/shm.

    It is filled with a nameless file where that costs little memory. On large ones, whose pages are the
    host's memory, taking more of it fails in the workers.
    """

    kind = "full"
    explains = OUT_OF_MEMORY
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
    """Fill /dev/shm but for a margin; returns the file that does, None where that is too much."""
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
    """Retire a worker, and start another one when the operations have ended."""

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
        with contextlib.suppress(TimeoutError):  # the runner looks at it, and says so
            self.site.wait_for_workers()


class ScaleUp(ScaleDown):
    """Start a worker, and retire it when the operations have ended."""

    def begin(self) -> None:
        self._scale(self.site.workers + 1)


class SwitchRuntime(Fault):
    """Switch the runtime off, and on again when the operations have ended."""

    explains = (r"the runtime was switched off", r"the runtime is not on")
    ends_last = True

    def begin(self) -> None:
        dask_gpurt.disable(self.site.client)

    def end(self) -> int:
        self.site.enable(self.spec.setup)
        return 1


class SwitchRuntimeTwice(Fault):
    """Switch the runtime off, and on again, by two threads at once."""

    explains = SwitchRuntime.explains
    ends_last = True
    #: Whether it did not go on, beside another fault.
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
            logger.warning("the runtime did not go on: %r", error)
            self.is_off = True

    def end(self) -> int:
        if self.is_off:
            self.site.enable(self.spec.setup)
        return 1


class WrongRow(Fault):
    """Change a row of a result before it is checked: shows that the checker can fail."""

    def begin(self) -> None:
        pass


def _pid(dask_worker: Any) -> int:
    return os.getpid()


def _wait_until(happened: Callable[[], bool]) -> None:
    """Wait for an event of the cluster, as long as that may take; what needs it looks again."""
    ends = time.monotonic() + ASK_S
    while not happened() and time.monotonic() < ends:
        time.sleep(0.05)


#: Changes what is checked; only where it is asked for by name.
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
