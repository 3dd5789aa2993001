"""Choose, of several replicas of an ordinary dependency, the one over the cheapest link."""

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
    """Return how far workers are: how often the time of a fetch from the nearest has to be doubled.

    Differences below that are noise, and would send all fetches to one of many that are equally far.

    Parameters
    ----------
    seconds
        The time that a fetch takes, by worker, above 0.
    """
    nearest = min(seconds.values(), default=0.0)
    return {worker: int(math.log2(time / nearest)) for worker, time in seconds.items()}


class ReplicaSelector:
    """Order the workers that a worker fetches from. On the event loop.

    Parameters
    ----------
    worker
        The Dask worker.
    links
        From its peers.
    """

    def __init__(self, worker: WorkerServer, links: Links, metrics: Metrics):
        self._state = worker.state
        self._links = links
        self._metrics = metrics
        self._patches = PatchSet()

    def install(self) -> None:
        """Replace Dask's order with ours, unless Dask's is not as it is known."""
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
            # After an error here the worker still has to fetch its dependencies.
            except Exception as error:
                self._metrics.fallback(Fallback.EXCHANGE_REPLICA_CHOICE, repr(error))
                found: Iterator[Any] = dasks(state)
                return found
            return _served(state, queue)

        return select

    def _queue(self, state: WorkerStateMachine) -> list[tuple[Any, ...]]:
        """Queue the workers as Dask does: by priority, by distance, by the number of tasks, at random."""
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
            else:  # by what Dask goes by
                speed = SHIPPED[Link.SHARED_MEMORY if get_address_host(worker) == host else Link.TCP]
            seconds[worker] = speed.seconds(nbytes)
        return seconds


def _served(state: WorkerStateMachine, queue: list[tuple[Any, ...]]) -> Iterator[tuple[str, Any]]:
    """Yield the queue in order. Between two of them Dask takes tasks, which may have been in several."""
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
