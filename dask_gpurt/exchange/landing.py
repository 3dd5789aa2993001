"""Where pulled shards wait: on the device, in host memory, on disk."""

from __future__ import annotations

import os
import shutil
from typing import Any

import zict

from dask_gpurt.device import Device
from dask_gpurt.device.protocol import Buffer
from dask_gpurt.observe import Metrics


class Landing:
    """Pulled shards by key. Thread-safe; no method is called on the event loop.

    What the device has no room for lands in host memory; what exceeds ``limit`` there goes
    to disk, least recently used first.

    Parameters
    ----------
    limit
        Bytes of host memory.
    directory
        Where files go.
    """

    def __init__(self, limit: int, directory: str, metrics: Metrics):
        self._device: dict[str, Buffer] = {}
        self._limit = limit
        self._directory = directory
        self._metrics = metrics
        os.makedirs(directory, exist_ok=True)
        self._host: Any = zict.Buffer(
            {},
            zict.File(directory),
            n=limit,
            weight=lambda _key, value: len(value),
            fast_to_slow_callbacks=lambda _key, value: metrics.add("exchange.disk.bytes", len(value)),
        )

    def put(self, key: str, source: Buffer, device: Device) -> None:
        """Copy a mapped shard here."""
        if device.on_host:
            self.put_host(key, device.to_host(device.land(source)))
            return
        try:
            self._device[key] = device.land(source)
        except MemoryError:
            self._metrics.fallback("shards land in host memory", "the device has no room for them")
            self.put_host(key, device.to_host(source))

    def put_host(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Keep bytes that already lie in host memory of this process."""
        try:
            self._host[key] = data
        except OSError as error:
            raise OSError(
                error.errno,
                f"pulled shards take more than gpurt.exchange.landing ({self._limit} bytes of memory) and "
                f"{self._directory} can not take the rest: {error.strerror}",
            ) from error
        self._metrics.peak("exchange.landing.peak", self._host.fast.total_weight)

    def put_device(self, key: str, data: Buffer) -> None:
        """Keep a buffer that already lies on the device."""
        self._device[key] = data

    def get(self, key: str, device: Device) -> Buffer:
        """What the table backend reads."""
        if key in self._device:
            return self._device[key]
        return device.from_host(self._host[key])

    def discard(self, key: str) -> None:
        self._device.pop(key, None)
        self._host.pop(key, None)

    def close(self) -> None:
        self._device.clear()
        self._host.clear()
        shutil.rmtree(self._directory, ignore_errors=True)
