"""Move files through page-aligned host memory, as direct I/O requires: short reads and writes, whole pages.

The copy that fills a bounce buffer may be asynchronous, as those of a GPU are. With two buffers one is filled
while the other is written to the disk.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from dask_gpurt.device.base import PAGE, Fence

#: Bytes of a buffer: as much as keeps a disk busy.
BOUNCE_BUFFER_BYTES = 4 << 20


class Chunk(NamedTuple):
    """Describe a part of a file that fits into a bounce buffer.

    Parameters
    ----------
    nbytes
        Its bytes, not more than :data:`BOUNCE_BUFFER_BYTES`.
    at
        Its first byte in the file: the begin of a page.
    fill
        Begins to copy its content into the memory that it is given, and returns what waits for that.
    """

    nbytes: int
    at: int
    fill: Callable[[np.ndarray], Fence]


class BounceBuffers:
    """Keep some buffers for each thread: to touch new ones would take longer than to fill them.

    Parameters
    ----------
    number
        Buffers of a thread.
    allocate
        Returns so many bytes of host memory that begin at a page.
    """

    def __init__(self, number: int, allocate: Callable[[int], np.ndarray]):
        self._number = number
        self._allocate = allocate
        self._threads = threading.local()

    def of_thread(self) -> list[np.ndarray]:
        """Return the buffers of this thread, which are made on first use."""
        if not hasattr(self._threads, "buffers"):
            memory = self._allocate(self._number * BOUNCE_BUFFER_BYTES)
            self._threads.buffers = np.split(memory, self._number)
        buffers: list[np.ndarray] = self._threads.buffers
        return buffers

    def write(self, fd: int, chunks: Iterable[Chunk]) -> None:
        """Write chunks, whole pages of them: the rest of a last page is zeros."""
        buffers = self.of_thread()
        filling: deque[tuple[Fence, np.ndarray, int]] = deque()
        for number, (nbytes, at, fill) in enumerate(chunks):
            memory = buffers[number % self._number][: whole_pages(nbytes)]
            fence = fill(memory[:nbytes])
            memory[nbytes:] = 0
            filling.append((fence, memory, at))
            if len(filling) == self._number:
                _write(fd, *filling.popleft())
        for waiting in filling:
            _write(fd, *waiting)


def whole_pages(nbytes: int) -> int:
    """Return the bytes of the pages that this many bytes take."""
    return -(-nbytes // PAGE) * PAGE


def _write(fd: int, fence: Fence, memory: np.ndarray, at: int) -> None:
    fence()
    left = memory.data
    while left:
        done = os.pwrite(fd, left, at)
        left, at = left[done:], at + done


def read_pages(fd: int, memory: np.ndarray, at: int, least: int) -> None:
    """Fill memory from a page of a file on.

    Parameters
    ----------
    memory
        Whole pages.
    least
        The bytes of it that the file has to have.

    Raises
    ------
    EOFError
        When it has fewer.
    """
    filled = 0
    while filled < least:
        nbytes = os.preadv(fd, [memory[filled : filled + BOUNCE_BUFFER_BYTES].data], at + filled)
        if not nbytes:
            raise EOFError
        filled += nbytes
