"""Abstract over the devices of a worker, host and GPU: memory pools that peers map, and copies."""

from dask_gpurt.device.base import (
    Allocator,
    Beside,
    Device,
    DirectComms,
    Files,
    Pinning,
    Streams,
)
from dask_gpurt.device.pool import Block, Mapping, MappingError, NoMemoryForPool, Pool, PoolFull

__all__ = [
    "Allocator",
    "Beside",
    "Block",
    "Device",
    "DirectComms",
    "Files",
    "Mapping",
    "MappingError",
    "NoMemoryForPool",
    "Pinning",
    "Pool",
    "PoolFull",
    "Streams",
]
