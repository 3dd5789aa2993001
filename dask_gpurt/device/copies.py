"""Plan copies, as few as it takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_gpurt.device.arena import ALIGNMENT


class Copy(NamedTuple):
    """Copy this many bytes from one address to another."""

    to: int
    at: int
    nbytes: int


def address(source: Any) -> int:
    """Return where a buffer begins, on the device or in host memory."""
    if isinstance(source, np.ndarray):
        return int(source.ctypes.data)
    return int(source.__cuda_array_interface__["data"][0])


def runs(sources: Sequence[Any], into: Sequence[list[np.ndarray]]) -> list[Copy]:
    """Return copies of buffers into pieces of host memory.

    Buffers that adjoin in one allocation on both sides make one copy, with the padding between them: each
    call of CUDA releases Python's lock, and has to wait for it afterwards. Two allocations may adjoin too,
    but no copy may cross from one to the other.

    Parameters
    ----------
    sources
        Buffers. Those with the same ``owner`` are parts of one allocation.
    into
        The pieces of each. Views of one array are parts of one allocation. Between parts that are less than
        256 bytes apart belongs to nothing else.
    """
    found: list[Copy] = []
    before: tuple[Any, Any] = None, None
    for source, pieces in zip(sources, into, strict=True):
        at = address(source)
        for piece in pieces:
            copy, of = Copy(int(piece.ctypes.data), at, piece.nbytes), (_allocation(source), piece.base)
            if all(mine is not None and mine is theirs for mine, theirs in zip(of, before, strict=True)) and (
                _adjoin(found[-1], copy)
            ):
                first = found.pop()
                copy = Copy(first.to, first.at, copy.at + copy.nbytes - first.at)
            found.append(copy)
            before, at = of, at + piece.nbytes
    return found


def fillings(buffers: Sequence[Any], scattered: Sequence[list[np.ndarray]]) -> list[Copy]:
    """Return copies of pieces of host memory into one buffer after the other.

    Parameters
    ----------
    buffers
        With a ``ptr``.
    scattered
        The pieces of each, which fill it in order.
    """
    found: list[Copy] = []
    for buffer, pieces in zip(buffers, scattered, strict=True):
        into = buffer.ptr
        for piece in pieces:
            found.append(Copy(into, int(piece.ctypes.data), piece.nbytes))
            into += piece.nbytes
    return found


def _allocation(source: Any) -> Any:
    """Return the allocation that a buffer is a part of, as far as it says."""
    return source.base if isinstance(source, np.ndarray) else getattr(source, "owner", None)


def _adjoin(one: Copy, other: Copy) -> bool:
    gap = other.to - one.to - one.nbytes
    return 0 <= gap < ALIGNMENT and other.at - one.at - one.nbytes == gap
