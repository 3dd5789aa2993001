"""The file of one object: its buffers one behind the other, each with a checksum.

Direct I/O wants addresses, offsets and lengths that are multiples of a page, so bytes are
written through an aligned buffer, and read into aligned memory. What says where a buffer
lies stays in memory: a file is read by the process that wrote it, or by nobody.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dask_gpurt.memory.frames import Scattered

_PAGE = 4096
_BOUNCE = 4 << 20
#: A buffer for each thread that writes: to touch a new one would take longer than to fill it.
_threads = threading.local()


class CorruptFile(OSError):
    """A file does not hold what was written to it, or is gone."""


def corrupt(path: str, why: str | None) -> CorruptFile:
    """The error for a file that can not be used."""
    return CorruptFile(errno.EIO, f"spilled data is lost and is to be computed again ({why})", path)


class Span(NamedTuple):
    """Where a buffer lies in its file, and what tells whether it is still the same."""

    offset: int
    nbytes: int
    checksum: int


def file_size(nbytes: int) -> int:
    """Bytes of a file with buffers of ``nbytes`` together: whole pages.

    To cut a file off after direct I/O takes longer than to write a small one.
    """
    return -(-nbytes // _PAGE) * _PAGE


def write(fd: int, buffers: Sequence[Scattered]) -> list[Span]:
    """Write a file."""
    if not hasattr(_threads, "bounce"):
        _threads.bounce = np.frombuffer(mmap.mmap(-1, _BOUNCE), np.uint8)
    bounce, filled, written, spans = _threads.bounce, 0, 0, []

    def flush(nbytes: int) -> None:
        nonlocal written, filled
        left = bounce.data[:nbytes]
        while left:
            left = left[os.write(fd, left) :]
        written, filled = written + nbytes, 0

    for pieces in buffers:
        start, checksum = written + filled, 0
        for piece in pieces:
            while piece.size:
                part = piece[: _BOUNCE - filled]
                np.copyto(bounce[filled : filled + part.size], part)
                checksum = zlib.crc32(part.data, checksum)
                filled, piece = filled + part.size, piece[part.size :]
                if filled == _BOUNCE:
                    flush(_BOUNCE)
        spans.append(Span(start, written + filled - start, checksum))
    bounce[filled : file_size(filled)] = 0
    flush(file_size(filled))
    return spans


def read(fd: int, path: str, spans: Sequence[Span]) -> list[np.ndarray]:
    """Read neighbouring buffers; they share new memory of their own.

    Raises
    ------
    CorruptFile
        When they are not what was written.
    """
    if not spans:
        return []
    first = spans[0].offset // _PAGE * _PAGE
    memory = _read(fd, path, first, file_size(spans[-1].offset + spans[-1].nbytes) - first)
    found = [memory[span.offset - first :][: span.nbytes] for span in spans]
    for buffer, span in zip(found, spans, strict=True):
        if zlib.crc32(buffer.data) != span.checksum:
            raise corrupt(path, f"the checksum of its bytes from {span.offset} on is wrong")
    return found


def _read(fd: int, path: str, start: int, size: int) -> np.ndarray:
    memory = np.empty(size + _PAGE, np.uint8)
    aligned = memory[-memory.ctypes.data % _PAGE :][:size]
    filled = 0
    while filled < size:
        nbytes = os.preadv(fd, [aligned[filled : filled + _BOUNCE].data], start + filled)
        if not nbytes:
            raise corrupt(path, "it ends too early")
        filled += nbytes
    return aligned
