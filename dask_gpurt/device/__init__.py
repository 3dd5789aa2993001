"""Abstract over the devices of a worker, host and GPU: memory pools that peers map, and copies."""

from dask_gpurt.device.base import (
    Block,
    Device,
    Mapping,
    MappingError,
    Pool,
    PoolFull,
    PriorityError,
    SmContexts,
    SmsError,
)

__all__ = [
    "Block",
    "Device",
    "Mapping",
    "MappingError",
    "Pool",
    "PoolFull",
    "PriorityError",
    "SmContexts",
    "SmsError",
]
