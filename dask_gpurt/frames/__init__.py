"""What a partition is: split, pack, unpack, concatenate."""

from dask_gpurt.frames.backend import (
    Hashed,
    Packed,
    Part,
    Piece,
    Ranged,
    Room,
    Routed,
    Table,
)
from dask_gpurt.frames.registry import backend_for, library

__all__ = [
    "Hashed",
    "Packed",
    "Part",
    "Piece",
    "Ranged",
    "Room",
    "Routed",
    "Table",
    "backend_for",
    "library",
]
