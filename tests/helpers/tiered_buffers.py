"""Build tiered buffers with small tiers, and values to put into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dask_gpurt.device.host import HostDevice
from dask_gpurt.memory.disk import DiskTier
from dask_gpurt.memory.host import BlockPool, HostTier, PinnedTier
from dask_gpurt.memory.ledger import Ledger, Limits, Tier
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.observe import Metrics

KIB = 1024


def new_tiered_buffer(
    directory: str,
    limits: Limits,
    needed: dict[Any, tuple[int, ...]] | None = None,
    *,
    device: HostDevice | None = None,
    beside: Callable[[], int] = int,
) -> TieredBuffer:
    capacity = {Tier.DEVICE: limits.device, Tier.PINNED: limits.pinned, Tier.HOST: limits.host}
    return TieredBuffer(
        limits,
        {
            Tier.PINNED: PinnedTier(BlockPool(limits.pinned, block=4 * KIB)),
            Tier.HOST: HostTier(limits.host),
            Tier.DISK: DiskTier(directory, limits.disk),
        },
        home=lambda value: Tier.DEVICE,
        device=device or HostDevice(1 << 30),
        ledger=Ledger({**capacity, Tier.DISK: limits.disk or 1 << 40}),
        metrics=Metrics(),
        priority_of=(needed or {}).get,
        changed=lambda: None,
        beside=beside,
    )


def array(fill: int, kib: int = 10) -> np.ndarray:
    return np.full(kib * KIB, fill % 251, np.uint8)


def put(tiered_buffer: TieredBuffer, key: str, value: Any) -> None:
    """Insert a value as the worker does: make room first."""
    tiered_buffer.reservations.reserve(key, value.nbytes, Tier.DEVICE)
    tiered_buffer[key] = value
