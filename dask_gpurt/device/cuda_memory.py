"""Allocate and copy GPU memory in batches, and wait for copies.

Each CUDA call releases the GIL and has to reacquire it. On a host of H200s, starting 256 copies in 256 calls
took 1.0 ms in the only thread of a process, and 185 ms beside six busy threads; one call for all of them took
1.0 and 2.3 ms.

Decisions and their figures: ``docs/decisions/overlap.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


# ---- a stream beside the user's ----------------------------------------------------------------------


class StreamBeside:
    """Hold a stream of one thread beside the user's; see :class:`~dask_gpurt.device.Beside`."""

    def __init__(self) -> None:
        self._raw = cupy.cuda.Stream(non_blocking=True)
        self._event = cupy.cuda.Event(disable_timing=True)
        self.stream = Stream(self._raw)

    def fork(self) -> None:
        """Have this stream wait for all work submitted to the user's."""
        runtime.eventRecord(self._event.ptr, _users())
        self._raw.wait_event(self._event)

    def join(self, columns: Iterable[Any]) -> None:
        runtime.eventRecord(self._event.ptr, self._raw.ptr)
        runtime.streamWaitEvent(_users(), self._event.ptr)
        _free_on_users_stream(columns)


def _users() -> int:
    return int(DEFAULT_STREAM.__cuda_stream__()[1])


def _free_on_users_stream(columns: Iterable[Any]) -> None:
    """Have the buffers of columns of pylibcudf freed in the order of the user's stream, not of their own.

    rmm frees a buffer in the order of the stream that was passed to it last. A stream passed with no bytes to
    reserve allocates nothing. A memory resource with callbacks could choose the stream too, but takes the
    GIL for each buffer, amid the read.
    """
    for column in columns:
        for span in (column.data(), column.null_mask()):
            if span is not None:
                if not isinstance(buffer := span.obj, rmm.DeviceBuffer):
                    raise TypeError(f"the memory of a column is of {type(buffer).__name__}")
                buffer.reserve(0, DEFAULT_STREAM)
        _free_on_users_stream(column.children())
