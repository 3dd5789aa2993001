"""Keep runs from waiting for workers that are silent or retire, and barriers from running again and again.

- A worker that waits for the reply of another one asks whether the run continues without it.
- Nothing has to call the worker of a barrier, so barriers that have been sent to a worker are watched.

:mod:`dask_gpurt.scheduler.worker_calls` decides which workers are silent.

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

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from dask.typing import Key

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.scheduler import replicate_since, wrap_retirement
from dask_gpurt.dask_hooks.shuffle import ShuffleId, barrier_key, id_from_key
from dask_gpurt.dask_hooks.types import SchedulerServer, WorkerState
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import EVACUATE_HANDLER
from dask_gpurt.scheduler.recovery import REPAIR_POLL_INTERVAL_S, Recovery
from dask_gpurt.scheduler.runs import ActiveRuns
from dask_gpurt.scheduler.switching import Workers
from dask_gpurt.scheduler.worker_calls import ask
from dask_gpurt.shuffle.losses import Contribution
from dask_gpurt.shuffle.run import EVACUATION_STEP_S

logger = logging.getLogger(__name__)

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


# ---- workers that retire -----------------------------------------------------------------------------
#
# Dask replicates the data of a worker before it removes it. The runtime does the same with shuffles,
# meanwhile:
#
# 1. The worker's outputs that are not in memory move to other workers.
# 2. The worker offers its shards to the new owners, and all owners copy its shards that they would read in
#    place.
# 3. Once they have, its transfers do not depend on it any more, and it may leave.
#
# If the owners stop making progress, the worker leaves nevertheless, and its inputs are transferred again.


Track = Callable[..., Coroutine[Any, Any, Any]]


class Retirement:
    """Delay the removal of workers that retire until they are evacuated.

    ``recovery``: moves outputs, and knows what a worker has transferred.
    """

    def __init__(self, scheduler: SchedulerServer, recovery: Recovery, metrics: Metrics):
        self._scheduler = scheduler
        self._recovery = recovery
        self._metrics = metrics
        self._patches = PatchSet()

    def install(self) -> None:
        """Wrap Dask's retirement, if this version of Dask is supported."""
        try:
            wrap_retirement(self._patches, self._scheduler, self._track)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.SHUFFLE_RETIREMENT, str(error))

    def uninstall(self) -> None:
        """Restore Dask's retirement."""
        self._patches.restore()

    def _track(self, original: Track) -> Track:
        async def track(ws: WorkerState, policy: Any, **options: Any) -> Any:
            try:
                if await self.evacuate(ws.address):
                    replicate_since(policy)
            except Exception:  # it may leave nevertheless: it then counts as lost
                logger.exception("worker %s retires without being evacuated", ws.address)
            return await original(ws, policy, **options)

        return track

    async def evacuate(self, worker: str) -> bool:
        """Wait until no active run depends on a worker, or owners make no progress; return whether it waited.

        Meanwhile the worker may end tasks, such as outputs that it was assembling already.
        """
        self._recovery.retires(worker)
        left, waited = math.inf, False
        while contributed := self._recovery.contributions(worker):
            waited = True
            if self._recovery.is_repair_pending(contributed):  # a moment later the new owners are known
                await asyncio.sleep(REPAIR_POLL_INTERVAL_S)
                continue
            found = await self._ask(worker, contributed)
            done = [shuffle for shuffle, shards in found.items() if not shards]
            for shuffle in done:
                self._recovery.evacuated(worker, contributed[shuffle])
            before, left = left, sum(found.values())
            if not done and (left >= before or not found):
                logger.warning("worker %s retires before its shards have been copied", worker)
                break
        return waited

    async def _ask(self, worker: str, contributed: Mapping[Any, Contribution]) -> Mapping[Any, int]:
        """Ask a worker to have its shards copied, for some seconds; return how many are left, by shuffle."""
        runs = [(shuffle, each.run_id, each.epoch) for shuffle, each in contributed.items()]
        found = await ask(self._scheduler, worker, EVACUATE_HANDLER, 2 * EVACUATION_STEP_S, runs=runs)
        if isinstance(found, Exception):
            logger.warning("worker %s, which retires, does not answer: %r", worker, found)
            return {}
        return found or {}  # None: the runtime is off there
