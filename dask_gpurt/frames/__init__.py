"""Split, pack, unpack and concatenate partitions, on pandas and on cudf."""

from dask_gpurt.frames.backend import (
    BlockAllocator,
    Hashed,
    Packed,
    Part,
    Piece,
    Ranged,
    Routed,
    Table,
    halves,
)
from dask_gpurt.frames.registry import backend_for, library

__all__ = [
    "BlockAllocator",
    "Hashed",
    "Packed",
    "Part",
    "Piece",
    "Ranged",
    "Routed",
    "Table",
    "backend_for",
    "halves",
    "library",
]
