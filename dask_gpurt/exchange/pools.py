"""Create the pools of a worker's devices, size them, trim them, and free them after their last user."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dask.utils import format_bytes

from dask_gpurt.config import ConfigError, Size
from dask_gpurt.device import Device, NoMemoryForPool, Pool
from dask_gpurt.device.discover import discover, main_kind
from dask_gpurt.exchange.outgoing import Outbox, PoolHooks, Reading
from dask_gpurt.exchange.shard import ExchangeClosed, Peer, RunKey
from dask_gpurt.memory.budget import Claim
from dask_gpurt.observe import Metrics

#: The most runs that are not active for which producers are remembered: their offers may be late.
MAX_INACTIVE = 1024


class ActiveRuns:
    """Hold the active runs, each with the producers that have ended their part of it.

    A producer may end its part before its first offer has arrived, with which the run begins here::

        producer: offers a shard ------------------------ arrives: the run begins
        producer: its part has failed ---- arrives: forget its shards

    The shard must not be accepted, since the producer may have reused its block. Changed on the event loop,
    read from any thread.
    """

    def __init__(self) -> None:
        self._active: dict[RunKey, set[Peer]] = {}
        #: The same for runs that have ended or have yet to begin here, the latest last.
        self._inactive: dict[RunKey, set[Peer]] = {}

    def begins(self, run: RunKey) -> None:
        """Note that a run begins to receive here."""
        self._active[run] = self._inactive.pop(run, set())

    def ends(self, run: RunKey) -> None:
        """Note that a run has ended here. Idempotent."""
        self._active.pop(run, None)

    def __contains__(self, run: object) -> bool:
        return run in self._active

    def __iter__(self) -> Iterator[RunKey]:
        return iter(list(self._active))

    def __len__(self) -> int:
        return len(self._active)

    def withdraws(self, producer: Peer, run: RunKey) -> None:
        """Note that a producer has ended its part of a run, which may have yet to begin here."""
        withdrawn = self._active.get(run)
        if withdrawn is None:
            withdrawn = self._inactive[run] = self._inactive.pop(run, set())
            if len(self._inactive) > MAX_INACTIVE:
                del self._inactive[next(iter(self._inactive))]
        withdrawn.add(producer)

    def takes_from(self, producer: Peer, run: RunKey) -> bool:
        """Return whether a run is active here, and a producer has not ended its part of it."""
        withdrawn = self._active.get(run)
        return withdrawn is not None and producer not in withdrawn


#: The least automatic size in bytes, for a device that is full.
SMALLEST_POOL = 2**16
#: How often the size of a pool is determined, while there is less memory than that.
ATTEMPTS = 4


# ---- pools -------------------------------------------------------------------------------------------


class NoSuchDevice(RuntimeError):
    """A worker was given partitions on a device that it does not have."""


class Pools:
    """Hold the devices by kind, and the published blocks in the pool of each. Thread-safe.

    ``size``: the setting ``gpurt.exchange.pool``; None for an automatic size.
    ``memory_limit``: the worker's limit of host memory in bytes.
    """

    def __init__(self, size: Size | None, memory_limit: int, metrics: Metrics):
        self.devices: dict[str, Device] = discover(memory_limit)
        #: The kind of device on which this worker computes.
        self.main = main_kind(self.devices)
        self._size = size
        #: The most bytes of a pool of automatic size, by kind of device: its part of the worker's budget.
        self.most: dict[str, int] = {}
        self._metrics = metrics
        self._hooks = PoolHooks()
        self._outboxes: dict[str, Outbox] = {}
        #: Number of allocations at the last `trim_idle`, by kind.
        self._cuts: dict[str, int] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Pools, {self._outboxes!r}>"

    def serve(self, hooks: PoolHooks) -> None:
        """Ask an exchange from now on. To be called before the first pool is created."""
        self._hooks = hooks

    def device(self, kind: str) -> Device:
        """Return the device of a kind; raise NoSuchDevice if there is none."""
        try:
            return self.devices[kind]
        except KeyError:
            raise NoSuchDevice(f"this worker has no {kind} device, but received partitions on one") from None

    def outbox(self, kind: str) -> Outbox:
        """Return the published blocks of a device, creating its pool on first use. Blocks.

        Raises ConfigError if there is no memory for the pool.
        """
        with self._lock:
            if kind not in self._outboxes:
                pool = self._create_pool(self.device(kind))
                self._outboxes[kind] = Outbox(pool, self._hooks, self._metrics)
            return self._outboxes[kind]

    def _create_pool(self, device: Device) -> Pool:
        """Create the pool of a device.

        Another process may take the memory that was free a moment before, such as another worker of the same
        GPU that is being switched on. So the size is determined again.
        """
        for _ in range(ATTEMPTS - 1):
            with suppress(NoMemoryForPool):
                return device.create_pool(self.size_for(device))
        try:
            return device.create_pool(self.size_for(device))
        except NoMemoryForPool as error:
            raise ConfigError(
                f"there is no memory for a pool of {format_bytes(error.nbytes)}, although more was free a "
                "moment before: set 'gpurt.exchange.pool' to less, or end other programs on the device"
            ) from error

    def known(self, kind: str) -> Outbox:
        """Return the outbox of a pool that exists. Does not block."""
        return self._outboxes[kind]

    def size_for(self, device: Device) -> int:
        """Return the size in bytes that a pool of a device gets when it is created.

        Raises ConfigError as :meth:`claim`.
        """
        claim = self.claim(device)
        if claim.asked is not None:
            return claim.asked
        return max(min(claim.automatic, self.most.get(device.kind, claim.automatic)), SMALLEST_POOL)

    def claim(self, device: Device) -> Claim:
        """Return the claim of a device's pool to the memory that it is part of.

        Raises ConfigError if the setting exceeds the free memory.
        """
        limits = device.pool_limits()
        # On a worker with a GPU, the setting applies to the GPU only.
        if self._size is None or device.kind != self.main:
            return Claim("gpurt.exchange.pool", None, int(limits.automatic))
        asked = self._size.of(limits.whole)
        if asked > limits.most:
            free, total = format_bytes(limits.free), format_bytes(limits.total)
            raise ConfigError(
                f"'gpurt.exchange.pool' is {self._size} ({format_bytes(asked)}), but {limits.where} has "
                f"{free} free of {total}: set it to less, or to 'auto'"
            )
        return Claim("gpurt.exchange.pool", asked)

    def use_automatic_size(self) -> None:
        """Ignore the setting. Pools that exist keep their size."""
        self._size = None

    def make_all(self) -> None:
        """Create all pools, so that an invalid setting raises early. Blocks."""
        for kind in self.devices:
            self.outbox(kind)

    def readings(self, run: RunKey) -> list[tuple[Outbox, Reading]]:
        """Return the owners that may still read shards of a run, each with the outbox of the shard."""
        outboxes = list(self._outboxes.values())
        return [(outbox, each) for outbox in outboxes for each in outbox.readings() if each.run == run]

    def unread(self, run: RunKey, me: str) -> int:
        """Return the number of shards of a run that workers other than ``me`` may still read."""
        return sum(each.owner != me for _, each in self.readings(run))

    def end(self, run: RunKey) -> None:
        """Free the retained blocks of a run that has ended."""
        for outbox in list(self._outboxes.values()):
            outbox.end(run)

    def drop_shares(self, run: RunKey, shares: Collection[int]) -> None:
        """Release all shards of a run on behalf of these shares, whose owners will not read them."""
        for outbox in list(self._outboxes.values()):
            outbox.drop_shares(run, shares)

    def wake(self) -> None:
        """Wake waiting producers, because a run or the exchange has ended."""
        for outbox in list(self._outboxes.values()):
            outbox.wake()

    def describe(self) -> dict[str, dict[str, int]]:
        """Return capacity and use of the existing pools in bytes, by kind of device."""
        return {
            kind: {"capacity": outbox.pool.capacity, "used": outbox.pool.used, "retained": outbox.retained}
            for kind, outbox in list(self._outboxes.items())
        }

    def describe_devices(self) -> dict[str, dict[str, Any]]:
        """Describe the devices, by kind. Blocks."""
        return {kind: device.describe() for kind, device in self.devices.items()}

    def drain_host(self) -> None:
        """Ask all owners of published blocks in host memory to copy them. Does not block."""
        if (outbox := self._outboxes.get("host")) is not None:
            self._hooks.ask_for_room(outbox.readers())

    def trim(self) -> None:
        """Free all blocks without readers, and return unused memory to the system. Blocks.

        Pools that do not shrink keep retained blocks until other blocks need their room.
        """
        for _, outbox in self._shrinking():
            outbox.reclaim_all()
            outbox.pool.trim()

    def trim_idle(self) -> None:
        """Trim pools that are empty, or had no allocation since the last call. Blocks.

        A pool in use would soon need the memory again, and first-touch page faults cost more than a copy.
        """
        for kind, outbox in self._shrinking():
            outbox.reclaim_idle()
            cuts = outbox.pool.cuts
            if not outbox.pool.used or self._cuts.get(kind) == cuts:
                outbox.pool.trim()
            self._cuts[kind] = cuts

    def _shrinking(self) -> list[tuple[str, Outbox]]:
        return [(kind, outbox) for kind, outbox in list(self._outboxes.items()) if outbox.pool.shrinks]

    def trim_host(self) -> int:
        """Trim all pools; return the bytes of host memory still in use by blocks. Blocks."""
        self.trim()
        return self.host_pages()

    def host_pages(self) -> int:
        """Return the bytes of memory behind the pool in host memory. From any thread."""
        outbox = self._outboxes.get("host")
        return 0 if outbox is None else outbox.pool.backed

    def drop_pages(self) -> None:
        """Drop pages of peers' pools from the resident set of this process. Blocks."""
        for device in self.devices.values():
            device.drop_pages()

    def close(self) -> None:
        """Close pools and devices. Blocks."""
        for outbox in self._outboxes.values():
            outbox.pool.close()
        for device in self.devices.values():
            device.close()


class PoolUsers:
    """Admit users of the pools until they are closed. Thread-safe.

    Closing frees the memory of a GPU's pool, which users may be reading or writing::

        Thread 1, a task: packs into a block      Thread 2: the runtime is switched off, and the pool is freed
        its next kernel writes into memory that
        is not allocated: CUDA fails all further
        calls of this process
    """

    def __init__(self, worker: str):
        self._worker = worker
        self._closed = False
        self._count = 0
        self._left = threading.Condition()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the pools during the body.

        Raises ExchangeClosed if they are being closed.
        """
        with self._left:
            if self._closed:
                raise ExchangeClosed(f"the exchange of {self._worker} is closed")
            self._count += 1
        try:
            yield
        finally:
            with self._left:
                self._count -= 1
                self._left.notify_all()

    def close(self) -> None:
        """Admit no further users."""
        with self._left:
            self._closed = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until there are no users; return False after this time. Blocks."""
        with self._left:
            return self._left.wait_for(lambda: not self._count, timeout_s)
