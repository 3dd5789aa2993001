"""Allocate and copy GPU memory in batches, and wait for copies.

Each CUDA call releases the GIL and has to reacquire it. On a host of H200s, starting 256 copies in 256 calls
took 1.0 ms in the only thread of a process, and 185 ms beside six busy threads; one call for all of them took
1.0 and 2.3 ms.

Decisions and their figures: ``docs/decisions/overlap.md``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import cupy
import numpy as np
import rmm
from cuda.bindings import runtime as bindings
from cupy.cuda import runtime
from rmm.pylibrmm.stream import DEFAULT_STREAM, Stream

from dask_gpurt.device.arena import ALIGNMENT
from dask_gpurt.device.base import PAGE, Fence
from dask_gpurt.device.copies import Copy, DeviceSpan
from dask_gpurt.device.pool import Buffer
from dask_gpurt.device.staging import BounceBuffers

#: First driver version with cudaMemcpyBatchAsync: CUDA 12.8.
BATCHES_SINCE = 12080


class CudaStreams(Protocol):
    """Protocol of the part of :class:`~dask_gpurt.device.cuda.CudaDevice` that its files use."""

    index: int

    def stream(self) -> tuple[Stream, Any]: ...

    def after_compute(self) -> tuple[Stream, Any]: ...

    def empty(self, sizes: Iterable[int]) -> list[Buffer]: ...

    def from_host(self, sources: Sequence[np.ndarray]) -> list[Buffer]: ...

    def scatter(
        self, sources: Sequence[Buffer], into: Sequence[list[Any]], *, ordered: bool = True
    ) -> Fence: ...


def copy_async(copies: Sequence[Copy], stream: int) -> None:
    """Start copies in stream order; the stream must not be a default stream of CUDA.

    Raises
    ------
    RuntimeError
        If CUDA reports an error.
    """
    copies = [copy for copy in copies if copy.nbytes]
    if len(copies) < 2 or runtime.driverGetVersion() < BATCHES_SINCE:
        for copy in copies:
            runtime.memcpyAsync(copy.to, copy.at, copy.nbytes, runtime.memcpyDefault, stream)
        return
    in_order = bindings.cudaMemcpyAttributes()
    in_order.srcAccessOrder = bindings.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    to, at, sizes = (list(column) for column in zip(*copies, strict=True))
    error, *_ = bindings.cudaMemcpyBatchAsync(to, at, sizes, len(copies), [in_order], [0], 1, stream)
    if error != bindings.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{len(copies)} copies in one call: {error.name}")


def behind(stream: Any) -> Fence:
    """Return a fence after all work submitted to a stream; it blocks without spinning."""
    event = cupy.cuda.Event(block=True, disable_timing=True)
    event.record(stream)
    wait: Fence = event.synchronize
    return wait


def is_pageable(ptr: int) -> bool:
    """Return whether an address is in host memory that CUDA does not know of, which it copies slowly."""
    error, attributes = bindings.cudaPointerGetAttributes(ptr)
    unknown = bindings.cudaMemoryType.cudaMemoryTypeUnregistered
    return bool(error == bindings.cudaError_t.cudaSuccess and attributes.type == unknown)


def bounce_buffers(device: CudaStreams, nbytes: int) -> BounceBuffers:
    """Return two pinned buffers of this many bytes for each thread that uses them."""

    def pinned(total: int) -> np.ndarray:
        device.stream()  # sets the current device of this thread
        memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(total + PAGE), 0)
        return np.frombuffer(memory, np.uint8)[-memory.ptr % PAGE :][:total]

    return BounceBuffers(2, pinned, nbytes)


def cut(sizes: Sequence[int], stream: Stream) -> list[DeviceSpan]:
    """Allocate buffers in one allocation, since many small ones would be slow."""
    starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    whole = rmm.DeviceBuffer(size=starts[-1], stream=stream)
    return [DeviceSpan(whole.ptr + start, size, whole) for start, size in zip(starts, sizes, strict=False)]


# ---- reads beside the user's stream --------------------------------------------------


class _Read:
    """One read; ``has_ended`` once its stream has been waited for."""

    has_ended = False


class _Thread(threading.local):
    """Hold the read that the current thread runs."""

    read: _Read | None = None


class ReadMemory:
    """Provide the memory of frames that a library reads on a stream of its own, beside the user's stream.

    It allocates from the current resource of the device, and frees in the order of the stream used last.
    While a read runs, libcudf frees what it no longer needs in the order of the stream that still uses it.
    Once the read has ended and its stream was waited for, only the user's stream uses what is left. In rmm, a
    buffer would be freed in the order of the stream that has allocated it::

        A reads a frame on a stream of its own, and uses it in a kernel on the user's stream
        A drops the frame while the kernel runs, so that its memory is free for A's own stream
        B reads into the same memory, which the kernel of A still uses

    So this memory resource frees each allocation in the order of the stream that uses it last.

    Thread-safe. Use :data:`READ_MEMORY`: an instance is never destroyed. rmm calls its methods through
    pointers that own nothing, and if it was part of cyclic garbage together with a frame, the collector could
    destroy it before the frame.

    Attributes
    ----------
    resource
        The memory resource, for libraries.
    """

    def __init__(self) -> None:
        self._users = DEFAULT_STREAM
        self._thread = _Thread()
        #: For each allocation the resource below, and the read that has made it.
        self._allocations: dict[int, tuple[Any, _Read | None]] = {}
        self._calls = self._allocate, self._free
        self.resource: Any = rmm.mr.CallbackMemoryResource(*self._calls)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    @contextmanager
    def reading(self, wait: Callable[[], None]) -> Iterator[Any]:
        """Serve the allocations of a read of this thread in the body, then ``wait`` for its stream."""
        read = self._thread.read = _Read()
        try:
            yield self.resource
        finally:
            self._thread.read = None
            wait()
            read.has_ended = True

    # Called by rmm, in any thread. Single operations on the dict need no lock.

    def _allocate(self, nbytes: int, stream: Stream) -> int:
        below = rmm.mr.get_current_device_resource()
        pointer = int(below.allocate(nbytes, stream))
        if pointer:  # without bytes there may be none
            self._allocations[pointer] = below, self._thread.read
        return pointer

    def _free(self, pointer: int, nbytes: int, stream: Stream) -> None:
        if (found := self._allocations.pop(pointer, None)) is None:  # it has no bytes
            return
        below, read = found
        if read is None:  # allocated by a thread of the library: nothing tells whether its read has ended
            stream.synchronize()
        below.deallocate(pointer, nbytes, self._users if read is None or read.has_ended else stream)


#: Serves all reads of this process.
READ_MEMORY = ReadMemory()
