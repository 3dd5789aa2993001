"""Copy many ranges of a GPU's memory with one kernel.

cudaMemcpyBatchAsync takes 5 µs of the calling thread per copy, even of a few bytes, and each copy waits for
kernels of other streams to make room. One kernel waits once, and takes 1 µs per copy, to list the ranges. It
gets them as its parameter, so that they need no copy of their own.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np

from dask_gpurt.device.copies import Copy, grid_of
from dask_gpurt.device.cuda_memory import copy_async

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

    Raises
    ------
    RuntimeError
        If CUDA reports an error.
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
