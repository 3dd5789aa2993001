"""Describe a host: its GPUs, the links between them, its RDMA NICs, and the places of processes on it.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from dask_gpurt.topology.links import Link
from dask_gpurt.topology.model import Place

#: A pair of devices, by their ids.
Devices = frozenset[str]


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
    fabric
        An id of the NVLink domain, if the domain spans hosts.
    """

    id: str
    index: int
    name: str = ""
    parent: str | None = None
    fabric: str | None = None


@dataclass(frozen=True)
class Host:
    """Describe one host.

    Parameters
    ----------
    name
        Its host name.
    joins
        The link between each pair of GPUs, by their ids.
    nics
        The names of RDMA devices that are up.
    """

    name: str
    gpus: tuple[Gpu, ...] = ()
    joins: Mapping[Devices, Link] = field(default_factory=dict)
    nics: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, values: Mapping[str, Any]) -> Host:
        """Restore a host from the output of :meth:`to_dict`."""
        gpus = tuple(Gpu(**gpu) for gpu in values["gpus"])
        joins = {
            frozenset((one.id, other.id)): Link(values["links"][i][j])
            for (i, one), (j, other) in combinations(enumerate(gpus), 2)
        }
        return cls(name, gpus, joins, tuple(values["nics"]))

    def to_dict(self) -> dict[str, Any]:
        """Return all but the name as JSON-serialisable values."""
        return {
            "gpus": [
                {name: value for name, value in vars(gpu).items() if value is not None} for gpu in self.gpus
            ],
            "links": [list(map(str, row)) for row in self.matrix()],
            "nics": list(self.nics),
        }

    def matrix(self) -> list[list[Link]]:
        """Return the matrix of links between GPUs."""
        return [
            [self.joins.get(frozenset((one.id, other.id)), Link.SAME_DEVICE) for other in self.gpus]
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
        rdma = rdma and bool(self.nics)
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
        return [other for other in others if self.joins.get(frozenset((gpu.id, other.id))) is Link.NVLINK]


def _is_named(gpu: Gpu, beginning: str) -> bool:
    return any(name.lower().startswith(beginning.lower()) for name in (gpu.id, gpu.parent or ""))
