"""Define the memory tiers of a worker, from fast to slow, and resolve their limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dask.utils import format_bytes

from dask_gpurt.config import ConfigError, MemorySettings, Size

#: Default share of the device memory that the exchange pool leaves, the same as that of dask-cuda's
#: --device-memory-limit. The rest is for CUDA, for kernels, which are loaded as they are first used, and for
#: holes between the objects of an RMM pool. A launch fails if there is no memory left for its kernel.
DEVICE_SHARE = 0.8
#: Default share and most bytes of pinned memory, which all processes of the host lose. A few GiB suffice to
#: keep the bus busy.
PINNED_SHARE, PINNED_MOST = 0.1, 8 * 2**30
#: The share of an integrated GPU's memory, which is also the host's, reserved for live host objects, by which
#: the device tier is smaller.
INTEGRATED_HOST_SHARE = 0.1

#: Bytes by which a live tier may exceed its limit before objects are spilled: one block of the pinned tier,
#: but at most this share of the tier.
SPILL_SLACK_BYTES, SLACK_SHARE = 2**20, 1 / 64


class Tier(StrEnum):
    """Enumerate the memory tiers, from fast to slow."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"
    DISK = "disk"


class NoRoom(Exception):
    """A tier cannot take an object.

    Parameters
    ----------
    tier, nbytes
        The tier, and the bytes that were to be stored.
    reason
        The reason, if it is not just that the tier is full.
    """

    def __init__(self, tier: Tier, nbytes: int, reason: str = ""):
        super().__init__(tier, nbytes, reason)  # all arguments, so that it can be pickled
        self.tier = tier
        self.nbytes = nbytes
        self.reason = reason

    def __str__(self) -> str:
        return f"no room for {self.nbytes} bytes in the {self.tier} tier" + (
            self.reason and f": {self.reason}"
        )


@dataclass(frozen=True)
class Limits:
    """Limit the bytes of each tier; None for a disk tier limited only by the file system."""

    device: int
    pinned: int
    host: int
    disk: int | None

    def live(self, tier: Tier) -> int:
        """Return the limit of a live tier."""
        return self.device if tier is Tier.DEVICE else self.host


def limits(
    settings: MemorySettings,
    *,
    memory_limit: int,
    device_memory: int | None,
    given_device: int | None,
    target: float | bool,
    disk_free: int,
    pool: int = 0,
    integrated: bool = False,
) -> Limits:
    """Resolve the limits from the settings of this package, of Dask and of dask-cuda.

    Parameters
    ----------
    memory_limit
        The worker's limit of host memory in bytes.
    device_memory
        Bytes of GPU memory; None if the worker computes in host memory, which is then its device tier.
    given_device
        The limit set through dask-cuda, if any.
    target
        ``distributed.worker.memory.target``.
    disk_free
        Free bytes in the file system of the spill directory.
    pool
        Bytes of GPU memory that the exchange pool takes.
    integrated
        Whether the GPU shares the host's memory. Then all tiers but the disk share it, and there is no tier
        for copies of GPU data in host memory.

    Raises
    ------
    ConfigError
        If a tier is larger than the memory it is part of.
    """
    on_host = device_memory is None
    whole = memory_limit if device_memory is None else device_memory
    kept = int(memory_limit * (target or 1))
    spared = int(INTEGRATED_HOST_SHARE * whole) if integrated else 0
    device = _of(settings.device, whole)
    if device is None:
        # dask-cuda's default is a share of the whole GPU.
        most = int(DEVICE_SHARE * (whole - pool)) - spared
        device = kept if on_host else min(given_device or most, most)
    pinned = _of(settings.pinned, memory_limit)
    if pinned is None:
        pinned = 0 if on_host or integrated else int(min(PINNED_SHARE * memory_limit, PINNED_MOST))
    host = _of(settings.host, memory_limit)
    if host is None:
        host = 0 if on_host else max(0, kept - pinned)
        if integrated:
            host = min(host, spared, max(0, whole - device - pinned))
    disk = _of(settings.disk, disk_free)
    _refuse("device", device, whole, "this worker's memory limit" if on_host else "the device")
    _refuse("pinned", pinned, memory_limit, "this worker's memory limit")
    together = pinned + host + (device if on_host else 0)
    _refuse("host", together, memory_limit, "the memory limit, for all tiers in host memory together")
    if integrated:
        _refuse("host", device + pinned + host, whole, "all tiers in the one memory of the host and its GPU")
    if disk is not None:
        _refuse("disk", disk, disk_free, "free space where the worker's files go")
    return Limits(device, pinned, host, disk)


def _of(size: Size | int | None, total: int) -> int | None:
    return size.of(total) if isinstance(size, Size) else size


def _refuse(name: str, asked: int, most: int, what: str) -> None:
    if asked > most:
        raise ConfigError(
            f"'gpurt.memory.{name}' comes to {format_bytes(asked)}, which is more than {format_bytes(most)} "
            f"({what}): set it to less, or to 'auto'"
        )
