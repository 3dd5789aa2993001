"""Placement on a cluster: told of what the workers report, and asked for its reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.types import SchedulerServer, SchedulerTask
from dask_gpurt.memory.ledger import Picture
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import LedgerHeadroom, Placement
from dask_gpurt.plugins.topology_reports import PLACE
from dask_gpurt.topology import Topology


class SchedulerPlacement:
    """Keeps a :class:`Placement` on a scheduler, after the topology listens to the workers.

    Parameters
    ----------
    scheduler
        Dask's.
    topology, picture
        Where the workers are, and what their tiers hold.
    """

    def __init__(self, scheduler: SchedulerServer, topology: Topology, picture: Picture, metrics: Metrics):
        self._scheduler = scheduler
        headroom = LedgerHeadroom(picture, scheduler.workers)
        self._placement = Placement(scheduler, topology, headroom, metrics)
        self._patches = PatchSet()

    def install(self) -> None:
        """Choose from now on."""
        self._patches.put_item(self._scheduler.stream_handlers, PLACE, self._note_place)
        self._placement.bind()

    def _note_place(self, told: Callable[..., None]) -> Callable[..., None]:
        def placed(worker: str, **message: Any) -> None:
            told(worker, **message)
            self._placement.changed(worker)

        return placed

    def uninstall(self) -> None:
        """Have Dask choose again."""
        self._placement.unbind()
        self._patches.restore()

    def memory_changed(self, worker: str) -> None:
        """A worker has reported what its tiers hold."""
        self._placement.told(worker)

    def submitted(self, keys: Iterable[Key]) -> None:
        """A graph of these has come."""
        self._placement.submitted(keys)

    def finished(self, key: Key, worker: str, startstops: Sequence[dict[str, Any]]) -> None:
        """A worker has computed a task, at these times."""
        seconds = sum(each["stop"] - each["start"] for each in startstops if each["action"] == "compute")
        self._placement.ended(key, worker, seconds)

    def stopped(self, key: Key) -> None:
        """A task is no longer on its worker, which has not computed it."""
        self._placement.ended(key)

    def remove(self, worker: str) -> None:
        """A worker has left."""
        self._placement.left(worker)

    def owners(self, barrier: SchedulerTask, chosen: dict[int, str]) -> dict[int, str]:
        """The owner of each output of a shuffle, where Dask has chosen these."""
        return self._placement.owners(barrier, chosen)

    def explain(self, key: Key) -> list[dict[str, Any]]:
        """The last decision about a key."""
        return self._placement.explain(key)
