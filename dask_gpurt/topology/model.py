"""Model the places of workers, the links between them, and the speeds of these links.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Link(StrEnum):
    """Name the classes of link between workers, from fast to slow."""

    SAME_DEVICE = "same-device"
    NVLINK = "nvlink"
    PCIE = "pcie"
    SHARED_MEMORY = "shared-memory"
    LOOPBACK = "loopback"
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


# ---- places ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Locate a worker.

    ``host``: an id of the host.
    ``device``: an id of the GPU or of its MIG instance; None for the processor.
    ``by_tcp``: whether Dask's comms to this worker are TCP, even from workers on the same host and regardless
    of the links between their devices.
    """

    host: str
    device: str | None = None
    rdma: bool = False
    by_tcp: bool = False


class Topology:
    """Keep the places of all workers and the speeds between them.

    An unknown worker is treated as alone on its own host, reached by TCP.

    ``speeds``: initial speeds by class of link; missing classes have the shipped speeds.
    """

    def __init__(self, speeds: Mapping[Link, Speed] = SHIPPED):
        self._places: dict[str, Place] = {}
        self._hosts: dict[str, Mapping[frozenset[str], Link]] = {}
        # Dictionaries without values serve as ordered sets.
        self._on_host: dict[str, dict[str, None]] = {}
        self._classes = {link: SpeedEstimate(speed) for link, speed in {**SHIPPED, **speeds}.items()}

    # ---- places ----------------------------------------------------------------------

    def add(self, worker: str, place: Place) -> None:
        """Set or replace the place of a worker."""
        if self._places.get(worker) == place:
            return
        self.remove(worker)
        self._places[worker] = place
        self._on_host.setdefault(place.host, {})[worker] = None

    def remove(self, worker: str) -> None:
        """Remove a worker, and its host with its last worker. Learned speeds are kept."""
        place = self._places.pop(worker, None)
        if place is None:
            return
        del self._on_host[place.host][worker]
        if not self._on_host[place.host]:
            del self._on_host[place.host]
            self._hosts.pop(place.host, None)

    def describe(self, host: str, links: Mapping[frozenset[str], Link]) -> None:
        """Set the links between pairs of devices of a host; other pairs count as joined by PCIe."""
        self._hosts[host] = links

    def place(self, worker: str) -> Place | None:
        """Return the place of a worker; None if it is not known."""
        return self._places.get(worker)

    def on_host(self, host: str) -> Collection[str]:
        """Return the workers of a host."""
        return self._on_host.get(host, {}).keys()

    @property
    def hosts(self) -> Iterable[str]:
        """Return the hosts that have workers."""
        return self._on_host.keys()

    # ---- links -----------------------------------------------------------------------

    def link(self, source: str, target: str, by_comms: bool = False) -> Link:
        """Return the class of link from one worker to another; from a worker to itself, that of one device.

        ``by_comms``: whether the bytes go over Dask's comms, as ordinary dependencies do. Otherwise they go
        through the exchange, which takes the fastest link between the two.
        """
        here, there = self._places.get(source), self._places.get(target)
        if source == target:
            return Link.SAME_DEVICE
        return Link.TCP if here is None or there is None else self._link(here, there, by_comms)

    def _link(self, here: Place, there: Place, by_comms: bool) -> Link:
        if by_comms and (here.by_tcp or there.by_tcp):
            return Link.LOOPBACK if here.host == there.host else Link.TCP
        if here.host != there.host:
            return Link.RDMA if here.rdma and there.rdma else Link.TCP
        if here.device is None or there.device is None:
            return Link.SHARED_MEMORY
        if here.device == there.device:
            return Link.SAME_DEVICE
        known = self._hosts.get(here.host, {})
        return known.get(frozenset((here.device, there.device)), Link.PCIE)

    def way(self, source: str, target: str, by_comms: bool = False) -> tuple[Link, Speed]:
        """Return the link between two workers and its speed; see :meth:`link`."""
        link = self.link(source, target, by_comms)
        return link, self._classes[link].speed

    # ---- transfers -------------------------------------------------------------------

    def observe(
        self,
        source: str,
        target: str,
        nbytes: int,
        seconds: float,
        transfers: int = 1,
        by_comms: bool = False,
    ) -> None:
        """Update speeds from completed transfers.

        ``nbytes``, ``seconds``, ``transfers``: total bytes, total seconds and number of the transfers.
        Without bytes or time they are ignored.
        ``by_comms``: whether they went over Dask's comms.
        """
        if nbytes < 1 or seconds <= 0 or transfers < 1:
            return
        self._classes[self.link(source, target, by_comms)].observe(nbytes, seconds, transfers)

    def learned(self) -> dict[Link, Speed]:
        """Return the current speed of each class of link."""
        return {link: average.speed for link, average in self._classes.items()}
