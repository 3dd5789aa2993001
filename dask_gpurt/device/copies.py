"""What to copy, as few copies as that takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_gpurt.device.arena import ALIGNMENT


class Copy(NamedTuple):
    """So many bytes, from one address to another."""

    to: int
    at: int
    nbytes: int


def address(source: Any) -> int:
    """Where a buffer begins, on the device or in host memory."""
    if isinstance(source, np.ndarray):
        return int(source.ctypes.data)
    return int(source.__cuda_array_interface__["data"][0])


def runs(sources: Sequence[Any], into: Sequence[list[np.ndarray]]) -> list[Copy]:
    """Copies of buffers into pieces of host memory.

    What lies side by side on both sides is one copy, with the padding between: each call of CUDA lets
    other threads have Python's lock, and has to wait for it then.

    Parameters
    ----------
    sources
        Buffers. Between two of them that are less than 256 bytes apart there is nobody else's.
    into
        The pieces of each. The same is true of those that are views of one array.
    """
    found: list[Copy] = []
    memory: Any = None
    for source, pieces in zip(sources, into, strict=True):
        at = address(source)
        for piece in pieces:
            copy = Copy(int(piece.ctypes.data), at, piece.nbytes)
            if memory is not None and piece.base is memory and _adjoin(found[-1], copy):
                first = found.pop()
                copy = Copy(first.to, first.at, copy.at + copy.nbytes - first.at)
            found.append(copy)
            memory, at = piece.base, at + piece.nbytes
    return found


def _adjoin(one: Copy, other: Copy) -> bool:
    gap = other.to - one.to - one.nbytes
    return 0 <= gap < ALIGNMENT and other.at - one.at - one.nbytes == gap
