"""What a partition is: split, pack, unpack, concatenate."""

from dask_gpurt.table.protocol import Packed, Piece, Table, backend_for

__all__ = ["Packed", "Piece", "Table", "backend_for"]
