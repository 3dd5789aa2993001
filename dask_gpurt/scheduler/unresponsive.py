"""Keep runs from waiting for workers that have fallen silent, if others can do their part.

- A worker that waits for the reply of another one asks whether the run continues without it.
- Nothing has to call the worker of a barrier, so barriers that have been sent to a worker are watched.

:mod:`dask_gpurt.scheduler.silence` decides which workers are silent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dask.typing import Key

from dask_gpurt.dask_hooks.shuffle import ShuffleId, barrier_key, id_from_key
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.scheduler.runs import ActiveRuns
from dask_gpurt.scheduler.switching import Workers

#: Seconds between looks at the worker of a barrier.
BARRIER_POLL_INTERVAL_S = 1.0


class Rerun(Protocol):
    """Rerun those tasks that are in one of the states."""

    def __call__(self, keys: Iterable[Key], *states: str) -> None: ...


class Abandoning:
    """Abandon silent workers in the runs of a scheduler.

    Parameters
    ----------
    scheduler
        Dask's scheduler.
    workers
        The workers with the runtime.
    runs
        The active runs.
    rerun
        Reruns barriers.
    """

    def __init__(self, scheduler: SchedulerServer, workers: Workers, runs: ActiveRuns, rerun: Rerun):
        self._scheduler = scheduler
        self._workers = workers
        self._runs = runs
        self._rerun = rerun
        #: Shuffles whose barriers are watched.
        self._watched: set[ShuffleId] = set()

    def continues_without(self, id: ShuffleId, run_id: int, worker: str) -> bool:
        """Return whether a run goes on without a worker that does not reply, since it is silent (handler)."""
        return self._runs.is_current(id, run_id) and self._abandons(id, worker)

    def transition(self, key: Key, finish: str) -> None:
        """Begin to look after a barrier that is sent to a worker."""
        if finish == "processing" and (shuffle := id_from_key(key)) is not None:
            self._watch(shuffle)

    def _watch(self, shuffle: ShuffleId) -> None:
        if shuffle not in self._watched and self._runs.is_active(shuffle):
            self._watched.add(shuffle)
            self._scheduler.loop.call_later(BARRIER_POLL_INTERVAL_S, self._check, shuffle)

    def _check(self, shuffle: ShuffleId) -> None:
        """Rerun a barrier whose worker is silent: nothing has to call that worker, and Dask would wait."""
        self._watched.discard(shuffle)
        barrier = barrier_key(shuffle)
        if not self._runs.is_active(shuffle) or not self._runs.is_task(barrier, "processing"):
            return
        worker = self._runs.barrier(shuffle).processing_on
        if worker is not None and self._abandons(shuffle, worker.address):
            self._rerun([barrier], "processing")
        else:
            self._watch(shuffle)

    def _abandons(self, shuffle: ShuffleId, worker: str) -> bool:
        """Return whether a worker is silent and others can take over, and if so keep tasks off it."""
        silent = self._workers.silent
        if worker not in self._workers.ready or not silent.is_silent(worker):
            return False
        able = self._runs.candidates(*self._runs.sharing(shuffle))
        if all(other == worker or other in silent for other in able):
            return False
        silent.hold(worker)
        return True
