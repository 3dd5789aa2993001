"""The file of one object: how it is laid out, written and read.

Bytes go through an aligned buffer, because direct I/O wants addresses, offsets and lengths
that are multiples of a page. Layout: :data:`_START`, the length of each buffer, the header,
the buffers, and a checksum of everything before it.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib

import numpy as np

from dask_gpurt.memory.frames import Frames, Scattered

_PAGE = 4096
_BOUNCE = 4 << 20
#: Magic, bytes of header, number of buffers.
_START = struct.Struct("<8sQQ")
_MAGIC = b"gpurt-1\n"
_CHECKSUM = struct.Struct("<I")


class CorruptFile(OSError):
    """A file does not hold what was written to it, or is gone."""


def corrupt(path: str, why: str | None) -> CorruptFile:
    """The error for a file that can not be used."""
    return CorruptFile(errno.EIO, f"spilled data is lost and is to be computed again ({why})", path)


def layout(frames: Frames) -> Scattered:
    """What goes into a file, up to the checksum."""
    lengths = np.array([sum(piece.nbytes for piece in buffer) for buffer in frames.buffers], "<u8")
    start = _START.pack(_MAGIC, len(frames.header), len(lengths))
    return [
        np.frombuffer(start + lengths.tobytes() + frames.header, np.uint8),
        *(piece for buffer in frames.buffers for piece in buffer),
    ]


def file_size(parts: Scattered) -> int:
    """Bytes of the file of ``parts``."""
    return _CHECKSUM.size + sum(int(part.nbytes) for part in parts)


def write(fd: int, parts: Scattered) -> None:
    """Write a file."""
    bounce = np.frombuffer(mmap.mmap(-1, _BOUNCE), np.uint8)
    filled, checksum = 0, 0

    def flush(nbytes: int) -> None:
        left = bounce.data[:nbytes]
        while left:
            left = left[os.write(fd, left) :]

    def put(part: np.ndarray) -> None:
        nonlocal filled
        while part.size:
            size = min(part.size, _BOUNCE - filled)
            np.copyto(bounce[filled : filled + size], part[:size])
            filled, part = filled + size, part[size:]
            if filled == _BOUNCE:
                flush(_BOUNCE)
                filled = 0

    for part in parts:
        for at in range(0, part.size, _BOUNCE):  # so that the checksum finds in the cache what it copies
            chunk = part[at : at + _BOUNCE]
            checksum = zlib.crc32(chunk.data, checksum)
            put(chunk)
    put(np.frombuffer(_CHECKSUM.pack(checksum), np.uint8))
    pages = -(-filled // _PAGE) * _PAGE
    bounce[filled:pages] = 0
    flush(pages)
    os.ftruncate(fd, file_size(parts))


def read(fd: int, path: str, size: int) -> Frames:
    """Read a file of ``size`` bytes into new arrays.

    Raises
    ------
    CorruptFile
        When it is not what was written.
    """
    source = _Source(fd, path)
    if os.fstat(fd).st_size != size:
        raise corrupt(path, "its size is another one")
    # The lengths are judged before memory is taken for them.
    magic, header_size, count = _START.unpack(source.take(_START.size).data)
    left = size - _START.size - _CHECKSUM.size - 8 * count
    if magic != _MAGIC or left < 0:
        raise corrupt(path, "it begins wrongly")
    lengths = source.take(8 * count).view("<u8").tolist()
    if header_size + sum(lengths) != left:
        raise corrupt(path, "its lengths are wrong")
    header = source.take(header_size).tobytes()
    buffers = tuple([source.take(length)] for length in lengths)
    expected = source.checksum
    if _CHECKSUM.unpack(source.take(_CHECKSUM.size).data)[0] != expected:
        raise corrupt(path, "its checksum is wrong")
    return Frames(header, buffers)


class _Source:
    """A file read from the start, and the checksum of what was taken so far."""

    def __init__(self, fd: int, path: str):
        self.checksum = 0
        self._fd = fd
        self._path = path
        self._bounce = np.frombuffer(mmap.mmap(-1, _BOUNCE), np.uint8)
        self._ready = self._bounce[:0]

    def take(self, size: int) -> np.ndarray:
        """The next bytes, in a new array."""
        found = np.empty(size, np.uint8)
        left = found
        while left.size:
            if not self._ready.size:
                self._ready = self._bounce[: os.readv(self._fd, [self._bounce.data])]
                if not self._ready.size:
                    raise corrupt(self._path, "it ends too early")
            part = self._ready[: left.size]
            np.copyto(left[: part.size], part)
            self.checksum = zlib.crc32(part.data, self.checksum)
            self._ready, left = self._ready[part.size :], left[part.size :]
        return found
