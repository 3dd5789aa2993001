"""Compute how many blocks of a kernel an SM holds, and cap that through shared memory.

``_interposer.c`` does the same arithmetic at each launch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

__all__ = [
    "CapError",
    "Caps",
    "DeviceLimits",
    "LaunchedKernel",
    "Launches",
    "Residency",
    "residency",
    "shared_for",
]

#: Threads of a warp.
WARP_THREADS = 32
#: Partitions of an SM, each with its share of the registers.
SM_PARTITIONS = 4
#: Allocation units: registers of a warp, and bytes of shared memory of a block.
REGISTER_UNIT, SHARED_UNIT_BYTES = 256, 128
#: The most kernels with a cap of their own, and the highest cap that the policy holds.
MAX_KERNELS, HIGHEST_CAP = 1024, 255


class CapError(ValueError):
    """Refuse a residency cap; the message says what would be right."""


@dataclass(frozen=True)
class DeviceLimits:
    """Hold the limits of a device and of each of its SMs.

    Parameters
    ----------
    sms
        SMs of the device.
    blocks, threads, registers
        The most that an SM holds.
    shared
        Bytes of shared memory of an SM.
    reserved
        Bytes of it that CUDA takes for each block.
    opt_in
        The most bytes of a block that has opted in to more than 48 KiB.
    """

    sms: int
    blocks: int
    threads: int
    registers: int
    shared: int
    reserved: int
    opt_in: int


def residency(limits: DeviceLimits, threads: int, registers: int, shared: int) -> int:
    """Count the blocks of a kernel that an SM holds at a time.

    Parameters
    ----------
    limits
        The device's. The allocation unit of registers is that since compute capability 7.0, the one of shared
        memory that since 8.0.
    threads
        Threads of a block.
    registers
        Registers of a thread.
    shared
        Bytes of shared memory of a block, static and dynamic.
    """
    warps = -(-threads // WARP_THREADS)
    by_warps = limits.threads // WARP_THREADS // warps
    if each := _round_up(registers * WARP_THREADS, REGISTER_UNIT):
        by_warps = min(by_warps, SM_PARTITIONS * (limits.registers // SM_PARTITIONS // each) // warps)
    return min(
        limits.blocks, by_warps, limits.shared // _round_up(shared + limits.reserved, SHARED_UNIT_BYTES)
    )


def shared_for(limits: DeviceLimits, cap: int) -> int:
    """Return the bytes of shared memory of a block, static and dynamic, with which ``cap`` fit on an SM.

    Raises
    ------
    CapError
        When the cap is 0, or more than an SM holds.
    """
    check(cap, limits)
    return (limits.shared // (cap + 1) // SHARED_UNIT_BYTES + 1) * SHARED_UNIT_BYTES - limits.reserved


def check(cap: int, limits: DeviceLimits | None = None) -> None:
    """Refuse a cap that is not possible on a device; without limits, on any device.

    Raises
    ------
    CapError
        When the cap is 0, or more than an SM holds.
    """
    most = limits.blocks if limits else HIGHEST_CAP
    if not 1 <= cap <= most:
        holder = "an SM of this device holds" if limits else "can be asked for"
        raise CapError(
            f"a residency cap of {cap} blocks: expected at least 1, and at most the {most} that {holder}"
        )


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@dataclass(frozen=True)
class Caps:
    """Hold the most blocks of a kernel that an SM may have; None leaves a kernel alone.

    Parameters
    ----------
    default
        The cap of kernels that are not named.
    kernels
        Caps by mangled name.
    """

    default: int | None = None
    kernels: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchedKernel:
    """Describe a kernel that was launched while caps were set.

    Parameters
    ----------
    name
        The mangled name, cut where it is long; empty with a driver before CUDA 12.3.
    registers
        Registers of a thread.
    shared
        Bytes of static shared memory of a block.
    launches, capped
        The number of its launches, and of those that were changed.
    refused
        Whether the driver refused it once with more shared memory; it is left alone from then on.
    """

    name: str
    registers: int
    shared: int
    launches: int
    capped: int
    refused: bool


class Launches(Protocol):
    """Control the launches of this process; see :class:`.interposer.Interposer`."""

    def switch(self, on: bool) -> None:
        """Switch all caps on or off."""

    def write(self, default: int, kernels: Mapping[str, int]) -> None:
        """Set all caps; 0 is none."""

    def limits(self, device: int) -> DeviceLimits | None:
        """Return the limits of a device; None while the driver does not tell them."""

    def counters(self) -> dict[str, int]:
        """Count launches by outcome."""

    def kernels(self) -> list[LaunchedKernel]:
        """List the kernels that were seen."""


class Residency:
    """Cap the residency of the kernels that this process launches.

    Parameters
    ----------
    launches
        The launches of this process.
    device
        The ordinal of the device whose limits a cap is held against.
    """

    def __init__(self, launches: Launches, device: int = 0):
        self._launches = launches
        self._device = device
        self._lock = threading.Lock()
        self._written = Caps()

    def apply(self, caps: Caps) -> None:
        """Set caps from the next launch on. Setting the same again costs next to nothing.

        Raises
        ------
        CapError
            For a cap of 0 or above what an SM holds, and for more than 1024 names. Nothing is changed.
        """
        with self._lock:
            if caps != self._written:
                self._check(caps)
                kernels = {name: cap or 0 for name, cap in caps.kernels.items()}
                self._launches.write(caps.default or 0, kernels)
                self._written = Caps(caps.default, dict(caps.kernels))
            self._launches.switch(True)

    def _check(self, caps: Caps) -> None:
        if len(caps.kernels) > MAX_KERNELS:
            raise CapError(f"caps for {len(caps.kernels)} kernels: expected at most {MAX_KERNELS}")
        limits = self._launches.limits(self._device)
        for cap in (caps.default, *caps.kernels.values()):
            if cap is not None:
                check(cap, limits)

    def clear(self) -> None:
        """Switch all caps off."""
        with self._lock:
            self._launches.switch(False)

    def counters(self) -> dict[str, int]:
        """Count launches while caps were on: ``seen``, ``capped``, ``repeated``, and ``left.*`` by reason."""
        return self._launches.counters()

    def kernels(self) -> list[LaunchedKernel]:
        """List the kernels that were launched while caps were on, in the order of their first launch."""
        return self._launches.kernels()
