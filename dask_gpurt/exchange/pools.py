"""The devices of one worker, and the pool of each: how large, made when, given back when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dask.utils import format_bytes

from dask_gpurt.config import ConfigError, Size
from dask_gpurt.device import Device
from dask_gpurt.device.discover import discover
from dask_gpurt.device.handovers import Handovers
from dask_gpurt.exchange.outbox import Outbox
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.observe import Metrics

#: No pool takes more than this of the free memory by itself, since others take from it too.
AUTO_POOL_OF_FREE = 0.4
#: Below this a pool is not worth having: what is wrong then shows as it is made.
SMALLEST_POOL = 2**16


class NoSuchDevice(RuntimeError):
    """A worker was given partitions that live on a device it does not have."""


class Pools:
    """Devices by kind, and what this worker has published in the pool of each. Thread-safe.

    Parameters
    ----------
    size
        The setting ``gpurt.exchange.pool``; None leaves it to us.
    memory_limit
        Bytes of host memory that the worker may use.
    handovers
        Told of memory that changes hands, where that is looked at.
    """

    #: Called from waiting producers with the owners whose shards fill a pool; must not block.
    ask_for_room: Callable[[set[str]], None]

    def __init__(
        self, size: Size | None, memory_limit: int, metrics: Metrics, handovers: Handovers | None = None
    ):
        self.devices: dict[str, Device] = discover(memory_limit)
        if handovers is not None:
            for device in self.devices.values():
                handovers.watch(device)
        #: The kind of device that this worker is for.
        self.main = next((kind for kind, device in self.devices.items() if not device.on_host), "host")
        self._size = size
        self._memory_limit = memory_limit
        self._metrics = metrics
        self._handovers = handovers
        self._outboxes: dict[str, Outbox] = {}
        self._lock = threading.Lock()

    def device(self, kind: str) -> Device:
        """The device of a kind; raises NoSuchDevice."""
        try:
            return self.devices[kind]
        except KeyError:
            raise NoSuchDevice(
                f"this worker has no {kind} device, but was given partitions that live on one"
            ) from None

    def outbox(self, kind: str) -> Outbox:
        """The published blocks of a device; its pool is made on first use. Blocks."""
        with self._lock:
            if kind not in self._outboxes:
                device = self.device(kind)
                pool = device.create_pool(self._size_for(device))
                self._outboxes[kind] = Outbox(pool, self.ask_for_room, self._metrics, self._handovers)
            return self._outboxes[kind]

    def known(self, kind: str) -> Outbox:
        """The outbox of a pool that has been made, without waiting for anything."""
        return self._outboxes[kind]

    def _size_for(self, device: Device) -> int:
        """Bytes of the pool of a device; ConfigError when the setting asks for more than there is."""
        free, total = device.memory()
        share_of = self._memory_limit if device.on_host else total
        # On a worker with a GPU the setting is about the GPU.
        if self._size is None or device.kind != self.main:
            return int(max(min(device.pool_share * share_of, AUTO_POOL_OF_FREE * free), SMALLEST_POOL))
        asked = self._size.of(share_of)
        if asked > free:
            where = "/dev/shm" if device.on_host else "the device"
            raise ConfigError(
                f"'gpurt.exchange.pool' is {self._size} ({format_bytes(asked)}), but {where} has "
                f"{format_bytes(free)} free of {format_bytes(total)}: set it to less, or to 'auto'"
            )
        return asked

    def make_all(self) -> None:
        """Make every pool, so that a setting that makes no sense is refused at once. Blocks."""
        for kind in self.devices:
            self.outbox(kind)

    def owners(self, run: RunKey) -> list[tuple[Outbox, str]]:
        """Who may still read blocks of a run, and which outbox they are in."""
        return [(outbox, owner) for outbox in list(self._outboxes.values()) for owner in outbox.owners(run)]

    def wake(self) -> None:
        """Let waiting producers see that something has ended."""
        for outbox in list(self._outboxes.values()):
            outbox.wake()

    def describe(self) -> dict[str, dict[str, int]]:
        """Capacity and use of the pools made so far, by kind of device."""
        return {
            kind: {"capacity": outbox.pool.capacity, "used": outbox.pool.used}
            for kind, outbox in list(self._outboxes.items())
        }

    def describe_devices(self) -> dict[str, dict[str, Any]]:
        """What the devices are, by kind. Blocks."""
        return {kind: device.describe() for kind, device in self.devices.items()}

    def trim(self) -> None:
        """Give the memory of empty pools back to the system. Blocks."""
        for outbox in list(self._outboxes.values()):
            if not outbox.pool.used:
                outbox.pool.trim()

    def close(self) -> None:
        """Release pools and devices. Blocks."""
        for outbox in self._outboxes.values():
            outbox.pool.close()
        for device in self.devices.values():
            device.close()
