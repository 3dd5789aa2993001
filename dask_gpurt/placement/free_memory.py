"""Look up free memory of workers and tiers of data, in the workers' ledgers or in Dask's own counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from dask.typing import Key
from dask.utils import key_split
from sortedcontainers import SortedKeyList

from dask_gpurt.dask_hooks.types import WorkerState
from dask_gpurt.memory.ledger import ClusterMemory, FreeMemory
from dask_gpurt.memory.tiers import Tier


class Headroom(Protocol):
    """Look up the reported free memory of all workers.

    Each decision calls this several times, so implementations only use state on the scheduler.
    """

    def free_memory(self, worker: str) -> FreeMemory:
        """Return the free memory of a worker."""

    def has_reported(self, worker: str) -> bool:
        """Return whether a worker has reported its memory.

        If not, its free memory is an estimate, and its capacity for spilled data is unknown.
        """

    def tier(self, worker: str, key: Key) -> Tier:
        """Return the tier of a key on a worker that holds it; ``Tier.DEVICE`` if unknown."""


class LedgerHeadroom:
    """Look up free memory in the workers' ledgers, or in Dask's counts for a worker without a ledger.

    Parameters
    ----------
    ledgers
        The ledgers of all workers.
    workers
        Dask's ``WorkerState`` by address.
    """

    def __init__(self, ledgers: ClusterMemory, workers: Mapping[str, WorkerState]):
        self._ledgers = ledgers
        self._workers = workers

    def free_memory(self, worker: str) -> FreeMemory:
        """Return the free memory of a worker; infinite if it has left or has no memory limit."""
        return self._ledgers.room(worker) or self._known_to_dask(worker)

    def has_reported(self, worker: str) -> bool:
        """Return whether a worker has sent its ledger."""
        return self._ledgers.room(worker) is not None

    def _known_to_dask(self, worker: str) -> FreeMemory:
        state = self._workers.get(worker)
        if not state or not state.memory_limit:
            return FreeMemory(math.inf)
        return FreeMemory(state.memory_limit - state.nbytes, live=state.memory_limit)

    def tier(self, worker: str, key: Key) -> Tier:
        """Return the tier with most of the bytes of the key's prefix on a worker."""
        if not self._ledgers.spilled(worker):
            return Tier.DEVICE
        return self._ledgers.fullest(worker, key_split(key)) or Tier.DEVICE


class FreeMemoryIndex:
    """Track free memory while replicas are assigned, counting each replica immediately. Pure.

    Parameters
    ----------
    look_up
        Returns the free memory of a worker; called once per worker.
    """

    def __init__(self, look_up: Callable[[str], FreeMemory]):
        self._look_up = look_up
        self._workers: dict[str, FreeMemory] = {}
        #: The workers by free bytes of the live tier, and of all tiers, ascending; built on first use.
        self._orders: list[SortedKeyList] = []

    def __getitem__(self, worker: str) -> FreeMemory:
        memory = self._workers.get(worker)
        if memory is None:
            memory = self._workers[worker] = self._look_up(worker)
        return memory

    def take(self, worker: str, nbytes: float) -> None:
        """Count ``nbytes`` as used in the live tier of a worker; negative to release."""
        memory = self[worker]
        orders = [order for order in self._orders if worker in order]
        for order in orders:
            order.remove(worker)
        self._workers[worker] = memory._replace(free=memory.free - nbytes)
        for order in orders:
            order.add(worker)

    def most_free(self, workers: Iterable[str]) -> tuple[Iterator[str], Iterator[str]]:
        """Return all workers in descending order of free bytes, of the live tier and of all tiers.

        Parameters
        ----------
        workers
            All workers; used on the first call only.
        """
        if not self._orders:
            names = list(workers)
            self._orders = [
                SortedKeyList(names, key=lambda worker: (self[worker].free, worker)),
                SortedKeyList(names, key=lambda worker: (self[worker].free + self[worker].below, worker)),
            ]
        live, total = self._orders
        return reversed(live), reversed(total)
