"""Fetch dependencies from the replica with the fastest link."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Any

from distributed.comm.addressing import get_address_host

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.patch import Method
from dask_gpurt.dask_hooks.types import WorkerServer, WorkerStateMachine
from dask_gpurt.dask_hooks.worker import wrap_replica_choice
from dask_gpurt.exchange.links import Links
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.topology import SHIPPED, Link


def farness(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the distance of each worker: log2 of its fetch time over the nearest worker's, rounded down.

    Smaller differences are noise, and would send all fetches to one of many equally distant workers.

    Parameters
    ----------
    seconds
        The fetch time by worker, greater than 0.
    """
    nearest = min(seconds.values(), default=0.0)
    return {worker: int(math.log2(time / nearest)) for worker, time in seconds.items()}


class ReplicaSelector:
    """Order the peers that a worker fetches from. On the event loop.

    Parameters
    ----------
    worker
        The Dask worker.
    links
        The worker's links from its peers.
    """

    def __init__(self, worker: WorkerServer, links: Links, metrics: Metrics):
        self._state = worker.state
        self._links = links
        self._metrics = metrics
        self._patches = PatchSet()

    def install(self) -> None:
        """Replace Dask's order, if this version of Dask is supported."""
        try:
            wrap_replica_choice(self._patches, self._state, self._override)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.EXCHANGE_REPLICA_CHOICE, str(error))

    def uninstall(self) -> None:
        """Restore Dask's order."""
        self._patches.restore()

    def _override(self, dasks: Method) -> Method:
        def select(state: WorkerStateMachine) -> Iterator[Any]:
            try:
                queue = self._queue(state)
            # Fall back to Dask's order: the worker must fetch its dependencies whatever fails here.
            except Exception as error:
                self._metrics.fallback(Fallback.EXCHANGE_REPLICA_CHOICE, repr(error))
                found: Iterator[Any] = dasks(state)
                return found
            return _served(state, queue)

        return select

    def _queue(self, state: WorkerStateMachine) -> list[tuple[Any, ...]]:
        """Queue the peers as Dask does: by priority, distance, number of tasks, then at random."""
        for worker in [worker for worker, tasks in state.data_needed.items() if not tasks]:
            del state.data_needed[worker]
        ready = {
            worker: tasks
            for worker, tasks in state.data_needed.items()
            if worker not in state.in_flight_workers and worker not in state.busy_workers
        }
        sizes = {worker: tasks.peek().get_nbytes() for worker, tasks in ready.items()}
        far = farness(self._seconds(state.address, sizes))
        return [
            (tasks.peek().priority, far[worker], -len(tasks), state.rng.random(), worker, tasks)
            for worker, tasks in ready.items()
        ]

    def _seconds(self, here: str, sizes: Mapping[str, int]) -> dict[str, float]:
        known, host = self._links.known(sizes), get_address_host(here)
        seconds = {}
        for worker, nbytes in sizes.items():
            if link := known.get(worker):
                speed = link.speed
            else:  # whether the peer is on the same host, as Dask does
                speed = SHIPPED[Link.SHARED_MEMORY if get_address_host(worker) == host else Link.TCP]
            seconds[worker] = speed.seconds(nbytes)
        return seconds


def _served(state: WorkerStateMachine, queue: list[tuple[Any, ...]]) -> Iterator[tuple[str, Any]]:
    """Yield the queue in order. Between two items Dask takes tasks, which other items may contain too."""
    heapq.heapify(queue)
    while queue:
        _, far, waiting, chance, worker, tasks = heapq.heappop(queue)
        if tasks and -waiting != len(tasks):
            heapq.heappush(queue, (tasks.peek().priority, far, -len(tasks), chance, worker, tasks))
            continue
        if tasks:
            yield worker, tasks
        if not tasks:
            del state.data_needed[worker]
