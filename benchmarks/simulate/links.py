"""Model the places of simulated workers, and the links between them with their speeds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Link(StrEnum):
    """Name the classes of link between workers, from fast to slow."""

    SAME_DEVICE = "same-device"
    NVLINK = "nvlink"
    PCIE = "pcie"
    SHARED_MEMORY = "shared-memory"
    RDMA = "rdma"
    TCP = "tcp"


@dataclass(frozen=True)
class Speed:
    """Hold the speed of a link in one direction.

    ``bandwidth``: bytes per second, above 0.
    ``latency``: seconds until the first byte, at least 0.
    """

    bandwidth: float
    latency: float

    def seconds(self, nbytes: float, transfers: int = 1) -> float:
        """Return the seconds that sequential transfers with this total of bytes take."""
        return transfers * self.latency + nbytes / self.bandwidth


#: The speeds of links. "Measured" refers to a host with four H200 and NVSwitch;
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
    # Nominal: 200 Gbit/s, less a tenth. Latency: a message in Python through UCXX, not that of the wire.
    Link.RDMA: Speed(22e9, 200e-6),
    # Nominal: 10 Gbit/s, less a tenth. Latency: a request and its answer on two of Dask's event loops.
    Link.TCP: Speed(1.1e9, 1e-3),
}


@dataclass(frozen=True)
class Place:
    """Locate a worker.

    ``device``: an id of its GPU; None for the processor.
    """

    host: str
    device: str | None = None
    rdma: bool = False


class Topology:
    """Keep the places of all workers and the speeds between them.

    ``speeds``: by class of link, also of others than these; missing classes have the shipped speeds.
    ``nvlinks``: the pairs of devices that NVLink joins; others of one host are joined by PCIe.
    """

    def __init__(self, speeds: Mapping[Any, Speed] = SHIPPED, nvlinks: Collection[frozenset[str]] = ()):
        self.speeds: Mapping[Any, Speed] = {**SHIPPED, **speeds}
        self._nvlinks = nvlinks
        self._places: dict[str, Place] = {}

    def add(self, worker: str, place: Place) -> None:
        """Set the place of a worker."""
        self._places[worker] = place

    def place(self, worker: str) -> Place:
        """Return the place of a worker."""
        return self._places[worker]

    def link(self, source: str, target: str) -> Link:
        """Return the class of link from one worker to another."""
        here, there = self._places[source], self._places[target]
        if source == target:
            return Link.SAME_DEVICE
        if here.host != there.host:
            return Link.RDMA if here.rdma and there.rdma else Link.TCP
        if here.device is None or there.device is None:
            return Link.SHARED_MEMORY
        if here.device == there.device:
            return Link.SAME_DEVICE
        return Link.NVLINK if frozenset((here.device, there.device)) in self._nvlinks else Link.PCIE

    def way(self, source: str, target: str) -> tuple[Link, Speed]:
        """Return the link between two workers and its speed."""
        link = self.link(source, target)
        return link, self.speeds[link]
