"""Abstract over the devices of a worker, host and GPU: memory pools that peers map, and copies."""

from dask_gpurt.device.base import Device, PriorityError, SmContexts, SmsError
from dask_gpurt.device.pool import Block, Mapping, MappingError, NoMemoryForPool, Pool, PoolFull

__all__ = [
    "Block",
    "Device",
    "Mapping",
    "MappingError",
    "NoMemoryForPool",
    "Pool",
    "PoolFull",
    "PriorityError",
    "SmContexts",
    "SmsError",
]
