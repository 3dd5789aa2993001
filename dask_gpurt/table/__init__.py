"""What a partition is: split, pack, unpack, concatenate."""

from dask_gpurt.table.protocol import Packed, Part, Piece, Room, Table, backend_for

__all__ = ["Packed", "Part", "Piece", "Room", "Table", "backend_for"]
