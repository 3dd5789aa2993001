"""Allocate and copy GPU memory in batches, and wait for copies.

Each CUDA call releases the GIL and has to reacquire it. On a host of H200s, starting 256 copies in 256 calls
took 1.0 ms in the only thread of a process, and 185 ms beside six busy threads; one call for all of them took
1.0 and 2.3 ms.

Decisions and their figures: ``docs/decisions/overlap.md`` and ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import cupy
import numpy as np
import rmm
from cuda.bindings import runtime as bindings
from cupy.cuda import runtime
from rmm.pylibrmm.stream import DEFAULT_STREAM, Stream

from dask_gpurt.device.base import PAGE, Fence
from dask_gpurt.device.copies import Copy, DeviceSpan, grid_of
from dask_gpurt.device.pool import ALIGNMENT, Buffer
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

    Raises RuntimeError if CUDA reports an error.
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


# ---- many copies in one kernel -----------------------------------------------------------------------
#
# cudaMemcpyBatchAsync takes 5 µs of the calling thread per copy, even of a few bytes, and each copy waits
# for kernels of other streams to make room. One kernel waits once, and takes 1 µs per copy, to list the
# ranges. It gets them as its parameter, so that they need no copy of their own.


#: Copies per launch. Parameters have at most 4 KiB on all GPUs, 32,764 bytes since compute capability 7.0.
CAPACITIES = 168, 1360
THREADS = 256
KERNEL = r"""
typedef unsigned long long u64;

struct Copy { u64 to, at, nbytes; };
struct Copies { Copy all[CAPACITY]; };

// Both addresses have the same remainder by the size of a word. Bytes before the first whole word of the
// target and after the last one are copied one at a time.
template <typename Word>
__device__ void copy_words(const Copy& copy) {
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
    const u64 misaligned = (0 - copy.to) % sizeof(Word);
    const u64 before = misaligned < copy.nbytes ? misaligned : copy.nbytes;
    const u64 words = (copy.nbytes - before) / sizeof(Word), aligned = words * sizeof(Word);
    Word* to = (Word*)(copy.to + before);
    const Word* at = (const Word*)(copy.at + before);
    for (u64 word = first; word < words; word += step) to[word] = at[word];
    for (u64 byte = first; byte < copy.nbytes - aligned; byte += step) {
        const u64 skipped = byte < before ? byte : byte + aligned;
        ((char*)copy.to)[skipped] = ((const char*)copy.at)[skipped];
    }
}

// Blocks with the same y share a copy.
extern "C" __global__ void copy_ranges(const __grid_constant__ Copies copies) {
    const Copy& copy = copies.all[blockIdx.y];
    const u64 apart = copy.to ^ copy.at;
    if (apart % 16 == 0) copy_words<uint4>(copy);
    else if (apart % 8 == 0) copy_words<u64>(copy);
    else if (apart % 4 == 0) copy_words<unsigned>(copy);
    else copy_words<unsigned char>(copy);
}
"""


def copy_on_device(copies: Sequence[Copy], stream: Any) -> None:
    """Start copies within the memory of the current device, in the order of a cupy stream.

    Ranges must not overlap. A single copy is left to CUDA.

    Raises RuntimeError if CUDA reports an error.
    """
    copies = [copy for copy in copies if copy.nbytes]
    if len(copies) < 2:
        copy_async(copies, stream.ptr)
        return
    for start in range(0, len(copies), CAPACITIES[-1]):
        part = copies[start : start + CAPACITIES[-1]]
        capacity = next(most for most in CAPACITIES if len(part) <= most)
        ranges = np.zeros(1, _parameter(capacity))
        ranges["all"][0, : len(part)] = part
        _kernel(capacity)(grid_of(part, THREADS), (THREADS,), (ranges,), stream=stream)


@cache
def _parameter(capacity: int) -> np.dtype[Any]:
    """Return the type of the kernel's parameter: cupy passes arrays of one element by value."""
    return np.dtype([("all", np.uint64, (capacity, 3))])


@cache
def _kernel(capacity: int) -> Any:
    return cupy.RawKernel(KERNEL, "copy_ranges", options=("--std=c++17", f"-DCAPACITY={capacity}"))
