"""What a partition is: split, pack, unpack, concatenate."""

from dask_gpurt.table.protocol import Packed, Piece, Room, Table, backend_for

__all__ = ["Packed", "Piece", "Room", "Table", "backend_for"]
