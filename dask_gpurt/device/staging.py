"""Copy between a device and pageable host memory through pinned bounce buffers, in several threads.

CUDA copies pageable memory in the thread that asks for it, which also faults in the pages of new memory. On a
host of H100s that gives 1.8 to 2.4 GiB/s into new memory and 5 to 7 out of it; eight threads with bounce
buffers reach 14 to 16 and 21 to 28. Pinned memory is copied at 49 to 51.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import numpy as np

from dask_gpurt.device.base import Fence, passed, wait_for_all
from dask_gpurt.device.bounce import BounceBuffers
from dask_gpurt.device.copies import Copy

logger = logging.getLogger(__name__)

#: Moves chunks through the bounce buffers of a thread.
Move = Callable[[Sequence[Copy], Sequence[np.ndarray]], None]

#: Threads that copy. The bus is not full with eight, but they use as many processors meanwhile.
STAGING_THREADS = 8
#: Bytes of a bounce buffer: as few as a huge page, so that all threads have a part of a column of 16 MiB.
STAGING_CHUNK_BYTES = 2 << 20
#: Bytes from which on a copy goes through bounce buffers; smaller ones are left to CUDA.
STAGED_FROM_BYTES = 1 << 20


class Staging:
    """Copy through bounce buffers. Thread-safe.

    Parameters
    ----------
    start
        Starts a copy between the device and a bounce buffer, after earlier copies of the calling thread, and
        returns its fence.
    buffers
        The bounce buffers of each thread. With at least two, one is copied by the device while the other one
        is copied by the host.
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

        Parameters
        ----------
        order
            Called in each thread that copies, to order its copies after other work of the device.
        keep
            Objects that own the memory. They are kept until all is copied, or has failed.

        Returns
        -------
        Fence
            When it has passed, or raised an error of a copy, no copy is in flight.
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
        self,
        move: Move,
        copies: Sequence[Copy],
        order: Callable[[], None],
        keep: object,
    ) -> Fence:
        chunks = list(_split(copies, self._buffers.nbytes))
        shares = [chunks[first :: self._threads] for first in range(min(self._threads, len(chunks)))]
        with self._lock:
            if not self._closed:
                run = partial(self._run, move, order, keep)
                return _fence([self._executor.submit(run, share) for share in shares])
        self._run(move, order, keep, chunks)
        return passed

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
