"""The file of one object: how it is laid out, written and read.

Direct I/O wants addresses, offsets and lengths that are multiples of a page, so bytes are
written through an aligned buffer, and a file is read into aligned memory as a whole. Layout:
:data:`_START`, the length of each buffer, the header, the buffers, and a checksum of
everything before it.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import struct
import threading
import zlib

import numpy as np

from dask_gpurt.memory.frames import Frames, Scattered

_PAGE = 4096
_BOUNCE = 4 << 20
#: A buffer for each thread that writes: to touch a new one would take longer than to fill it.
_threads = threading.local()
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
    """Bytes of the file of ``parts``, up to the end of a page."""
    return _pages(_content(parts))


def _content(parts: Scattered) -> int:
    return _CHECKSUM.size + sum(int(part.nbytes) for part in parts)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def write(fd: int, parts: Scattered) -> None:
    """Write a file."""
    if not hasattr(_threads, "bounce"):
        _threads.bounce = np.frombuffer(mmap.mmap(-1, _BOUNCE), np.uint8)
    bounce = _threads.bounce
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
    # Whole pages: to cut the file off afterwards takes longer than to write a small one.
    bounce[filled : _pages(filled)] = 0
    flush(_pages(filled))


def read(fd: int, path: str, size: int) -> Frames:
    """Read a file of ``size`` bytes; the buffers share new memory of their own.

    Raises
    ------
    CorruptFile
        When it is not what was written.
    """
    if os.fstat(fd).st_size != size:
        raise corrupt(path, "its size is another one")
    whole = _read_whole(fd, path, size)
    magic, header_size, count = _START.unpack(whole[: _START.size].data)
    start = _START.size + 8 * count
    if magic != _MAGIC or start > size:
        raise corrupt(path, "it begins wrongly")
    lengths = whole[_START.size : start].view("<u8").tolist()
    ends = list(itertools.accumulate(lengths, initial=start + header_size))
    end = ends[-1]
    if _pages(end + _CHECKSUM.size) != size:
        raise corrupt(path, "its lengths are wrong")
    if _CHECKSUM.unpack(whole[end : end + _CHECKSUM.size].data)[0] != zlib.crc32(whole[:end].data):
        raise corrupt(path, "its checksum is wrong")
    header = whole[start : start + header_size].tobytes()
    return Frames(header, tuple([whole[a:b]] for a, b in itertools.pairwise(ends)))


def _read_whole(fd: int, path: str, size: int) -> np.ndarray:
    memory = np.empty(size + _PAGE, np.uint8)
    offset = -memory.ctypes.data % _PAGE
    whole = memory[offset : offset + size]
    filled = 0
    while filled < size:
        nbytes = os.readv(fd, [whole[filled : filled + _BOUNCE].data])
        if not nbytes:
            raise corrupt(path, "it ends too early")
        filled += nbytes
    return whole
