"""Describe a host: its GPUs, NICs and links, and the places and speeds derived from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dask_gpurt.topology.links import SHIPPED, Link, Speed
from dask_gpurt.topology.model import HostLinks, Place

#: The fraction of the nominal bandwidth that a copy reaches, measured on H200: 391 of 450 GB/s, and 53 of 63.
NVLINK_SHARE, PCIE_SHARE = 391 / 450, 53 / 63
#: Nominal bytes per second in one direction, of one NVLink and of one PCIe lane, by generation.
NVLINK_RATES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
PCIE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
#: Distances of two devices on the PCIe bus, nearest first, in the notation of ``nvidia-smi topo``.
PCIE_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")

#: A pair of devices, by their ids.
Devices = frozenset[str]


class Lanes(NamedTuple):
    """Hold the number of NVLinks or PCIe lanes of a device, and their generation."""

    generation: int
    number: int


class GpuLink(NamedTuple):
    """Describe the link between two GPUs: its class, and the number of NVLinks or the PCIe path."""

    link: Link
    nvlinks: int = 0
    path: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.link, f"x{self.nvlinks}" if self.nvlinks else "", self.path)))

    @classmethod
    def parse(cls, text: str) -> GpuLink:
        """Parse the output of ``str``: "nvlink x18", "pcie PIX", "shared-memory".

        Raises
        ------
        ValueError
            If the text is not a link.
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
    """Describe a GPU or a MIG instance.

    Parameters
    ----------
    id
        Its UUID, "GPU-…" or "MIG-…".
    index
        The index of the GPU in PCI bus order; a MIG instance has the index of its GPU.
    name
        The product name.
    parent
        For a MIG instance, the UUID of its GPU.
    nvlink, pcie
        Its active NVLinks, and its PCIe lanes.
    fabric
        An id of the NVLink domain, if the domain spans hosts.
    """

    id: str
    index: int
    name: str = ""
    parent: str | None = None
    nvlink: Lanes | None = None
    pcie: Lanes | None = None
    fabric: str | None = None


@dataclass(frozen=True)
class Nic:
    """Describe an active network device; its nominal ``speed`` is in bytes per second."""

    name: str
    speed: float | None = None
    rdma: bool = False


@dataclass(frozen=True)
class Host:
    """Describe one host.

    Parameters
    ----------
    name
        Its host name.
    joins
        The link between each pair of GPUs, by their ids.
    """

    name: str
    gpus: tuple[Gpu, ...] = ()
    joins: Mapping[Devices, GpuLink] = field(default_factory=dict)
    nics: tuple[Nic, ...] = ()

    @property
    def rdma(self) -> bool:
        """Return whether the host has an RDMA NIC."""
        return any(nic.rdma for nic in self.nics)

    def matrix(self) -> list[list[GpuLink]]:
        """Return the matrix of links between GPUs; the diagonal is :data:`SELF`."""
        return [
            [SELF if one is other else self.joins[frozenset((one.id, other.id))] for other in self.gpus]
            for one in self.gpus
        ]

    def find(self, visible: str | None) -> Gpu | None:
        """Return the GPU that a process computes on; None if it is unknown.

        Parameters
        ----------
        visible
            The process's ``CUDA_VISIBLE_DEVICES``, of which the first counts; None if all are visible.
        """
        first = "0" if visible is None else visible.split(",")[0].strip()
        if first.isdecimal():
            found = (gpu for gpu in self.gpus if gpu.index == int(first))
        else:  # CUDA accepts a prefix of an id too
            found = (gpu for gpu in self.gpus if first and _is_named(gpu, first))
        return next(found, None)

    def place(
        self,
        host: str,
        gpu: Gpu | None,
        *,
        rdma: bool = False,
        by_tcp: bool = False,
    ) -> Place:
        """Return the place of a process that computes on a GPU, or on the CPU.

        Parameters
        ----------
        host
            The id of this host, which identifies links within it.
        rdma
            Whether the process sends over RDMA if the host has an RDMA NIC.
        """
        rdma = rdma and self.rdma
        if gpu is None:
            return Place(host, rdma=rdma, by_tcp=by_tcp)
        return Place(host, gpu.id, self._domain(host, gpu), rdma, by_tcp)

    def _domain(self, host: str, gpu: Gpu) -> str | None:
        """Return the NVLink domain of a GPU; a domain within this host is named after its first GPU."""
        if gpu.fabric is not None:
            return gpu.fabric
        for domain in self.nvlink_domains():
            if gpu in domain:
                return f"{host}/{domain[0].index}"
        return None

    def nvlink_domains(self) -> Iterator[list[Gpu]]:
        """Yield disjoint groups of GPUs in which all pairs are connected by NVLink."""
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
        """Return the links within this host, with speeds derived from their generations and numbers."""
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
