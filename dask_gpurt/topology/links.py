"""Define the classes of link between two workers or between two tiers of one worker, and their speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Link(StrEnum):
    """Name the classes of link; within each group from fast to slow."""

    SAME_DEVICE = "same-device"
    NVLINK = "nvlink"
    PCIE = "pcie"
    SHARED_MEMORY = "shared-memory"
    LOOPBACK = "loopback"
    RDMA = "rdma"
    TCP = "tcp"

    PINNED = "pinned"
    PAGEABLE = "pageable"
    DISK = "disk"


#: Links between workers of one host, and between workers of different hosts.
WITHIN_HOST = (Link.SAME_DEVICE, Link.NVLINK, Link.PCIE, Link.SHARED_MEMORY, Link.LOOPBACK)
BETWEEN_HOSTS = (Link.RDMA, Link.TCP)
#: Links that exist only where there are GPUs.
OF_GPUS = (Link.SAME_DEVICE, Link.NVLINK, Link.PCIE, Link.PINNED, Link.PAGEABLE)


@dataclass(frozen=True)
class Speed:
    """Hold the speed of a link in one direction.

    ``bandwidth``: bytes per second, above 0.
    ``latency``: seconds until the first byte, at least 0.
    Raises ValueError if either is out of range or not a number.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"a bandwidth is a number of bytes per second above 0, not {self.bandwidth}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"a latency is a number of seconds of at least 0, not {self.latency}")

    def seconds(self, nbytes: float, transfers: int = 1) -> float:
        """Return the seconds that sequential transfers with this total of bytes take."""
        return transfers * self.latency + nbytes / self.bandwidth


#: The speeds of links until they are measured. "Measured" refers to a host with four H200 and NVSwitch;
#: "nominal" is the vendor's figure, less the usual protocol overhead.
SHIPPED: Mapping[Link, Speed] = {
    # Measured: 4.13 TB/s read and written, so half of it copied. Latency: a launch and its event.
    Link.SAME_DEVICE: Speed(2.06e12, 10e-6),
    # Measured: one direction by a copy engine. Latency: two launches and their events.
    Link.NVLINK: Speed(391e9, 20e-6),
    # Measured: pinned copies over the same bus, PCIe 5 x16; a peer copy crosses it once.
    Link.PCIE: Speed(53e9, 20e-6),
    # Nominal: a copy by one thread. Latency: a message on Dask's event loop announces it.
    Link.SHARED_MEMORY: Speed(8e9, 200e-6),
    # Nominal: two of Dask's event loops and the kernel copy the bytes. Latency: a request and its answer.
    Link.LOOPBACK: Speed(1e9, 1e-3),
    # Nominal: 200 Gbit/s, less a tenth. Latency: a message in Python through UCXX, not that of the wire.
    Link.RDMA: Speed(22e9, 200e-6),
    # Nominal: 10 Gbit/s, less a tenth. Latency: a request and its answer on two of Dask's event loops.
    Link.TCP: Speed(1.1e9, 1e-3),
    # Measured: host to device; the other way is 55.
    Link.PINNED: Speed(53e9, 20e-6),
    # Measured: device to host; the other way is 17.
    Link.PAGEABLE: Speed(15.5e9, 20e-6),
    # Measured: written directly to a local disk; reading is 2.4.
    Link.DISK: Speed(1.4e9, 200e-6),
}


# ---- speeds learnt from transfers --------------------------------------------------------------------
#
# Ratios are estimated online, from noisy samples that drift: the whole module is pure.


class WindowedRatio:
    """Estimate the ratio of two quantities that are measured in pairs, such as bytes and seconds.

    Both are summed. When the sum of ``measure`` exceeds the window, both sums are scaled down to it, so older
    pairs are discounted exponentially, by size rather than by number.

    ``amount``, ``measure``: the initial sums: a prior pair.
    ``window``: maximum of the sum of ``measure``, in its unit.
    """

    __slots__ = ("_amount", "_measure", "_window")

    def __init__(self, amount: float, measure: float, window: float):
        self._amount, self._measure, self._window = amount, measure, window

    def observe(self, amount: float, measure: float) -> None:
        """Add a pair, or the sums of several pairs."""
        amount, measure = self._amount + amount, self._measure + measure
        scale = self._window / max(self._window, measure)
        self._amount, self._measure = amount * scale, measure * scale

    @property
    def ratio(self) -> float:
        """Return amount per measure."""
        return self._amount / self._measure

    @property
    def inverse(self) -> float:
        """Return measure per amount."""
        return self._measure / self._amount


#: Weight of the initial speed, in seconds of transfers.
PRIOR_S = 0.1
#: Window of an estimate, in seconds of transfers.
WINDOW_S = 10.0


class SpeedEstimate:
    """Estimate the speed of a link from its transfers.

    Transfers update either the latency or the bandwidth, whichever dominates their expected time.
    """

    def __init__(self, speed: Speed):
        self.speed = speed
        transfers = PRIOR_S / speed.latency if speed.latency else 0.0
        self._bytes_per_second = WindowedRatio(speed.bandwidth * PRIOR_S, PRIOR_S, WINDOW_S)
        self._transfers_per_second = WindowedRatio(transfers, PRIOR_S, WINDOW_S)

    def observe(self, nbytes: float, seconds: float, transfers: int) -> None:
        """Add transfers, with their total bytes and seconds."""
        waiting, moving = transfers * self.speed.latency, nbytes / self.speed.bandwidth
        # Attribute at least half of the time to the dominant term, even if both are faster than expected.
        if moving >= waiting:
            self._bytes_per_second.observe(nbytes, max(seconds - waiting, seconds / 2))
            self.speed = Speed(self._bytes_per_second.ratio, self.speed.latency)
        else:
            self._transfers_per_second.observe(transfers, max(seconds - moving, seconds / 2))
            self.speed = Speed(self.speed.bandwidth, self._transfers_per_second.inverse)
