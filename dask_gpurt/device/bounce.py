"""Read and write files through page-aligned bounce buffers, as direct I/O requires.

The copy that fills a bounce buffer may be asynchronous, for example from a GPU. With two buffers, one is
filled while the other is written to disk.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from dask_gpurt.device.base import PAGE, Fence

#: Bytes of a bounce buffer, enough to keep a disk busy.
BOUNCE_BUFFER_BYTES = 4 << 20
#: The number of bounce buffers of a worker, about: its threads that move data to and from files.
FILE_BUFFERS = 8


class Chunk(NamedTuple):
    """Describe a part of a file that fits into a bounce buffer.

    Parameters
    ----------
    nbytes
        The size, at most :data:`BOUNCE_BUFFER_BYTES`.
    at
        The page-aligned offset in the file.
    fill
        Starts to copy the content into the given memory, and returns the fence of the copy.
    """

    nbytes: int
    at: int
    fill: Callable[[np.ndarray], Fence]


class BounceBuffers:
    """Hold bounce buffers for each thread, since page faults of new ones would take longer than filling them.

    Parameters
    ----------
    number
        The number of buffers of a thread.
    allocate
        Returns this many bytes of page-aligned host memory.
    nbytes
        Bytes of a buffer, a multiple of the size of a page.
    """

    def __init__(self, number: int, allocate: Callable[[int], np.ndarray], nbytes: int = BOUNCE_BUFFER_BYTES):
        self._number = number
        self._allocate = allocate
        self.nbytes = nbytes
        self._threads = threading.local()

    def of_thread(self) -> list[np.ndarray]:
        """Return the buffers of this thread, allocated on first use."""
        if not hasattr(self._threads, "buffers"):
            memory = self._allocate(self._number * self.nbytes)
            self._threads.buffers = np.split(memory, self._number)
        buffers: list[np.ndarray] = self._threads.buffers
        return buffers

    def write(self, fd: int, chunks: Iterable[Chunk]) -> None:
        """Write chunks, padded with zeros to whole pages."""
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
    """Round a number of bytes up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def _write(fd: int, fence: Fence, memory: np.ndarray, at: int) -> None:
    fence()
    left = memory.data
    while left:
        done = os.pwrite(fd, left, at)
        left, at = left[done:], at + done


def read_pages(fd: int, memory: np.ndarray, at: int, least: int) -> None:
    """Read from a page-aligned offset of a file into memory.

    Parameters
    ----------
    memory
        Whole pages.
    least
        The least number of bytes to read; the rest may be beyond the end of the file.

    Raises
    ------
    EOFError
        If the file has fewer.
    """
    filled = 0
    while filled < least:
        nbytes = os.preadv(fd, [memory[filled : filled + BOUNCE_BUFFER_BYTES].data], at + filled)
        if not nbytes:
            raise EOFError
        filled += nbytes
