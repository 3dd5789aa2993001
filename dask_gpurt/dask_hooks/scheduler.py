"""Replace choices of Dask's scheduler on single instances, and reach what it keeps to itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from distributed import SpecCluster
from distributed.stealing import WorkStealing

from dask_gpurt.dask_hooks.comparison import SeamGroup, UnsupportedError
from dask_gpurt.dask_hooks.patch import FailureHandler, Method, PatchSet, guarded
from dask_gpurt.dask_hooks.seams import PLACEMENT, PLACEMENT_STATE, REPLICAS, RESULTS, STEALING
from dask_gpurt.dask_hooks.types import SchedulerState, WorkerState


class Unsuitable(Exception):
    """Refuse a choice that Dask could not act on, in a replacement; Dask chooses instead."""


class Overrides:
    """Replace choices of the scheduler.

    Dask makes those that raise, and those whose method is not as it is known.

    Parameters
    ----------
    failed
        Is told of such a method by name, and why Dask chooses.

    Attributes
    ----------
    originals
        Dask's own methods by name, for replacements that ask them.
    """

    def __init__(self, failed: FailureHandler):
        self._failed = failed
        self._patches = PatchSet()
        self.originals: dict[str, Method] = {}

    def scheduler(self, state: SchedulerState, ours: Callable[[str], Method]) -> None:
        """Replace the choice of a worker for a task.

        Parameters
        ----------
        ours
            Returns the replacement of a method by its name.
        """
        self._put(PLACEMENT, state, ours)

    def stealing(self, extension: Any, ours: Callable[[str], Method]) -> None:
        """Replace the choice of a worker that takes a task from another; as :meth:`scheduler`."""
        self._put(STEALING, extension, ours)

    def replicas(self, manager: Any, ours: Callable[[str], Method]) -> None:
        """Replace the choices of the active memory manager; as :meth:`scheduler`."""
        self._put(REPLICAS, manager, ours)

    def _put(self, part: SeamGroup, owner: Any, ours: Callable[[str], Method]) -> None:
        for seam in part.seams:
            name = seam.attribute
            original = getattr(owner, name, None)
            try:
                self._patches.replace(seam, partial(self.guarded, name, ours(name)), on=owner)
            except UnsupportedError as error:
                self._failed(name, str(error))
            else:
                assert original is not None  # else it would not have been as known
                self.originals[name] = original

    def guarded(self, name: str, ours: Method, original: Method) -> Method:
        """Make a function that is ours, and where that raises Dask's."""
        return guarded(name, ours, original, self._failed)

    def restore(self) -> None:
        """Have Dask choose as shipped."""
        self._patches.restore()


def require_load() -> None:
    """Make sure that the load of workers can be read.

    Raises
    ------
    UnsupportedError
        When it is not kept as it is known.
    """
    PLACEMENT_STATE.require()


def require_replicas() -> None:
    """Make sure that workers can be sent results, which the scheduler counts as replicas.

    Raises
    ------
    UnsupportedError
        When something that this needs is not as it is known.
    """
    RESULTS.require()


def network_occupancy(ws: WorkerState) -> int:
    """Return the bytes of inputs that a worker's tasks have still to fetch."""
    occupied: int = ws._network_occ  # type: ignore[attr-defined]
    return occupied


def prefix_duration(state: SchedulerState, prefix: Any) -> float:
    """Return the seconds that Dask expects a task with a prefix to take."""
    return float(state._get_prefix_duration(prefix))  # type: ignore[attr-defined]


def steal_interval_s(stealing: WorkStealing) -> float:
    """Return the seconds between two rounds of work stealing."""
    return float(stealing._callback_time)


def steal_requests(stealing: WorkStealing) -> int:
    """Return how many tasks workers were asked to give up."""
    return int(stealing._request_counter)


def start_missing_workers(cluster: SpecCluster) -> None:
    """Start the workers that a cluster should have and has not, and wait for that."""
    cluster.sync(cluster._correct_state)
