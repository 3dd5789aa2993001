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

    Parameters
    ----------
    bandwidth
        Bytes per second, above 0.
    latency
        Seconds until the first byte, at least 0.

    Raises
    ------
    ValueError
        If either is out of range or not a number.
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
