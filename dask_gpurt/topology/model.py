"""Model the places of workers, the links between them, and the speeds of these links.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dask_gpurt.topology.links import SHIPPED, Link, Speed, SpeedEstimate


@dataclass(frozen=True)
class Place:
    """Locate a worker.

    ``host``: an id of the host.
    ``device``: an id of the GPU or of its MIG instance; None for the processor.
    ``nvlink``: an id of the NVLink domain: devices that reach each other over NVLink, on one host or on
    several.
    ``by_tcp``: whether Dask's comms to this worker are TCP, even from workers on the same host and regardless
    of the links between their devices.
    """

    host: str
    device: str | None = None
    nvlink: str | None = None
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
        """Set the links between pairs of devices of a host; those of other pairs follow from their places."""
        self._hosts[host] = links

    def described(self, host: str) -> bool:
        """Return whether the links of a host are known."""
        return host in self._hosts

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
            if here.nvlink is not None and here.nvlink == there.nvlink:
                return Link.NVLINK
            return Link.RDMA if here.rdma and there.rdma else Link.TCP
        if here.device is None or there.device is None:
            return Link.SHARED_MEMORY
        if here.device == there.device:
            return Link.SAME_DEVICE
        if known := self._hosts.get(here.host):
            link = known.get(frozenset((here.device, there.device)))
            if link is not None:
                return link
        return Link.NVLINK if here.nvlink is not None and here.nvlink == there.nvlink else Link.PCIE

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

    def measured(self) -> dict[Link, Speed]:
        """Return the speed of each class of link that differs from the shipped speed."""
        return {link: speed for link, speed in self.learned().items() if speed != SHIPPED[link]}
