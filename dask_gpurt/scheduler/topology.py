"""Maintain the scheduler's topology of workers, from their reports or from a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dask_gpurt.config.values import PATHS
from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.dask_hooks.worker import call_soon
from dask_gpurt.exchange.paths import COMMS
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import HOST_HANDLER, LINKS_HANDLER, PLACE_OP, TOPOLOGY_HANDLER, TRAFFIC_OP, is_off
from dask_gpurt.scheduler.worker_calls import ask
from dask_gpurt.topology import HostLinks, Link, Place, Speed, Topology
from dask_gpurt.topology.estimate import FIRST_TRANSFER_S
from dask_gpurt.topology.file import Description, as_values, load, parse_host
from dask_gpurt.topology.hosts import Host

#: Seconds after which another worker of a host is asked to describe it.
HOST_TIMEOUT_S = 60.0
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

    Parameters
    ----------
    scheduler
        Dask's scheduler.
    file
        The setting ``gpurt.topology.file``.

    Raises
    ------
    TopologyError
        If the file is invalid.
    """

    def __init__(self, scheduler: SchedulerServer, file: str | None, metrics: Metrics):
        self._scheduler = scheduler
        self._metrics = metrics
        self._file = load(file) if file is not None else Description()
        self.topology = Topology(self._file.speeds, FIRST_TRANSFER_S)
        self._hosts: dict[str, Host] = {}
        self._asked: set[str] = set()
        self._patches = PatchSet()

    def install(self) -> None:
        """Register the handlers that workers and clients call."""
        operations = {PLACE_OP: self.placed, TRAFFIC_OP: self.traffic}
        self._patches.add_handlers(self._scheduler.stream_handlers, operations, off=is_off)
        handlers = {TOPOLOGY_HANDLER: self.describe, LINKS_HANDLER: self.links}
        self._patches.add_handlers(self._scheduler.handlers, handlers, off=is_off)

    def uninstall(self) -> None:
        """Answer no longer."""
        self._patches.restore()

    # ---- places of workers -------------------------------------------------------------

    def placed(self, worker: str, place: dict[str, Any], name: str, visible: str | None) -> None:
        """Place a worker that reports its host and devices (stream handler)."""
        if worker not in self._scheduler.workers:
            return
        reported = Place(**place)
        host, gpu = self._listed(worker, name)
        if host is None:
            self.topology.add(worker, reported)
            self._ask_soon(reported.host, name)
        else:
            self.topology.add(worker, self._place_in(host, gpu, worker, reported, visible))
            if not self.topology.described(host.name):
                self._keep(host.name, host)

    def _listed(self, worker: str, name: str) -> tuple[Host | None, str | None]:
        """Return the host and the GPU that the file lists for a worker; None for each that it does not."""
        workers, alias = self._file.workers, str(self._scheduler.workers[worker].name)
        name, gpu = workers.get(worker) or workers.get(alias) or (name, None)
        return self._file.hosts.get(name), gpu

    def _place_in(
        self, host: Host, listed: str | None, worker: str, reported: Place, visible: str | None
    ) -> Place:
        """Place a worker whose host is in the file: on the GPU listed there, else on the one it reports."""
        by_id = {gpu.id: gpu for gpu in host.gpus}
        gpu = by_id.get(listed or reported.device or "") or host.find(visible)
        if gpu is None and reported.device is not None:
            self._metrics.fallback(Fallback.TOPOLOGY_GPU_NOT_IN_FILE, f"the file lists no GPU for {worker}")
            return replace(reported, host=host.name)
        rdma = worker.startswith("ucx")
        return host.place(host.name, gpu, numa=reported.numa, rdma=rdma, by_tcp=reported.by_tcp)

    def _ask_soon(self, host: str, name: str) -> None:
        if not self.topology.described(host) and host not in self._asked:
            self._asked.add(host)
            call_soon(self._scheduler, self._ask, host, name)

    async def _ask(self, host: str, name: str) -> None:
        """Have one worker of a host describe the host; try the next worker if that one does not answer."""
        try:
            for worker in list(self.topology.on_host(host)):
                values = await ask(self._scheduler, worker, HOST_HANDLER, HOST_TIMEOUT_S)
                if isinstance(values, Mapping) and self.topology.on_host(host):
                    self._keep(host, parse_host(name, values))
                    return
        finally:
            self._asked.discard(host)

    def _keep(self, host: str, described: Host) -> None:
        known = described.known()
        # Measured speeds in the file take precedence over speeds derived from a link's generation.
        speeds = {link: speed for link, speed in known.speeds.items() if link not in self._file.speeds}
        self._hosts[host] = described
        self.topology.describe(host, HostLinks(known.links, speeds))

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

    def links(self, worker: str, peers: Sequence[str]) -> dict[str, Any]:
        """Return the links from peers to a worker, and the speeds of all link classes on its host (handler).

        Returns
        -------
        dict
            ``links``: class, bandwidth and latency by peer, if the places of both are known. ``classes``:
            bandwidth and latency by class.
        """
        placed = [peer for peer in peers if self.topology.place(peer) and self.topology.place(worker)]
        return {
            "links": {
                peer: (str(self.topology.link(peer, worker)), *_figures(self.topology.speed(peer, worker)))
                for peer in placed
            },
            "classes": {str(link): _figures(self.topology.tier_speed(link, worker)) for link in Link},
        }

    def describe(self) -> dict[str, Any]:
        """Return the topology in the format of a topology file (handler)."""
        names = self._names()
        workers = {}
        for worker in self._scheduler.workers:
            place = self.topology.place(worker)
            if place is not None and place.host in names:
                known = any(gpu.id == place.device for gpu in self._hosts[place.host].gpus)
                workers[worker] = names[place.host], place.device if known else None
        hosts = {names[host]: described for host, described in self._hosts.items()}
        return as_values(Description(self.topology.measured(), hosts, workers))

    def _names(self) -> dict[str, str]:
        """Return the names of hosts by their ids; hosts that share a name keep their ids."""
        count = Counter(host.name for host in self._hosts.values())
        return {id: host.name if count[host.name] == 1 else id for id, host in self._hosts.items()}


def _figures(speed: Speed) -> tuple[float, float]:
    return speed.bandwidth, speed.latency
