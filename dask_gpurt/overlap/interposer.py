"""Cap the residency of kernels, blocks per SM, through the interposer: a library preloaded into workers.

The library (``_interposer.c`` and ``_residency.c``) changes each launch by a policy that this module writes
into its memory. It must be loaded before CUDA, so nannies add it to ``LD_PRELOAD``.

Decisions and their figures: ``docs/decisions/overlap.md``.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

#: The most kernels with individual caps, and the highest cap that the policy can hold.
MAX_KERNELS, HIGHEST_CAP = 1024, 255


class CapError(ValueError):
    """A residency cap is not possible; the message says what is expected."""


@dataclass(frozen=True)
class DeviceLimits:
    """Hold the limits of a device and of each of its SMs.

    ``blocks``, ``threads``, ``registers``: the most that an SM holds.
    ``shared``: shared memory of an SM, in bytes; ``reserved``: what CUDA reserves of it for each block.
    ``opt_in``: the most shared memory of a block that has opted in to more than 48 KiB, in bytes.
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

    ``default``: the cap of kernels without a cap of their own.
    ``kernels``: caps by mangled name, or by the id of a :class:`LaunchedKernel`.
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


class Residency:
    """Cap the residency of the kernels that this process launches.

    ``device``: the ordinal of the device whose limits apply.
    """

    def __init__(self, launches: Interposer, device: int = 0):
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


# ---- the library -------------------------------------------------------------------------------------

#: The version of the shared memory's layout. A library with another version is rejected.
LAYOUT_VERSION = 2
#: Outcomes of a launch, in the order of their counters in the library.
OUTCOMES = (
    "capped",
    "left.no-cap",
    "left.cooperative",
    "left.cluster",
    "left.capture",
    "left.small-grid",
    "left.at-most-the-cap",
    "left.no-opt-in",
    "left.refused",
    "left.unknown",
    "left.policy-changing",
)


class NotLoadedError(RuntimeError):
    """The interposer is not loaded in this process; the message says why."""


class _Limits(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in DeviceLimits.__dataclass_fields__]


class _CapEntry(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint64), ("cap", ctypes.c_uint64)]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("handle", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("limits", ctypes.c_void_p),
        ("decision", ctypes.c_uint64),
        ("allowed", ctypes.c_uint32),
        ("raised", ctypes.c_bool),
        ("refused", ctypes.c_bool),
        ("launches", ctypes.c_uint64),
        ("capped", ctypes.c_uint64),
        ("function", ctypes.c_void_p),
        ("id", ctypes.c_uint64),
        ("registers", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("name", ctypes.c_char * 256),
    ]


class _Shared(ctypes.Structure):
    _fields_ = [
        ("layout", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("on", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("cap", ctypes.c_uint32),
        ("entries", ctypes.c_uint32),
        ("table", _CapEntry * MAX_KERNELS),
        ("counts", ctypes.c_uint64 * 16 * 8),  # 8 shards, by thread
        ("repeated", ctypes.c_uint64),
        ("kernel_count", ctypes.c_uint32),
        ("kernels", _Kernel * 8192),
    ]


def library() -> Path:
    """Return the path of the interposer.

    Raises NotLoadedError if it was not built, or its path cannot be in ``LD_PRELOAD``.
    """
    here = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (path := here / f"_interposer{suffix}").exists():
            if re.search(r"[\s:]", str(path)):
                raise NotLoadedError(f"{path} cannot be preloaded: its path contains a space or a colon")
            return path
    raise NotLoadedError(
        "the interposer was not built: install dask-gpurt again where there is a C compiler for Linux"
    )


def with_preload(preloads: str, path: Path) -> str:
    """Return a value for ``LD_PRELOAD`` with the interposer appended.

    ``preloads``: the present value: paths separated by spaces or colons.
    ``path``: the path of the interposer; an earlier occurrence is removed.
    """
    others = [name for name in re.split(r"[\s:]+", preloads) if name and name != str(path)]
    return ":".join([*others, str(path)])


def name_id(name: str) -> int:
    """Return the id of a kernel in the policy: the 64-bit FNV-1a hash of its name."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


class Interposer:
    """Access the interposer in this process.

    Raises
    ------
    NotLoadedError
        If the process has no interposer, or one of another version.
    """

    def __init__(self) -> None:
        self._process = ctypes.CDLL(None)
        try:
            self._shared = _Shared.in_dll(self._process, "gpurt_residency")
        except ValueError:
            raise NotLoadedError(_why_not()) from None
        if (self._shared.layout, self._shared.size) != (LAYOUT_VERSION, ctypes.sizeof(_Shared)):
            raise NotLoadedError(
                "the interposer that is loaded is of another version: install dask-gpurt again"
            )

    def switch(self, on: bool) -> None:
        """Switch all caps on or off."""
        self._shared.on = on

    def write(self, default: int, kernels: Mapping[str | int, int]) -> None:
        """Set all caps; 0 means no cap. Concurrent launches of other threads are left alone."""
        self._process.gpurt_residency_changed()
        try:
            for entry, (kernel, cap) in zip(self._shared.table, kernels.items(), strict=False):
                entry.id, entry.cap = kernel if isinstance(kernel, int) else name_id(kernel), cap
            self._shared.cap, self._shared.entries = default, len(kernels)
        finally:
            self._process.gpurt_residency_changed()

    def limits(self, device: int) -> DeviceLimits | None:
        """Return the limits of a device; None if the driver cannot report them yet."""
        found = _Limits()
        if self._process.gpurt_residency_limits(device, ctypes.byref(found)):
            return None
        return DeviceLimits(*(getattr(found, name) for name in DeviceLimits.__dataclass_fields__))

    def counters(self) -> dict[str, int]:
        """Return counts of launches: ``seen``, ``capped``, ``repeated``, and those left alone, by reason."""
        counts = [sum(shards) for shards in zip(*self._shared.counts, strict=True)]
        named = dict(zip(OUTCOMES, counts, strict=False))
        return {"seen": sum(counts), "repeated": self._shared.repeated, **named}

    def kernels(self) -> list[LaunchedKernel]:
        """Return the launched kernels, one for each context, in the order of their first launch."""
        return [
            LaunchedKernel(
                one.name.decode(errors="replace"),
                one.registers,
                one.shared,
                one.launches,
                one.capped,
                one.refused,
                one.id,
            )
            for one in self._shared.kernels[: self._shared.kernel_count]
        ]


def _why_not() -> str:
    path = library()
    if str(path) in re.split(r"[\s:]+", os.environ.get("LD_PRELOAD", "")):
        return f"the loader did not take {path} from LD_PRELOAD: see the first lines of this process's stderr"
    return (
        "this process was started without the interposer in LD_PRELOAD: a nanny adds it if "
        "'gpurt.enabled' is true and 'gpurt.overlap.mode' is 'calibrated' or a number when the nanny starts"
    )
