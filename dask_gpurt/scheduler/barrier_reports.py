"""Wait for the end of a barrier's latest dispatch when the end of an earlier one is reported.

A repair sends the barrier again, possibly to the worker that is just reporting its end. Dask answers a report
of an earlier dispatch by sending the task once more, since a task that was cancelled and resumed ends under
its earlier number, and is not executed again. But mostly it is::

    scheduler                           worker
    sends barrier 2                     has ended barrier 1
    receives the end of 1, sends 3      receives 2, and executes it
    receives the end of 2, sends 4      receives 3, and executes it

This goes on while a barrier takes less time than a message. So reports of earlier dispatches are held back,
and handled only if nothing else has happened to the barrier after a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.shuffle import id_from_key
from dask_gpurt.dask_hooks.types import SchedulerServer

#: How long a report of an earlier dispatch is held back, in seconds.
HELD_BACK_S = 0.5


class BarrierEnds:
    """Hold back reports that earlier dispatches of barriers have ended.

    Parameters
    ----------
    scheduler
        Dask's scheduler.
    """

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
