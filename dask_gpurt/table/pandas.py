"""pandas partitions, packed by pickle protocol 5.

The protocol hands over the memory of every array without a copy, whatever its dtype, and
reads it back as views of the packed buffer.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from dask.dataframe.core import _concat

from dask_gpurt.device import Device
from dask_gpurt.device.arena import ALIGNMENT
from dask_gpurt.table.protocol import Hashed, Packed, Part, Piece, Room

#: Smaller arrays (labels, above all) travel inside the header.
_INLINE = 4096


class PandasTable:
    """pandas frames in host memory."""

    name = "pandas"

    def __init__(self, device: Device):
        self.device = device

    def split(
        self,
        frame: pd.DataFrame | Hashed,
        column: str,
        groups: Sequence[Sequence[int]],
        npartitions: int,
        *,
        drop_column: bool,
        ignore_index: bool,
    ) -> list[Piece | None]:
        rows: pd.DataFrame = frame.assign() if isinstance(frame, Hashed) else frame
        targets = np.asarray(rows[column])
        # Counting-sort speed: numpy sorts 16 bit integers by radix, and keeps their order.
        narrow = np.uint16 if npartitions <= 1 << 16 else np.int64
        order = np.argsort(targets.astype(narrow, copy=False), kind="stable")
        ends = np.cumsum(np.bincount(targets.astype(np.intp, copy=False), minlength=npartitions))
        if drop_column:
            rows = rows.drop(columns=column)
        pieces: list[Piece | None] = []
        for partitions in groups:
            spans = [(ends[p - 1] if p else 0, ends[p]) for p in partitions]
            offsets = (0, *np.cumsum([stop - start for start, stop in spans]).tolist())
            if not offsets[-1]:
                pieces.append(None)
                continue
            taken = rows.take(_joined(order, spans))
            if ignore_index:
                taken.index = pd.RangeIndex(len(taken))
            pieces.append(Piece(taken, tuple(partitions), offsets))
        return pieces

    def cut(self, rows: pd.DataFrame, start: int, stop: int) -> pd.DataFrame:
        return rows.iloc[start:stop].copy()

    def pack(self, piece: Piece, room: Room) -> Packed:
        arrays: list[np.ndarray] = []

        def out_of_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _INLINE:
                return True
            arrays.append(np.frombuffer(raw, np.uint8))
            return False

        body = pickle.dumps(piece.rows, protocol=5, buffer_callback=out_of_band)
        spans, end = [], 0
        for array in arrays:
            spans.append((end, end + array.nbytes))
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        block = room.allocate(end)
        for array, (start, stop) in zip(arrays, spans, strict=True):
            np.copyto(block.buffer[start:stop], array)
        return Packed(block, pickle.dumps((body, spans)))

    def settle(self) -> None:
        pass

    def assemble(self, parts: Sequence[Part], meta: pd.DataFrame, *, ignore_index: bool) -> pd.DataFrame:
        if not parts:
            return meta.copy()
        frames, leases = [], []
        for part in parts:
            lease = part.buffer.view(_Lease)
            leases.append(weakref.ref(lease))
            body, spans = pickle.loads(part.header)
            rows = pickle.loads(body, buffers=[lease[a:b] for a, b in spans])
            frames.append(rows.iloc[part.offsets[part.index] : part.offsets[part.index + 1]])
            del lease, rows
        result: pd.DataFrame = frames[0].copy() if len(frames) == 1 else _concat(frames, ignore_index)
        del frames
        if ignore_index:
            result.index = pd.RangeIndex(len(result))
        # Categories, labels or Arrow chunks may still be views; those are copied now.
        return _own(result) if any(lease() is not None for lease in leases) else result

    def fence(self) -> None:
        return None


class _Lease(np.ndarray):
    """A view that everything read out of a packed buffer keeps alive."""


def _joined(order: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """The spans of ``order`` one behind the other, without a copy where they are neighbours."""
    if all(left[1] == right[0] for left, right in pairwise(spans)):
        return order[spans[0][0] : spans[-1][1]]
    return np.concatenate([order[start:stop] for start, stop in spans])


def _own(frame: Any) -> Any:
    """``frame`` with its own copy of every array that is a view of a packed buffer."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(frame, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(body, buffers=[bytearray(buffer.raw()) for buffer in buffers])
