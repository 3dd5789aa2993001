"""Choose caps on the residency of kernels, blocks per SM, which ``_residency.c`` applies at each launch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["CapError", "Caps", "DeviceLimits", "LaunchedKernel", "Launches", "Residency"]

#: The most kernels with individual caps, and the highest cap that the policy can hold.
MAX_KERNELS, HIGHEST_CAP = 1024, 255


class CapError(ValueError):
    """A residency cap is not possible; the message says what is expected."""


@dataclass(frozen=True)
class DeviceLimits:
    """Hold the limits of a device and of each of its SMs.

    Parameters
    ----------
    blocks, threads, registers
        The most that an SM holds.
    shared
        Shared memory of an SM in bytes.
    reserved
        Shared memory that CUDA reserves for each block, in bytes.
    opt_in
        The most shared memory of a block that has opted in to more than 48 KiB, in bytes.
    """

    sms: int
    blocks: int
    threads: int
    registers: int
    shared: int
    reserved: int
    opt_in: int


def check(cap: int, limits: DeviceLimits | None = None) -> None:
    """Check that a cap is possible on a device; without limits, on any device.

    Raises CapError if the cap is 0, or more than an SM holds.
    """
    most = limits.blocks if limits else HIGHEST_CAP
    if not 1 <= cap <= most:
        holder = "an SM of this device holds" if limits else "can be asked for"
        raise CapError(
            f"a residency cap of {cap} blocks: expected at least 1, and at most the {most} that {holder}"
        )


@dataclass(frozen=True)
class Caps:
    """Hold residency caps, the most blocks of a kernel on an SM; None for no cap.

    Parameters
    ----------
    default
        The cap of kernels without a cap of their own.
    kernels
        Caps by mangled name, or by the id of a :class:`LaunchedKernel`.
    """

    default: int | None = None
    kernels: Mapping[str | int, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchedKernel:
    """Describe a kernel that was launched while caps were set.

    ``name``: the mangled name, truncated if long; empty with a driver before CUDA 12.3.
    ``id``: a hash of the whole name.
    ``registers``: registers per thread.
    ``shared``: static shared memory per block, in bytes.
    ``launches``, ``capped``: the number of its launches, and how many of them were changed.
    ``refused``: whether the driver rejected a launch with more shared memory. Such a kernel is then left
    alone.
    """

    name: str
    registers: int
    shared: int
    launches: int
    capped: int
    refused: bool
    id: int


class Launches(Protocol):
    """Control the launches of this process; see :class:`.interposer.Interposer`."""

    def switch(self, on: bool) -> None:
        """Switch all caps on or off."""

    def write(self, default: int, kernels: Mapping[str | int, int]) -> None:
        """Set all caps; 0 means no cap."""

    def limits(self, device: int) -> DeviceLimits | None:
        """Return the limits of a device; None if the driver cannot report them yet."""

    def counters(self) -> dict[str, int]:
        """Return counts of launches by outcome."""

    def kernels(self) -> list[LaunchedKernel]:
        """Return the launched kernels."""


class Residency:
    """Cap the residency of the kernels that this process launches.

    Parameters
    ----------
    device
        The ordinal of the device whose limits apply.
    """

    def __init__(self, launches: Launches, device: int = 0):
        self._launches = launches
        self._device = device
        self._lock = threading.Lock()
        self._written = Caps()

    def apply(self, caps: Caps) -> None:
        """Set caps for all later launches. Setting the same caps again is cheap.

        Raises
        ------
        CapError
            If a cap is 0 or more than an SM holds, or for more than 1024 names. Nothing is changed.
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
        """Remove all caps."""
        with self._lock:
            self._launches.switch(False)

    def resume(self) -> None:
        """Set the caps again that were applied last. Takes no time."""
        with self._lock:
            self._launches.switch(True)

    def counters(self) -> dict[str, int]:
        """Return counts of launches under caps: ``seen``, ``capped``, ``repeated``, ``left.*`` by reason."""
        return self._launches.counters()

    def kernels(self) -> list[LaunchedKernel]:
        """Return the kernels that were launched under caps, in the order of their first launch."""
        return self._launches.kernels()
