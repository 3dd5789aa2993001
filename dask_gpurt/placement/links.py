"""Have Dask reckon with slow links between hosts, and fill one host after another with root tasks.

Dask assumes one bandwidth for all links, the mean of the speeds of recent transfers. Where workers share
hosts, fast transfers inside these hide how slow those between them are, so that Dask moves data too readily.

Decisions and their figures: ``docs/decisions/placement.md``.
"""

from __future__ import annotations

import logging
from itertools import chain, islice, pairwise

from dask_gpurt.dask_hooks.scheduler import Overrides
from dask_gpurt.dask_hooks.seams import ROOT_TASKS
from dask_gpurt.dask_hooks.types import SchedulerState, WorkerState
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.topology import Link, Topology

logger = logging.getLogger(__name__)

#: Links differ if one inside a host is as many times as fast as a worker's share of one between hosts: speeds
#: are learnt from few transfers, so that a smaller ratio may be chance.
FACTOR = 2.0
#: The most hosts whose links are compared.
MAX_HOSTS = 16
#: All workers with a free thread are compared if they are so few.
FEW = 64


class SlowLinks:
    """Change what Dask assumes, while workers share hosts that slower links of TCP join.

    Otherwise Dask's own methods are in place, and its estimate of the bandwidth.
    """

    def __init__(self, state: SchedulerState, topology: Topology, metrics: Metrics):
        self._state = state
        self._topology = topology
        self._metrics = metrics
        self._overrides = Overrides(lambda name, why: metrics.fallback(Fallback.PLACEMENT, why, name))
        #: The workers of one host after another, and their positions in that order.
        self._workers: list[str] = []
        self._positions: dict[str, int] = {}
        #: Two workers of one host, and two of different ones that TCP joins, if there are such.
        self._near: tuple[str, str] | None = None
        self._far: tuple[str, str] | None = None
        #: The position of the worker that got the latest root task.
        self._latest = 0
        self.is_on = False

    # ---- events ------------------------------------------------------------------------

    def on_places_changed(self) -> None:
        """Note that a worker has joined or left, or that its place has changed."""
        hosts = [list(self._topology.on_host(host)) for host in self._topology.hosts]
        self._workers = [*chain.from_iterable(hosts)]
        self._positions = {worker: position for position, worker in enumerate(self._workers)}
        self._latest = 0
        self._near = next(((each[0], each[1]) for each in hosts if len(each) > 1), None)
        between = ((here[0], there[0]) for here, there in pairwise(islice(hosts, MAX_HOSTS)))
        self._far = next((pair for pair in between if self._link(*pair) is Link.TCP), None)
        self.on_heartbeat()

    def _link(self, one: str, other: str) -> Link:
        return self._topology.link(one, other, by_comms=True)

    def on_heartbeat(self) -> None:
        """Compare the speeds of links, and set the bandwidth that Dask has updated by a heartbeat."""
        speed = self._speed()
        if speed is None:
            if self.is_on:
                self.unbind()
        else:
            if not self.is_on:
                self._bind()
            self._state.bandwidth = round(speed)

    def _speed(self) -> float | None:
        """Return a worker's share of a slow link between hosts; None if links inside these are no faster."""
        if self._near is None or self._far is None:
            return None
        bandwidth = self._topology.way(*self._far, by_comms=True)[1].bandwidth
        # The workers of a host share its link, and mostly send at the same time.
        share = bandwidth * len([*self._topology.hosts]) / len(self._workers)
        near = self._topology.way(*self._near, by_comms=True)[1].bandwidth
        return share if near >= FACTOR * share else None

    def _bind(self) -> None:
        logger.info("Links between hosts are slow, with which Dask reckons")
        self._metrics.add("placement.engaged")
        self.is_on = True
        self._overrides.replace(ROOT_TASKS, self._state, lambda name: getattr(self, f"_{name}"))

    def unbind(self) -> None:
        """Restore Dask's choices. Heartbeats bring back its estimate of the bandwidth."""
        self.is_on = False
        self._overrides.restore()

    # ---- root tasks --------------------------------------------------------------------

    def _decide_worker_rootish_queuing_enabled(self) -> WorkerState | None:
        """Return one of the least busy workers, next to that of the task before, which may be a neighbour."""
        idle, workers = self._state.idle_task_count, self._state.workers
        if len(idle) > FEW:
            for position in chain(range(self._latest, len(self._workers)), range(self._latest)):
                ws = workers.get(self._workers[position])
                if ws is not None and len(ws.processing) < ws.nthreads and ws in idle:
                    self._latest = position
                    return ws
        return min(idle, key=self._rank, default=None)

    def _rank(self, ws: WorkerState) -> tuple[float, int]:
        return len(ws.processing) / ws.nthreads, self._positions.get(ws.address, -1)
