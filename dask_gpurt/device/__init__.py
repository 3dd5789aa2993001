"""Give a worker devices to compute on: memory that is shared with peers, and copies out of it."""

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
