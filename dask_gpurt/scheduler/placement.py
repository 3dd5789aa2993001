"""Run placement on the scheduler, and feed it with events and reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.memory.ledger import ClusterMemory
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import GatedPlacement, LedgerHeadroom, Placement
from dask_gpurt.protocol import PLACE_OP
from dask_gpurt.topology import Topology


class SchedulerPlacement:
    """Install a :class:`Placement` on a scheduler. The topology must listen to the workers already.

    Parameters
    ----------
    topology, ledgers
        The places of workers, and the contents of their tiers.
    """

    def __init__(
        self,
        scheduler: SchedulerServer,
        topology: Topology,
        ledgers: ClusterMemory,
        metrics: Metrics,
    ):
        self._scheduler = scheduler
        headroom = LedgerHeadroom(ledgers, scheduler.workers)
        self._placement = Placement(scheduler, topology, headroom, metrics)
        self._gate = GatedPlacement(self._placement, scheduler, topology, metrics)
        self._patches = PatchSet()

    def install(self) -> None:
        """Start choosing workers, whenever the gate finds that it can matter."""
        self._patches.put_item(self._scheduler.stream_handlers, PLACE_OP, self._after_place)
        self._gate.bind()

    def _after_place(self, original: Callable[..., None]) -> Callable[..., None]:
        def on_place(worker: str, **message: Any) -> None:
            original(worker, **message)
            self._gate.on_place_changed(worker)

        return on_place

    def uninstall(self) -> None:
        """Restore Dask's choices."""
        self._gate.unbind()
        self._patches.restore()

    def memory_changed(self, worker: str) -> None:
        """Note that a worker has reported its tiers."""
        self._gate.on_memory_reported(worker)

    def submitted(self) -> None:
        """Note a new graph, none of whose tasks has been placed."""
        self._gate.on_graph()

    def remove(self, worker: str) -> None:
        """Note that Dask has removed a worker."""
        self._gate.on_worker_removed(worker)
