"""Split, pack and assemble dataframe partitions (pandas, cudf) and array chunks (numpy, cupy)."""

from dask_gpurt.frames.backend import (
    BlockAllocator,
    Hashed,
    Packed,
    Packer,
    Part,
    Piece,
    Ranged,
    Routed,
    Table,
    halves,
)
from dask_gpurt.frames.chunks import ChunkTable
from dask_gpurt.frames.registry import array_library, backend_for, chunk_table, column_names, library

__all__ = [
    "BlockAllocator",
    "ChunkTable",
    "Hashed",
    "Packed",
    "Packer",
    "Part",
    "Piece",
    "Ranged",
    "Routed",
    "Table",
    "array_library",
    "backend_for",
    "chunk_table",
    "column_names",
    "halves",
    "library",
]
