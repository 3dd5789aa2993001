"""Keep runs from waiting for workers that have fallen silent, and barriers from running again and again.

- A worker that waits for the reply of another one asks whether the run continues without it.
- Nothing has to call the worker of a barrier, so barriers that have been sent to a worker are watched.

:mod:`dask_gpurt.scheduler.silence` decides which workers are silent.

A repair sends the barrier again, possibly to the worker that is just reporting its end. Dask answers a report
of an earlier dispatch by sending the task once more, since a task that was cancelled and resumed ends under
its earlier number, and is not executed again. But mostly it is::

    scheduler                           worker
    sends barrier 2                     has ended barrier 1
    receives the end of 1, sends 3      receives 2, and executes it
    receives the end of 2, sends 4      receives 3, and executes it

This goes on while a barrier takes less time than a message. So reports of earlier dispatches are held back,
and handled only if nothing else has happened to the barrier after a while.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from dask.typing import Key

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.shuffle import ShuffleId, barrier_key, id_from_key
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.scheduler.runs import ActiveRuns
from dask_gpurt.scheduler.switching import Workers

#: Seconds between looks at the worker of a barrier.
BARRIER_POLL_INTERVAL_S = 1.0
#: How long a report of an earlier dispatch is held back, in seconds.
HELD_BACK_S = 0.5


class Rerun(Protocol):
    """Rerun those tasks that are in one of the states."""

    def __call__(self, keys: Iterable[Key], *states: str) -> None: ...


class Abandoning:
    """Abandon silent workers in the runs of a scheduler."""

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


class BarrierEnds:
    """Hold back reports that earlier dispatches of barriers have ended."""

    def __init__(self, scheduler: SchedulerServer):
        self._scheduler = scheduler
        self._patches = PatchSet()

    def install(self) -> None:
        """Wrap the stream handler for the ends of tasks."""
        self._patches.put_item(self._scheduler.stream_handlers, "task-finished", self._in_time)

    def uninstall(self) -> None:
        """Restore Dask's handler."""
        self._patches.restore()

    def _in_time(self, handle: Callable[..., None]) -> Callable[..., None]:
        def finished(key: Key, worker: str, run_id: int, **message: Any) -> None:
            if id_from_key(key) is None or (latest := self._later_dispatch(key, worker, run_id)) is None:
                handle(key=key, worker=worker, run_id=run_id, **message)
                return

            def handle_unless_superseded() -> None:
                if self._later_dispatch(key, worker, run_id) == latest:
                    handle(key=key, worker=worker, run_id=run_id, **message)

            self._scheduler.loop.call_later(HELD_BACK_S, handle_unless_superseded)

        return finished

    def _later_dispatch(self, key: Key, worker: str, run_id: int) -> int | None:
        """Return the dispatch of a task that a worker has to end yet; None if it is ``run_id`` or none."""
        task = self._scheduler.tasks.get(key)
        if task is None or task.processing_on is None or task.processing_on.address != worker:
            return None
        return None if task.run_id == run_id else task.run_id
