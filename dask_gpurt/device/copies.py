"""Plan copies, merged where possible. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dask_gpurt.device.pool import ALIGNMENT

#: Blocks that copy together: several on each SM of an H200, which has 132.
SHARED_BLOCKS = 2048
#: Maximum number of blocks of a launch, most of which may have nothing to copy.
MAX_BLOCKS = 65536
#: Bytes that make a thread worth its launch: four words of 16 bytes.
BYTES_PER_THREAD = 64


class Copy(NamedTuple):
    """Copy this many bytes from one address to another."""

    to: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class DeviceSpan:
    """Refer to ``size`` bytes of device memory at ``ptr``, and keep ``owner`` alive."""

    ptr: int
    size: int
    owner: Any

    @property
    def nbytes(self) -> int:
        return self.size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "version": 3,
            "strides": None,
        }


def address(source: Any) -> int:
    """Return the address of a buffer, on the device or in host memory."""
    if isinstance(source, np.ndarray):
        return int(source.ctypes.data)
    return int(source.__cuda_array_interface__["data"][0])


def runs(sources: Sequence[Any], into: Sequence[list[Any]]) -> list[Copy]:
    """Plan copies of buffers into pieces of host memory, or of a device's.

    Buffers that are adjacent on both sides are merged into one copy, including the padding between them,
    because each CUDA call releases the GIL and has to reacquire it. Only buffers of the same allocation are
    merged: separate allocations may be adjacent too, but no copy may cross from one to the other.

    ``sources``: buffers. Those with the same ``owner`` are parts of one allocation.
    ``into``: the pieces for each buffer. Views of one array, or with the same ``owner``, are parts of one
    allocation. Gaps of less than 256 bytes between parts must be padding, since they are overwritten.
    """
    found: list[Copy] = []
    before: tuple[Any, Any] = None, None
    for source, pieces in zip(sources, into, strict=True):
        at = address(source)
        for piece in pieces:
            copy = Copy(address(piece), at, piece.nbytes)
            of = _allocation(source), _allocation(piece)
            if all(mine is not None and mine is theirs for mine, theirs in zip(of, before, strict=True)) and (
                _adjoin(found[-1], copy)
            ):
                first = found.pop()
                copy = Copy(first.to, first.at, copy.at + copy.nbytes - first.at)
            found.append(copy)
            before, at = of, at + piece.nbytes
    return found


def fillings(buffers: Sequence[Any], scattered: Sequence[list[np.ndarray]]) -> list[Copy]:
    """Plan copies of pieces of host memory into buffers.

    ``scattered``: the pieces for each buffer, in order.
    """
    found: list[Copy] = []
    for buffer, pieces in zip(buffers, scattered, strict=True):
        into = buffer.ptr
        for piece in pieces:
            found.append(Copy(into, int(piece.ctypes.data), piece.nbytes))
            into += piece.nbytes
    return found


def grid_of(copies: Sequence[Copy], threads: int) -> tuple[int, int]:
    """Return the number of blocks of this many threads for each copy, and the number of copies.

    All copies get as many blocks as the largest one can use, which is its share of ``SHARED_BLOCKS``: blocks
    that find nothing to copy end at once, but a copy much larger than the others needs most of the GPU.
    """
    total = sum(copy.nbytes for copy in copies)
    share = max(-(-total // SHARED_BLOCKS), threads * BYTES_PER_THREAD)
    largest = max(copy.nbytes for copy in copies)
    return max(1, min(-(-largest // share), MAX_BLOCKS // len(copies))), len(copies)


def _allocation(source: Any) -> Any:
    """Return the allocation that a buffer is part of; None if unknown."""
    return source.base if isinstance(source, np.ndarray) else getattr(source, "owner", None)


def _adjoin(one: Copy, other: Copy) -> bool:
    gap = other.to - one.to - one.nbytes
    return 0 <= gap < ALIGNMENT and other.at - one.at - one.nbytes == gap
