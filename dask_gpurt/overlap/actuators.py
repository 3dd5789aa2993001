"""The hands of the governor: what confines the compute of this process, and to what it can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dask_gpurt.overlap.knowledge import Setting
from dask_gpurt.overlap.occupancy import Caps, Residency

#: The caps that are worth trying, in blocks on an SM: those that were measured, and one that is mild.
CAPS = (8, 6, 4)
#: The blocks of a kernel that an SM mostly holds at most: 2048 threads in blocks of 128.
USUAL = 16


class UnfitSetting(ValueError):
    """A setting that this process can not be confined to; the message says why."""


class Actuator(Protocol):
    """Confines the compute of this process, and leaves communication alone."""

    def settings(self) -> Mapping[Setting, float]:
        """What is worth trying, and the share of its speed that a kernel keeps under it at worst."""
        ...

    def apply(self, setting: Setting) -> None:
        """Confine what is launched from now on.

        Raises
        ------
        ValueError
            When that is not possible; the message says why.
        """
        ...

    def clear(self) -> None:
        """Confine nothing any more."""
        ...

    def counters(self) -> Mapping[str, int]:
        """What was done to launches."""
        ...


class ResidencyCaps:
    """Caps the residency of all kernels.

    Parameters
    ----------
    residency
        Of this process.
    """

    def __init__(self, residency: Residency):
        self._residency = residency

    def settings(self) -> Mapping[Setting, float]:
        # The throughput of a kernel is concave in its residency, so a cap costs no more than its share.
        return {Setting(residency=cap): cap / USUAL for cap in CAPS}

    def apply(self, setting: Setting) -> None:
        if setting.sms is not None:
            raise UnfitSetting(f"nothing confines compute to SMs here, so {setting} is not possible")
        self._residency.apply(Caps(setting.residency))

    def clear(self) -> None:
        self._residency.clear()

    def counters(self) -> Mapping[str, int]:
        return self._residency.counters()
