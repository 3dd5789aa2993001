"""Copy through bounce buffers: to files, as direct I/O requires, and between a device and pageable memory.

The copy that fills a bounce buffer may be asynchronous, for example from a GPU. With two buffers, one is
filled while the other is written to disk, or copied by the host.

CUDA copies pageable memory in the thread that asks for it, which also faults in the pages of new memory. On a
host of H100s that gives 1.8 to 2.4 GiB/s into new memory and 5 to 7 out of it; eight threads with bounce
buffers reach 14 to 16 and 21 to 28. Pinned memory is copied at 49 to 51.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import numpy as np

from dask_gpurt.device.base import PAGE, Fence, no_fence, wait_for_all
from dask_gpurt.device.copies import Copy

logger = logging.getLogger(__name__)

#: Bytes of a bounce buffer for a file, enough to keep a disk busy.
BOUNCE_BUFFER_BYTES = 4 << 20
#: The number of bounce buffers of a worker, about: its threads that move data to and from files.
FILE_BUFFERS = 8


class Chunk(NamedTuple):
    """Describe a part of a file that fits into a bounce buffer.

    ``nbytes``: the size, at most :data:`BOUNCE_BUFFER_BYTES`.
    ``at``: the page-aligned offset in the file.
    ``fill``: starts to copy the content into the given memory, and returns the fence of the copy.
    """

    nbytes: int
    at: int
    fill: Callable[[np.ndarray], Fence]


class BounceBuffers:
    """Hold bounce buffers for each thread, since page faults of new ones would take longer than filling them.

    ``allocate``: returns this many bytes of page-aligned host memory.
    ``nbytes``: bytes of a buffer, a multiple of the size of a page.
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

    ``memory``: whole pages.
    ``least``: the least number of bytes to read; the rest may be beyond the end of the file.
    Raises EOFError if the file has fewer.
    """
    filled = 0
    while filled < least:
        nbytes = os.preadv(fd, [memory[filled : filled + BOUNCE_BUFFER_BYTES].data], at + filled)
        if not nbytes:
            raise EOFError
        filled += nbytes


# ---- a device and pageable memory ----------------------------------------------------

#: Moves chunks through the bounce buffers of a thread.
Move = Callable[[Sequence[Copy], Sequence[np.ndarray]], None]

#: Threads that copy. The bus is not full with eight, but they use as many processors meanwhile.
STAGING_THREADS = 8
#: Bytes of a bounce buffer here: as few as a huge page, so that all threads have a part of a column of
#: 16 MiB.
STAGING_CHUNK_BYTES = 2 << 20
#: Bytes from which on a copy goes through bounce buffers; smaller ones are left to CUDA.
STAGED_FROM_BYTES = 1 << 20


class Staging:
    """Copy through bounce buffers. Thread-safe.

    ``start``: starts a copy between the device and a bounce buffer, after earlier copies of the calling
    thread, and returns its fence.
    ``buffers``: the bounce buffers of each thread. With at least two, one is copied by the device while the
    other one is copied by the host.
    """

    def __init__(
        self, start: Callable[[Copy], Fence], buffers: BounceBuffers, threads: int = STAGING_THREADS
    ):
        self._start = start
        self._buffers = buffers
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="gpurt-stage")
        self._lock = threading.Lock()
        self._closed = False
        self._refused = False

    def to_host(self, copies: Sequence[Copy], order: Callable[[], None], keep: object) -> Fence:
        """Start to copy from the device to the host.

        ``order``: called in each thread that copies, to order its copies after other work of the device.
        ``keep``: objects that own the memory. They are kept until all is copied, or has failed.
        When the fence has passed, or raised an error of a copy, no copy is in flight.
        """
        return self._share_out(self._move_to_host, copies, order, keep)

    def to_device(self, copies: Sequence[Copy], order: Callable[[], None], keep: object) -> Fence:
        """Start to copy from the host to the device; see :meth:`to_host`."""
        return self._share_out(self._move_to_device, copies, order, keep)

    def close(self) -> None:
        """End the threads once they have copied all. Later copies are made by the calling threads."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=False)

    def _share_out(
        self, move: Move, copies: Sequence[Copy], order: Callable[[], None], keep: object
    ) -> Fence:
        chunks = list(_split(copies, self._buffers.nbytes))
        shares = [chunks[first :: self._threads] for first in range(min(self._threads, len(chunks)))]
        with self._lock:
            if not self._closed:
                run = partial(self._run, move, order, keep)
                return _fence([self._executor.submit(run, share) for share in shares])
        self._run(move, order, keep, chunks)
        return no_fence

    def _run(self, move: Move, order: Callable[[], None], keep: object, chunks: Sequence[Copy]) -> None:
        """Move chunks in this thread; ``keep`` lives as long as the call."""
        order()
        try:
            buffers = self._buffers.of_thread()
        except (MemoryError, RuntimeError) as error:  # CUDA refuses to pin more memory
            if not self._refused:
                self._refused = True
                logger.warning(
                    "CUDA copies pageable memory itself, which is slow: no pinned buffers (%s)", error
                )
            for chunk in chunks:
                self._start(chunk)()
        else:
            move(chunks, buffers)

    def _move_to_host(self, chunks: Sequence[Copy], buffers: Sequence[np.ndarray]) -> None:
        filling: deque[tuple[Fence, int, Copy]] = deque()

        def empty() -> None:
            fence, buffer, chunk = filling.popleft()
            fence()
            ctypes.memmove(chunk.to, buffer, chunk.nbytes)  # releases the GIL

        try:
            for number, chunk in enumerate(chunks):
                if len(filling) == len(buffers):
                    empty()
                buffer = int(buffers[number % len(buffers)].ctypes.data)
                filling.append((self._start(Copy(buffer, chunk.at, chunk.nbytes)), buffer, chunk))
            while filling:
                empty()
        finally:
            wait_for_all(fence for fence, *_ in filling)

    def _move_to_device(self, chunks: Sequence[Copy], buffers: Sequence[np.ndarray]) -> None:
        emptying: deque[Fence] = deque()
        try:
            for number, chunk in enumerate(chunks):
                if len(emptying) == len(buffers):
                    emptying.popleft()()
                buffer = int(buffers[number % len(buffers)].ctypes.data)
                ctypes.memmove(buffer, chunk.at, chunk.nbytes)
                emptying.append(self._start(Copy(chunk.to, buffer, chunk.nbytes)))
        finally:
            wait_for_all(emptying)


def _fence(moving: Sequence[Future[None]]) -> Fence:
    def wait_for_moves() -> None:
        wait(moving)
        for each in moving:
            each.result()

    return wait_for_moves


def _split(copies: Iterable[Copy], most: int) -> Iterator[Copy]:
    """Yield pieces of at most so many bytes."""
    for to, at, nbytes in copies:
        for start in range(0, nbytes, most):
            yield Copy(to + start, at + start, min(most, nbytes - start))
