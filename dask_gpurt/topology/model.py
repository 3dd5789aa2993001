"""Model hosts with their GPUs and NICs, the places of workers, and the links between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dask_gpurt.topology.estimate import RETURN_FACTOR, ConnectionSetup, PairOverrides, SpeedEstimate, factor
from dask_gpurt.topology.links import BETWEEN_HOSTS, SHIPPED, Link, Speed

#: Pairs with a speed of their own that are kept: those of a slow host or cable, by far not all pairs.
MAX_PAIRS = 1024
#: The share of the nominal figure that a copy reaches, measured on H200: 391 of 450 GB/s, and 53 of 63.
NVLINK_SHARE, PCIE_SHARE = 391 / 450, 53 / 63
#: Nominal bytes per second in one direction, of one NVLink and of one PCIe lane, by generation.
NVLINK_RATES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
PCIE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
#: How far apart two devices are on the PCIe bus, near first, in the words of ``nvidia-smi topo``.
PCIE_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")

#: Two devices, by their ids.
Devices = frozenset[str]


@dataclass(frozen=True)
class Place:
    """Locate a worker.

    Parameters
    ----------
    host
        An id of the host.
    device
        An id of the GPU or of its MIG instance; None for the processor.
    numa
        The nearest NUMA node.
    nvlink
        An id of the NVLink domain: devices that reach each other over NVLink, on one host or on several.
    rdma
        Whether the host has a NIC for RDMA.
    by_tcp
        Whether Dask's comms to this worker are TCP, for its neighbours on the host too, whatever joins their
        devices.
    """

    host: str
    device: str | None = None
    numa: int | None = None
    nvlink: str | None = None
    rdma: bool = False
    by_tcp: bool = False


@dataclass(frozen=True)
class HostLinks:
    """Hold the links in a host; those of pairs that are not listed follow from their places.

    Parameters
    ----------
    links
        Classes of link by two devices, in either order.
    speeds
        Speeds of classes of link within this host or between its tiers.
    """

    links: Mapping[frozenset[str], Link] = field(default_factory=dict)
    speeds: Mapping[Link, Speed] = field(default_factory=dict)


# ---- a host ----------------------------------------------------------------------------


class Lanes(NamedTuple):
    """Count the NVLinks or PCIe lanes of a device, and name their generation."""

    generation: int
    number: int


class GpuLink(NamedTuple):
    """Describe what joins two GPUs: a class of link, the number of NVLinks, or the path over the PCIe bus."""

    link: Link
    nvlinks: int = 0
    path: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.link, f"x{self.nvlinks}" if self.nvlinks else "", self.path)))

    @classmethod
    def parse(cls, text: str) -> GpuLink:
        """Read the text that ``str`` has made: "nvlink x18", "pcie PIX", "shared-memory".

        Raises
        ------
        ValueError
            When it is any other.
        """
        name, _, rest = text.strip().partition(" ")
        link = Link(name)
        if link == Link.NVLINK and rest[:1] == "x" and rest[1:].isdecimal():
            return cls(link, nvlinks=int(rest[1:]))
        if link == Link.PCIE and rest in PCIE_PATHS:
            return cls(link, path=rest)
        if rest:
            raise ValueError(text)
        return cls(link)


SELF = GpuLink(Link.SAME_DEVICE)


@dataclass(frozen=True)
class Gpu:
    """Describe a GPU, or an instance of one that MIG has partitioned.

    Parameters
    ----------
    id
        Its UUID, "GPU-…" or "MIG-…".
    index
        The number of the GPU in the order of the PCI bus; instances share that of theirs.
    name
        The maker's name.
    parent
        Of an instance, the UUID of its GPU.
    numa
        The NUMA node that it is attached to.
    nvlink, pcie
        Its links that are up, and its lanes.
    fabric
        An id of the NVLink domain, if that spans hosts.
    """

    id: str
    index: int
    name: str = ""
    parent: str | None = None
    numa: int | None = None
    nvlink: Lanes | None = None
    pcie: Lanes | None = None
    fabric: str | None = None


@dataclass(frozen=True)
class Nic:
    """Describe a network device that is up; its nominal ``speed`` is in bytes per second."""

    name: str
    speed: float | None = None
    rdma: bool = False
    numa: int | None = None


@dataclass(frozen=True)
class Host:
    """Describe one host.

    Parameters
    ----------
    name
        The name that the operating system has for it.
    gpus
        Its GPUs in the order of the PCI bus.
    joins
        The link between every two of them, by their ids.
    nics
        Network devices that are up.
    numa_nodes
        The number of its NUMA nodes.
    """

    name: str
    gpus: tuple[Gpu, ...] = ()
    joins: Mapping[Devices, GpuLink] = field(default_factory=dict)
    nics: tuple[Nic, ...] = ()
    numa_nodes: int = 1

    @property
    def rdma(self) -> bool:
        """Tell whether there is a NIC for RDMA."""
        return any(nic.rdma for nic in self.nics)

    def matrix(self) -> list[list[GpuLink]]:
        """Return the links between every two GPUs, in rows; a GPU and itself are one device."""
        return [
            [SELF if one is other else self.joins[frozenset((one.id, other.id))] for other in self.gpus]
            for one in self.gpus
        ]

    def find(self, visible: str | None) -> Gpu | None:
        """Return the GPU that a process computes on; None if it is not known.

        Parameters
        ----------
        visible
            Its ``CUDA_VISIBLE_DEVICES``, of which the first counts; None if all are visible.
        """
        first = "0" if visible is None else visible.split(",")[0].strip()
        if first.isdecimal():
            found = (gpu for gpu in self.gpus if gpu.index == int(first))
        else:  # CUDA takes the beginning of an id too
            found = (gpu for gpu in self.gpus if first and _is_named(gpu, first))
        return next(found, None)

    def place(
        self,
        host: str,
        gpu: Gpu | None,
        *,
        numa: int | None = None,
        rdma: bool = False,
        by_tcp: bool = False,
    ) -> Place:
        """Return the place of a process that computes on a GPU, or on the processor.

        Parameters
        ----------
        host
            The id of this host, by which links within it are known.
        numa
            The node of a process without a GPU.
        rdma
            Whether it sends by RDMA if there is a NIC for it.
        by_tcp
            Whether Dask's comms to it are TCP.
        """
        rdma = rdma and self.rdma
        if gpu is None:
            return Place(host, numa=numa, rdma=rdma, by_tcp=by_tcp)
        return Place(host, gpu.id, gpu.numa, self._domain(host, gpu), rdma, by_tcp)

    def _domain(self, host: str, gpu: Gpu) -> str | None:
        """Return the NVLink domain of a GPU; one within this host is named after its first GPU."""
        if gpu.fabric is not None:
            return gpu.fabric
        for domain in self.nvlink_domains():
            if gpu in domain:
                return f"{host}/{domain[0].index}"
        return None

    def nvlink_domains(self) -> Iterator[list[Gpu]]:
        """Yield groups of GPUs each of which reaches all others over NVLink; a GPU is in one at most."""
        left = [gpu for gpu in self.gpus if self._nvlinked(gpu, self.gpus)]
        while left:
            domain = [left.pop(0)]
            for gpu in list(left):
                if len(self._nvlinked(gpu, domain)) == len(domain):
                    domain.append(gpu)
                    left.remove(gpu)
            yield domain

    def _nvlinked(self, gpu: Gpu, others: tuple[Gpu, ...] | list[Gpu]) -> list[Gpu]:
        pairs = ((other, self.joins.get(frozenset((gpu.id, other.id)))) for other in others)
        return [other for other, join in pairs if join and join.link == Link.NVLINK]

    def known(self) -> HostLinks:
        """Return the links in this host, with the speeds that follow from their generations and numbers."""
        return HostLinks({pair: join.link for pair, join in self.joins.items()}, dict(self._speeds()))

    def _speeds(self) -> Iterator[tuple[Link, Speed]]:
        generations = {gpu.id: gpu.nvlink.generation for gpu in self.gpus if gpu.nvlink}
        nvlinks = [
            join.nvlinks * min(NVLINK_RATES.get(generations.get(gpu, 0), 0.0) for gpu in pair)
            for pair, join in self.joins.items()
        ]
        lanes = [gpu.pcie.number * PCIE_RATES.get(gpu.pcie.generation, 0.0) for gpu in self.gpus if gpu.pcie]
        if slowest := min(filter(None, nvlinks), default=0.0):
            yield Link.NVLINK, Speed(slowest * NVLINK_SHARE, SHIPPED[Link.NVLINK].latency)
        if slowest := min(filter(None, lanes), default=0.0):
            for link in (Link.PCIE, Link.PINNED):  # both cross the bus once
                yield link, Speed(slowest * PCIE_SHARE, SHIPPED[link].latency)


def _is_named(gpu: Gpu, beginning: str) -> bool:
    return any(name.lower().startswith(beginning.lower()) for name in (gpu.id, gpu.parent or ""))


# ---- all workers -----------------------------------------------------------------------


#: The two ends of a link: its hosts where it joins two, else a device twice or the devices of a host.
Pair = tuple[Link, str, str]


class Topology:
    """Keep the places of all workers and the speeds between them.

    A worker that was not added counts as one on a host of its own that is reached by TCP.

    Parameters
    ----------
    speeds
        Initial speeds by class of link; for classes that are left out, the shipped ones.
    first
        By class of link, the seconds that the first of Dask's transfers between two workers takes longer.
    """

    def __init__(self, speeds: Mapping[Link, Speed] = SHIPPED, first: Mapping[Link, float] | None = None):
        self._places: dict[str, Place] = {}
        self._hosts: dict[str, Mapping[frozenset[str], Link]] = {}
        self._host_averages: dict[tuple[str, Link], SpeedEstimate] = {}
        # Dictionaries without values: sets that are read in the order of arrival.
        self._everywhere: dict[str, None] = {}
        self._rings: dict[tuple[str, ...], dict[str, None]] = {}
        self._classes = {link: SpeedEstimate(speed) for link, speed in {**SHIPPED, **speeds}.items()}
        self._overrides: PairOverrides[Pair] = PairOverrides(MAX_PAIRS)
        self._setup = ConnectionSetup(first or {})

    # ---- places ----------------------------------------------------------------------

    def add(self, worker: str, place: Place) -> None:
        """Set the place of a worker, also in place of an earlier one."""
        if self._places.get(worker) == place:
            return
        self.remove(worker)
        self._places[worker] = place
        self._everywhere[worker] = None
        for ring in _rings_of(place):
            self._rings.setdefault(ring, {})[worker] = None

    def remove(self, worker: str) -> None:
        """Forget a worker, and its host with the last worker there; learned speeds stay."""
        place = self._places.pop(worker, None)
        if place is None:
            return
        del self._everywhere[worker]
        self._setup.forget(worker)
        for ring in _rings_of(place):
            del self._rings[ring][worker]
            if not self._rings[ring]:
                del self._rings[ring]
        if ("host", place.host) not in self._rings:
            self._hosts.pop(place.host, None)
            self._forget_averages(place.host)

    def describe(self, host: str, known: HostLinks) -> None:
        """Take the links of a host, as one process there has detected them."""
        self._hosts[host] = known.links
        self._forget_averages(host)
        for link, speed in known.speeds.items():
            if factor(speed, self._classes[link].speed) > RETURN_FACTOR:
                self._host_averages[host, link] = SpeedEstimate(speed)

    def _forget_averages(self, host: str) -> None:
        for link in Link:
            self._host_averages.pop((host, link), None)

    def described(self, host: str) -> bool:
        """Tell whether the links of a host are known."""
        return host in self._hosts

    def place(self, worker: str) -> Place | None:
        """Return the place of a worker; None if it is not known."""
        return self._places.get(worker)

    def on_host(self, host: str) -> Collection[str]:
        """Return the workers of a host."""
        return self._rings.get(("host", host), {}).keys()

    @property
    def hosts(self) -> Iterable[str]:
        """Return the hosts that have workers."""
        return [ring[1] for ring in self._rings if ring[0] == "host"]

    def neighbourhoods(self, worker: str) -> tuple[tuple[str, ...], ...]:
        """Return the names of a worker's device, NVLink domain and host; none if its place is unknown."""
        place = self._places.get(worker)
        return tuple(_rings_of(place)) if place else ()

    def rings(self, worker: str) -> Iterator[Collection[str]]:
        """Yield workers from near to far: of the same device, NVLink domain and host, then all.

        Each ring contains the ones before it, and the worker itself. A worker without a device or domain
        has no such ring. The rings are live views: workers must not be added or removed while iterating.
        """
        if place := self._places.get(worker):
            for ring in _rings_of(place):
                yield self._rings[ring].keys()
        yield self._everywhere.keys()

    # ---- links -----------------------------------------------------------------------

    def link(self, source: str, target: str, by_comms: bool = False) -> Link:
        """Return the class of link from a worker to another; to itself it is that of one device.

        Parameters
        ----------
        by_comms
            Whether the bytes go by Dask's comms, as ordinary dependencies do. Otherwise the exchange takes
            the fastest link between the two.
        """
        return self.way(source, target, by_comms)[0]

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

    def speed(self, source: str, target: str) -> Speed:
        """Return the speed of the link between two workers: of the pair, the host or the class."""
        return self.way(source, target)[1]

    def way(self, source: str, target: str, by_comms: bool = False) -> tuple[Link, Speed]:
        """Return the link between two workers with its speed, see :meth:`link`."""
        here, there = self._places.get(source), self._places.get(target)
        if here is None or there is None:
            link = Link.SAME_DEVICE if source == target else Link.TCP
            return link, self._classes[link].speed
        link = Link.SAME_DEVICE if source == target else self._link(here, there, by_comms)
        if self._overrides and (own := self._overrides.speed(_pair(link, here, there))):
            return link, own
        return link, self._usual(link, here, there).speed

    def _usual(self, link: Link, here: Place, there: Place) -> SpeedEstimate:
        """Return the estimate that transfers count for: of the host if it has its own, else of the class."""
        own = self._host_averages.get((here.host, link)) if here.host == there.host else None
        return own or self._classes[link]

    def tier_speed(self, link: Link, worker: str | None = None) -> Speed:
        """Return the speed between two tiers: on the host of a worker, or without one on most hosts."""
        place = self._places.get(worker) if worker is not None else None
        return (self._usual(link, place, place) if place else self._classes[link]).speed

    def seconds(self, source: str, target: str, nbytes: int, by_comms: bool = False) -> float:
        """Return the seconds that so many bytes take from a worker to another."""
        return self.way(source, target, by_comms)[1].seconds(nbytes)

    def connection_setup(self, link: Link, source: str, target: str) -> float:
        """Return the seconds to add to the first transfer of Dask's comms over a link; 0 of later ones."""
        return self._setup.seconds(link, source, target)

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
        """Learn from transfers that are over.

        Parameters
        ----------
        source, target
            Workers.
        nbytes, seconds, transfers
            The sums of their bytes and seconds, and their number. Empty ones, and those that took no time,
            are ignored.
        by_comms
            Whether they went by Dask's comms.
        """
        if nbytes < 1 or seconds <= 0 or transfers < 1:
            return
        link = self.link(source, target, by_comms)
        here, there = self._places.get(source), self._places.get(target)
        if here is None or there is None:
            self._classes[link].observe(nbytes, seconds, transfers)
            return
        usual = self._usual(link, here, there)
        expected = transfers * usual.speed.latency + nbytes / usual.speed.bandwidth
        if by_comms and self._setup.observe(link, source, target, seconds - expected):
            return
        self._overrides.observe(_pair(link, here, there), usual.speed, nbytes, seconds, transfers)
        usual.observe(nbytes, seconds, transfers)

    def learned(self) -> dict[Link, Speed]:
        """Return the current speed of each class of link."""
        return {link: average.speed for link, average in self._classes.items()}

    @property
    def overrides(self) -> int:
        """Count the pairs with a speed of their own."""
        return len(self._overrides)


def _rings_of(place: Place) -> Iterator[tuple[str, ...]]:
    if place.device is not None:
        yield "device", place.host, place.device
    if place.nvlink is not None:
        yield "nvlink", place.nvlink
    yield "host", place.host


def _pair(link: Link, here: Place, there: Place) -> Pair:
    """Return the id of a link between two places, the same both ways; it outlives the workers there."""
    if link in BETWEEN_HOSTS:
        one, other = here.host, there.host
    else:
        one, other = here.device or here.host, there.device or there.host
    return (link, one, other) if one <= other else (link, other, one)
