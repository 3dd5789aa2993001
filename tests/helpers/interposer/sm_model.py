"""Compute the residency of kernels, blocks per SM, as ``_residency.c`` does at each launch."""

from __future__ import annotations

from dask_gpurt.overlap.interposer import DeviceLimits, check

#: Threads of a warp.
WARP_THREADS = 32
#: Partitions of an SM, each with an equal part of the registers.
SM_PARTITIONS = 4
#: Allocation units: registers per warp, and bytes of shared memory per block.
REGISTER_UNIT, SHARED_UNIT_BYTES = 256, 128


def residency(limits: DeviceLimits, threads: int, registers: int, shared: int) -> int:
    """Return how many blocks of a kernel fit on an SM at the same time.

    ``limits``: the limits of the device. The allocation unit of registers assumes compute capability 7.0 or
    newer, that of shared memory 8.0 or newer.
    ``registers``: registers per thread.
    ``shared``: static and dynamic shared memory per block, in bytes.
    """
    warps = -(-threads // WARP_THREADS)
    by_warps = limits.threads // WARP_THREADS // warps
    if each := _round_up(registers * WARP_THREADS, REGISTER_UNIT):
        by_warps = min(by_warps, SM_PARTITIONS * (limits.registers // SM_PARTITIONS // each) // warps)
    return min(
        limits.blocks, by_warps, limits.shared // _round_up(shared + limits.reserved, SHARED_UNIT_BYTES)
    )


def shared_for(limits: DeviceLimits, cap: int) -> int:
    """Return the static and dynamic shared memory per block in bytes with which ``cap`` blocks fit on an SM.

    Raises CapError if the cap is 0, or more than an SM holds.
    """
    check(cap, limits)
    return (limits.shared // (cap + 1) // SHARED_UNIT_BYTES + 1) * SHARED_UNIT_BYTES - limits.reserved


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
