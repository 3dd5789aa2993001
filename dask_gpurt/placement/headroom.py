"""Look up the free memory of workers, as they have reported it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from dask_gpurt.dask_hooks.types import WorkerState
from dask_gpurt.memory.ledger import ClusterMemory, FreeMemory


class Headroom(Protocol):
    """Look up the reported free memory of all workers.

    Each decision calls this several times, so implementations only use state on the scheduler.
    """

    def free_memory(self, worker: str) -> FreeMemory:
        """Return the free memory of a worker."""


class LedgerHeadroom:
    """Look up free memory in the workers' ledgers, or in Dask's counts for a worker without a ledger."""

    def __init__(self, ledgers: ClusterMemory, workers: Mapping[str, WorkerState]):
        self._ledgers = ledgers
        self._workers = workers

    def free_memory(self, worker: str) -> FreeMemory:
        """Return the free memory of a worker; infinite if it has left or has no memory limit."""
        return self._ledgers.room(worker) or self._known_to_dask(worker)

    def _known_to_dask(self, worker: str) -> FreeMemory:
        state = self._workers.get(worker)
        if not state or not state.memory_limit:
            return FreeMemory(math.inf)
        return FreeMemory(state.memory_limit - state.nbytes, live=state.memory_limit)
