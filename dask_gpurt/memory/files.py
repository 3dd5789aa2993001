"""The file of one object: its buffers one behind the other, each with a checksum.

Direct I/O wants addresses, offsets and lengths that are multiples of a page, so bytes of the
host are written through an aligned buffer, and read into aligned memory. Buffers of a device
begin at a page each, behind those of the host; the device moves them and works their checksums
out. What says where a buffer
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

from dask_gpurt.device.base import PAGE, Buffer, DeviceFiles
from dask_gpurt.memory.frames import Scattered

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
    return -(-nbytes // PAGE) * PAGE


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


def write_from_device(
    files: DeviceFiles, fd: int, path: str, parts: Sequence[tuple[Buffer, int]], *, ordered: bool
) -> list[Span]:
    """Write buffers of a device behind what the file holds, each where a page begins.

    Parameters
    ----------
    parts
        Each buffer, and where it goes.
    ordered
        Whether work that the device was given so far may still write the buffers.
    """
    if not parts:
        return []
    last, at = parts[-1]
    os.posix_fallocate(fd, 0, at + file_size(last.nbytes))  # a device's error of a full disk has no number
    checksums = files.write(fd, path, parts, ordered=ordered)
    return [Span(at, source.nbytes, crc) for (source, at), crc in zip(parts, checksums, strict=True)]


def aligned(nbytes: int) -> np.ndarray:
    """New host memory that begins at a page.

    From 4 MiB on numpy asks for huge pages, which cost a fraction of small ones to touch: it is
    worth while to take as much at once as will be needed.
    """
    memory = np.empty(nbytes + PAGE, np.uint8)
    return memory[-memory.ctypes.data % PAGE :][:nbytes]


def extent(spans: Sequence[Span]) -> tuple[int, int]:
    """Where the pages of neighbouring buffers begin in their file, and the bytes of these."""
    first = min(span.offset for span in spans) // PAGE * PAGE
    end = max(span.offset + span.nbytes for span in spans)
    return first, file_size(end - first)


def read(fd: int, path: str, spans: Sequence[Span], into: np.ndarray | None = None) -> list[np.ndarray]:
    """Read neighbouring buffers into host memory; they share it.

    Parameters
    ----------
    into
        As many bytes as the :func:`extent` says, at a page; by default new ones.

    Raises
    ------
    CorruptFile
        When they are not what was written.
    """
    if not spans:
        return []
    first, size = extent(spans)
    memory = aligned(size) if into is None else into
    _fill(fd, path, first, memory)
    found = [memory[span.offset - first :][: span.nbytes] for span in spans]
    for buffer, span in zip(found, spans, strict=True):
        _check(path, span, zlib.crc32(buffer.data))
    return found


def read_to_device(files: DeviceFiles, fd: int, path: str, spans: Sequence[Span]) -> list[Buffer]:
    """Read buffers into new memory of a device; raises as :func:`read` does."""
    try:
        found = files.read(fd, path, [(span.offset, span.nbytes) for span in spans])
    except EOFError:
        raise corrupt(path, "it ends too early") from None
    for (_, checksum), span in zip(found, spans, strict=True):
        _check(path, span, checksum)
    return [buffer for buffer, _ in found]


def _check(path: str, span: Span, checksum: int) -> None:
    if checksum != span.checksum:
        raise corrupt(path, f"the checksum of its bytes from {span.offset} on is wrong")


def _fill(fd: int, path: str, start: int, memory: np.ndarray) -> None:
    filled = 0
    while filled < memory.size:
        nbytes = os.preadv(fd, [memory[filled : filled + _BOUNCE].data], start + filled)
        if not nbytes:
            raise corrupt(path, "it ends too early")
        filled += nbytes
