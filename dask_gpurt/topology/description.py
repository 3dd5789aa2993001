"""Describe a topology as plain values: for a person, a program, and from a worker to the scheduler.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from dask_gpurt.topology.hosts import Gpu, Host, Nic
from dask_gpurt.topology.links import OF_GPUS, Link, Speed


@dataclass(frozen=True)
class Description:
    """Hold what is known of hosts, of the links between them, and of the places of workers.

    Parameters
    ----------
    workers
        The host of each worker, and the id of its GPU if it has one, by address.
    """

    speeds: Mapping[Link, Speed] = field(default_factory=dict)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    workers: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Description:
        """Restore a description from the output of :meth:`to_dict`."""
        return cls(
            {Link(link): Speed(**speed) for link, speed in values["speeds"].items()},
            {name: host_of(name, host) for name, host in values["hosts"].items()},
            {worker: (place["host"], place.get("gpu")) for worker, place in values["workers"].items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serialisable values."""
        return {
            "speeds": {str(link): vars(speed) for link, speed in self.speeds.items()},
            "hosts": {name: host_values(host) for name, host in self.hosts.items()},
            "workers": {
                worker: {"host": host, **({"gpu": gpu} if gpu is not None else {})}
                for worker, (host, gpu) in self.workers.items()
            },
        }

    def links(self) -> list[Link]:
        """Return the classes of link that the hosts can have, and those whose speed is given."""
        hosts = self.hosts.values()
        absent = {
            *(() if any(host.gpus for host in hosts) else OF_GPUS),
            *(() if any(host.rdma for host in hosts) else (Link.RDMA,)),
        }
        return [link for link in Link if not hosts or link in self.speeds or link not in absent]


def host_values(host: Host) -> dict[str, Any]:
    """Return the values of one host, without its name."""
    return {
        "gpus": [_without_none(gpu) for gpu in host.gpus],
        "links": [[str(join) for join in row] for row in host.matrix()],
        "nics": [_without_none(nic) for nic in host.nics],
    }


def _without_none(item: Gpu | Nic) -> dict[str, Any]:
    return {name: value for name, value in vars(item).items() if value is not None}


def host_of(name: str, values: Mapping[str, Any]) -> Host:
    """Restore a host from the output of :func:`host_values`."""
    gpus = tuple(Gpu(**gpu) for gpu in values["gpus"])
    joins = {
        frozenset((one.id, other.id)): Link(values["links"][i][j])
        for (i, one), (j, other) in combinations(enumerate(gpus), 2)
    }
    return Host(name, gpus, joins, tuple(Nic(**nic) for nic in values["nics"]))
