"""Make the pools of one worker's devices, size them, and give their memory back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from dask.utils import format_bytes

from dask_gpurt.config import ConfigError, Size
from dask_gpurt.device import Device, Pool
from dask_gpurt.device.discover import discover, main_kind
from dask_gpurt.exchange.outgoing import Outbox
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.observe import Metrics

#: Below this a pool is not worth having: what is wrong then shows as it is made.
SMALLEST_POOL = 2**16


class NoSuchDevice(RuntimeError):
    """A worker was given partitions that live on a device it does not have."""


class Pools:
    """Keep the devices by kind, and the blocks that were published in the pool of each. Thread-safe.

    Parameters
    ----------
    size
        The setting ``gpurt.exchange.pool``; None leaves it to us.
    memory_limit
        Bytes of host memory that the worker may use.
    """

    #: Called from waiting producers with the owners whose shards fill a pool; must not block.
    ask_for_room: Callable[[set[str]], None]
    #: Called from producers that wait since the host has no memory for a block, of that size; must not block.
    ask_host: Callable[[int], None]
    #: Whether blocks of a run may be read once more; from any thread.
    retains: Callable[[RunKey], bool]
    #: Whether what is retained of a run makes room for what is published now; from any thread.
    yields: Callable[[RunKey], bool]

    def __init__(self, size: Size | None, memory_limit: int, metrics: Metrics):
        self.devices: dict[str, Device] = discover(memory_limit)
        #: The kind of device that this worker is for.
        self.main = main_kind(self.devices)
        self._size = size
        self._metrics = metrics
        self._outboxes: dict[str, Outbox] = {}
        #: Blocks cut so far as of the last look, by kind.
        self._cuts: dict[str, int] = {}
        self._lock = threading.Lock()

    def device(self, kind: str) -> Device:
        """Return the device of a kind; raises NoSuchDevice."""
        try:
            return self.devices[kind]
        except KeyError:
            raise NoSuchDevice(
                f"this worker has no {kind} device, but was given partitions that live on one"
            ) from None

    def outbox(self, kind: str) -> Outbox:
        """Return the published blocks of a device; its pool is made on first use. Blocks."""
        with self._lock:
            if kind not in self._outboxes:
                device = self.device(kind)
                pool = device.create_pool(self._size_for(device))
                ask = partial(self._ask, pool)
                outbox = self._outboxes[kind] = Outbox(pool, ask, self._metrics)
                outbox.retains = lambda run: self.retains(run)
                outbox.yields = lambda run: self.yields(run)
            return self._outboxes[kind]

    def _ask(self, pool: Pool, owners: set[str]) -> None:
        if short := pool.short:
            self.ask_host(short)
        self.ask_for_room(owners)

    def known(self, kind: str) -> Outbox:
        """Return the outbox of a pool that has been made, without waiting for anything."""
        return self._outboxes[kind]

    def _size_for(self, device: Device) -> int:
        """Return the size of a device's pool; ConfigError when the setting asks for more than there is."""
        limits = device.pool_limits()
        # On a worker with a GPU the setting is about the GPU.
        if self._size is None or device.kind != self.main:
            return int(max(limits.automatic, SMALLEST_POOL))
        asked = self._size.of(limits.whole)
        if asked > limits.most:
            free, total = format_bytes(limits.free), format_bytes(limits.total)
            raise ConfigError(
                f"'gpurt.exchange.pool' is {self._size} ({format_bytes(asked)}), but {limits.where} has "
                f"{free} free of {total}: set it to less, or to 'auto'"
            )
        return asked

    def make_all(self) -> None:
        """Make every pool, so that a setting that makes no sense is refused at once. Blocks."""
        for kind in self.devices:
            self.outbox(kind)

    def owners(self, run: RunKey) -> list[tuple[Outbox, str]]:
        """Return the owners that may still read blocks of a run, each with the outbox of these."""
        return [(outbox, owner) for outbox in list(self._outboxes.values()) for owner in outbox.owners(run)]

    def end(self, run: RunKey) -> None:
        """Free what was retained of a run."""
        for outbox in list(self._outboxes.values()):
            outbox.end(run)

    def shares(self, run: RunKey) -> dict[int, str]:
        """Return the shares of a run whose blocks may still be read, each with its owner."""
        found: dict[int, str] = {}
        for outbox in list(self._outboxes.values()):
            found |= outbox.shares(run)
        return found

    def drop_shares(self, run: RunKey, shares: Collection[int]) -> None:
        """Note that the owners of these shares of a run have left."""
        for outbox in list(self._outboxes.values()):
            outbox.drop_shares(run, shares)

    def wake(self) -> None:
        """Let waiting producers see that something has ended."""
        for outbox in list(self._outboxes.values()):
            outbox.wake()

    def describe(self) -> dict[str, dict[str, int]]:
        """Return capacity and use of the pools made so far, by kind of device."""
        return {
            kind: {
                "capacity": outbox.pool.capacity,
                "used": outbox.pool.used,
                "retained": outbox.retained,
            }
            for kind, outbox in list(self._outboxes.items())
        }

    def describe_devices(self) -> dict[str, dict[str, Any]]:
        """Describe the devices, by kind. Blocks."""
        return {kind: device.describe() for kind, device in self.devices.items()}

    def drain_host(self) -> None:
        """Ask all owners that may read blocks in host memory to copy them. Does not block."""
        if (outbox := self._outboxes.get("host")) is not None:
            self.ask_for_room(outbox.readers())

    def trim(self) -> None:
        """Give memory that no reader needs back to the system. Blocks."""
        for outbox in list(self._outboxes.values()):
            outbox.reclaim_all()
            outbox.pool.trim()

    def trim_idle(self) -> None:
        """Trim, as :meth:`trim` does, pools that are empty, or had no block cut since the last call. Blocks.

        A pool in use would soon take again what it has given back, which is slower than to copy.
        """
        for kind, outbox in list(self._outboxes.items()):
            outbox.reclaim_idle()
            cuts = outbox.pool.cuts
            if not outbox.pool.used or self._cuts.get(kind) == cuts:
                outbox.pool.trim()
            self._cuts[kind] = cuts

    def trim_host(self) -> int:
        """Trim as :meth:`trim` does; returns the bytes of host memory that blocks still use. Blocks."""
        self.trim()
        outbox = self._outboxes.get("host")
        return 0 if outbox is None else outbox.pool.backed

    def drop_pages(self) -> None:
        """Stop counting pages of the pools of peers as memory of this process. Blocks."""
        for device in self.devices.values():
            device.drop_pages()

    def close(self) -> None:
        """Release pools and devices. Blocks."""
        for outbox in self._outboxes.values():
            outbox.pool.close()
        for device in self.devices.values():
            device.close()
