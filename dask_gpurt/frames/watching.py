"""A table whose packing and reading is looked at, for :mod:`dask_gpurt.device.handovers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dask_gpurt.device.base import Fence
from dask_gpurt.device.handovers import COMPUTE, Handovers, until
from dask_gpurt.frames.backend import Packed, Part, Piece, Room, Table


def watch(table: Table, handovers: Handovers) -> Table:
    """Look at the blocks that a table packs into until it settles, and reads until its fence is passed."""
    pack, settle, assemble, fence = table.pack, table.settle, table.assemble, table.fence
    stream = None if table.device.on_host else COMPUTE
    packing: list[Fence] = []
    reading: list[Fence] = []

    def watched_pack(piece: Piece, room: Room) -> Packed:
        packed = pack(piece, room)
        packing.append(handovers.begins("packing", writes=[packed.block.buffer]))
        return packed

    def watched_settle() -> None:
        settle()
        _end(packing)

    def watched_assemble(parts: Sequence[Part], meta: Any, **options: Any) -> Any:
        buffers = {id(part.buffer): part.buffer for part in parts}
        over = handovers.begins("putting an output together", reads=buffers.values(), stream=stream)
        try:
            frame = assemble(parts, meta, **options)
        except BaseException:
            over()
            raise
        reading.append(over)
        return frame

    def watched_fence() -> Callable[[], None] | None:
        read, found = list(reading), fence()
        reading.clear()
        if found is None:
            _end(read)
            return None
        return until(partial(_end, read), lambda: found)

    for method in (watched_pack, watched_settle, watched_assemble, watched_fence):
        setattr(table, method.__name__.removeprefix("watched_"), method)
    return table


def _end(begun: list[Fence]) -> None:
    for over in begun:
        over()
    begun.clear()
