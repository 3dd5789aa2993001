"""Maintain the scheduler's topology of workers, from their reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dask_gpurt.config.values import PATHS
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.exchange.paths import COMMS
from dask_gpurt.topology import Link, Place, Topology
from dask_gpurt.topology.hosts import Host

#: Links that each path of the exchange may cross. Transfers over other links are not samples of these.
LINKS_OF_PATH = dict(
    zip(
        PATHS,
        (
            {Link.SHARED_MEMORY},
            {Link.SAME_DEVICE, Link.NVLINK, Link.PCIE},
            {Link.LOOPBACK, Link.RDMA, Link.TCP},
        ),
        strict=True,
    )
)


class SchedulerTopology:
    """Keep a :class:`Topology` in step with the workers of a scheduler.

    ``moved``: called with a worker that has reported its place.
    """

    def __init__(self, scheduler: SchedulerServer, moved: Callable[[str], None]):
        self._scheduler = scheduler
        self._moved = moved
        self.topology = Topology()
        self._hosts: dict[str, Host] = {}

    # ---- places of workers -------------------------------------------------------------

    def placed(self, worker: str, place: dict[str, Any], name: str, devices: dict[str, Any]) -> None:
        """Place a worker that reports its place and what its host has (stream handler)."""
        if worker in self._scheduler.workers:
            reported = Place(**place)
            self.topology.add(worker, reported)
            host = Host.of(name, devices)
            if host.gpus or reported.host not in self._hosts:  # not where NVML has failed for this worker
                self._hosts[reported.host] = host
                self.topology.describe(reported.host, host.joins)
            self._moved(worker)

    def remove(self, worker: str) -> None:
        """Forget a worker that has left."""
        place = self.topology.place(worker)
        self.topology.remove(worker)
        if place is not None and not self.topology.on_host(place.host):
            self._hosts.pop(place.host, None)

    # ---- speeds of links ---------------------------------------------------------------

    def traffic(self, worker: str, totals: Sequence[tuple[str, str, int, float, int]]) -> None:
        """Learn speeds from the transfers that a worker reports (stream handler)."""
        for peer, path, nbytes, seconds, transfers in totals:
            if not self.topology.place(peer) or not self.topology.place(worker):
                continue  # one of them has left, or has not reported its place yet
            if self.topology.link(peer, worker, path == COMMS) in LINKS_OF_PATH.get(path, ()):
                self.topology.observe(peer, worker, nbytes, seconds, transfers, path == COMMS)

    def describe(self) -> dict[str, Any]:
        """Return the topology as plain values (handler)."""
        names = self._names()
        workers = {}
        for worker in self._scheduler.workers:
            place = self.topology.place(worker)
            if place is not None and place.host in names:
                known = any(gpu.id == place.device for gpu in self._hosts[place.host].gpus)
                workers[worker] = {"host": names[place.host], "gpu": place.device if known else None}
        return {
            "speeds": {str(link): vars(speed) for link, speed in self.topology.measured().items()},
            "hosts": {names[host]: described.to_dict() for host, described in self._hosts.items()},
            "workers": workers,
        }

    def _names(self) -> dict[str, str]:
        """Return the names of hosts by their ids; hosts that share a name keep their ids."""
        count = Counter(host.name for host in self._hosts.values())
        return {id: host.name if count[host.name] == 1 else id for id, host in self._hosts.items()}
