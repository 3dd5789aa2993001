"""Run tasks on a worker with tiers: reserve memory, hold the inputs, and retry if memory runs out.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from dask.typing import Key
from dask.utils import key_split
from distributed.core import clean_exception
from distributed.utils import sync
from distributed.worker_state_machine import ExecuteFailureEvent, ExecuteSuccessEvent, StateMachineEvent

from dask_gpurt.config import MemorySettings
from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.shuffle import ShuffleId, active_runs, replace_run_lookup
from dask_gpurt.dask_hooks.types import WorkerServer, WorkerTask
from dask_gpurt.device.pool import SharedMemoryFull
from dask_gpurt.memory.admission import AdmissionQueue, MemoryEstimator, MemoryRequest, reservation
from dask_gpurt.memory.ledger import Tier
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.shuffle.run import ShuffleRun
from dask_gpurt.worker.tiers import WorkerTiers

#: How long memory is promised to a result, at least, in seconds. A result is stored at once or never.
PROMISE_S = 1.0


class TaskRunner:
    """Run tasks through the worker's ``execute``.

    ``is_aside``: returns whether a task has left its slot for a read. Such a task still needs its memory.
    """

    def __init__(
        self,
        worker: WorkerServer,
        tiers: WorkerTiers,
        settings: MemorySettings,
        metrics: Metrics,
        execute: Callable[..., Awaitable[StateMachineEvent]],
        is_aside: Callable[[Key], bool],
    ):
        self._worker = worker
        self._tiers = tiers
        self._tiered_buffer = tiers.tiered_buffer
        self._settings = settings
        self._metrics = metrics
        self.execute = execute
        self._is_aside = is_aside
        self._estimator = MemoryEstimator()
        #: Results with a promise of memory: made since the last expiry check, and before it.
        self._promised: list[Key] = []
        self._promised_before: list[Key] = []
        self.admission = AdmissionQueue(
            self._has_seceded, tiers.tiered_buffer.reservations, metrics, self._waits_for_cluster
        )

    async def run(self, key: Key, stimulus_id: str) -> StateMachineEvent:
        """Run a task, and return the event for Dask's state machine."""
        task = self._worker.state.tasks[key]
        inputs = {dependency.key: dependency.nbytes or 0 for dependency in task.dependencies}
        nbytes = sum(inputs.values())
        try:
            await self._admitted(key, self._estimator.estimate(key_split(key), nbytes), inputs)
            held = await self.hold(list(inputs))
            before = self._tiered_buffer.bytes_admitted(Tier.DEVICE)
            try:
                self._prefetch()
                event = await self._until_it_fits(key, task, stimulus_id)
            finally:
                self._tiered_buffer.release(held)
            if isinstance(event, ExecuteSuccessEvent):
                # The peak includes data that the buffer admitted meanwhile, even if evicted since.
                admitted = self._tiered_buffer.bytes_admitted(Tier.DEVICE) - before
                await self._keep(key, event.value, nbytes, self._tiers.peak() - admitted)
            return event
        finally:
            self.admission.leave(reservation(key))

    async def _keep(self, key: Key, result: Any, inputs: int, peak: int) -> None:
        """Convert a task's reservation into a promise for its result, and learn from its actual peak.

        A failure to spill other objects for it is not the task's: its result is stored beyond the limit.
        """
        promises = self._promises({key: result})
        added, _ = promises[key]
        self._estimator.learn(key_split(key), inputs, max(added, peak))
        try:
            await self._promise(promises, reservation(key))
        except Exception as error:
            if not self._tiers.closed:  # otherwise switched off meanwhile: Dask stores the result itself
                self._metrics.fallback(Fallback.MEMORY_TIERS_FULL, str(error))

    async def hold(self, keys: list[Key]) -> Any:
        """Make inputs live and hold them, spilling other objects if necessary."""
        held = self._tiered_buffer.hold_live(keys)
        if held is None:
            held = await self.with_retries(lambda: self._tiers.offload(self._tiered_buffer.hold, keys))
        return held

    async def with_retries(self, action: Callable[[], Any]) -> Any:
        """Run an action that moves data. If it runs out of memory, spill everything and retry."""
        for attempt in itertools.count():
            try:
                return await action()
            except MemoryError as error:
                if attempt == self._settings.retries:
                    raise self._tiers.out_of_memory(error) from error
                await self._spill_all()

    async def make_room(self, values: dict[Key, Any], reserved: MemoryRequest) -> None:
        """Convert a reservation into promises for objects that are about to be stored."""
        await self._promise(self._promises(values), reserved)

    def _promises(self, values: dict[Key, Any]) -> dict[Key, tuple[int, Tier]]:
        """Return for each object the bytes that it will add, and the tier."""
        promises = {}
        for key, value in values.items():
            home = self._tiers.home(value)
            promises[key] = self._tiered_buffer.reservations.bytes_added_by(key, value, home), home
        return promises

    async def _promise(self, promises: dict[Key, tuple[int, Tier]], reserved: MemoryRequest) -> None:
        fits = self._tiered_buffer.reservations.replace(reserved, promises)
        try:
            if not fits:
                for home in {home for _, home in promises.values()}:
                    await self._tiers.offload(self._tiered_buffer.reservations.spill_for_all, home)
        finally:
            # Promises expire, since a task that failed or was cancelled meanwhile stores nothing.
            if not self._promised and not self._promised_before:
                asyncio.get_running_loop().call_later(PROMISE_S, self._end_promises)
            self._promised += promises

    def _end_promises(self) -> None:
        """Cancel promises older than ``PROMISE_S``. One timer serves all, so the loop wakes up less often."""
        self._tiered_buffer.reservations.cancel_all(self._promised_before)
        self._promised, self._promised_before = [], self._promised
        if self._promised_before:
            asyncio.get_running_loop().call_later(PROMISE_S, self._end_promises)

    # ---- admission -------------------------------------------------------------------

    def _has_seceded(self, key: Key) -> bool:
        task = self._worker.state.tasks.get(key)
        return task is None or (task.state == "long-running" and not self._is_aside(key))

    def _waits_for_cluster(self, key: Key) -> bool:
        """Return whether a task is in Dask's ``sync``, as in ``Future.result``, ``gather`` or ``Lock``."""
        frames = sys._current_frames()
        threads = list(self._worker.active_threads.items())
        frame = next((frames.get(thread) for thread, running in threads if running == key), None)
        while frame is not None and frame.f_code is not sync.__code__:
            frame = frame.f_back
        return frame is not None

    def _is_wanted(self, task: WorkerTask) -> bool:
        """Return whether a task is running, and was neither cancelled nor seceded by its own code."""
        return task.state == "executing" or (task.state == "long-running" and self._is_aside(task.key))

    async def _admitted(self, key: Key, need: int, inputs: dict[Key, int]) -> None:
        """Reserve the estimated memory of a task; wait for other requests if it does not fit."""
        task, lower = reservation(key), sum(inputs[each] for each in self._tiered_buffer.not_live(inputs))
        await self.admission.wait(task, partial(self._reserve, nbytes=need + lower, inputs=inputs))
        if lower:  # inputs in lower tiers reserve their own memory when they are made live
            self._tiered_buffer.reservations.cancel(task)
            self._tiered_buffer.reservations.try_reserve(
                task, min(need, self._tiered_buffer.reservations.most(Tier.DEVICE)), Tier.DEVICE
            )

    def receiving(self, nbytes: int) -> AbstractAsyncContextManager[MemoryRequest]:
        """Reserve memory for data from a peer; wait for other requests if it does not fit."""
        return self.admission.receiving(partial(self._reserve, nbytes=nbytes, inputs={}))

    async def _reserve(self, request: MemoryRequest, nbytes: int, inputs: Iterable[Key]) -> bool:
        nbytes = min(nbytes, self._tiered_buffer.reservations.most(Tier.DEVICE))
        if not nbytes or self._tiered_buffer.reservations.try_reserve(request, nbytes, Tier.DEVICE):
            return True
        # Do not spill the inputs: they would be read back at once.
        held, _ = self._tiered_buffer.hold_where_live(inputs)
        try:
            fits: bool = await self._tiers.offload(
                self._tiered_buffer.reservations.spill_and_try, request, nbytes, Tier.DEVICE
            )
        finally:
            self._tiered_buffer.release(held.values())
        return fits

    # ---- retries after running out of memory -----------------------------------------

    async def _until_it_fits(self, key: Key, task: WorkerTask, stimulus_id: str) -> StateMachineEvent:
        for attempt in range(self._settings.retries + 1):
            self._tiers.peak()  # resets the peak
            event = await self.execute(key, stimulus_id=stimulus_id)
            error = _out_of_memory(event)
            if error is None or not self._is_wanted(task):
                return event
            if (full := _for_lack_of_shared_memory(error)) is not None:
                return self._failure(full, key, task, stimulus_id)
            if attempt < self._settings.retries:
                await self._spill_all()
                await self._tiers.offload(self._reserve_all, key)
        return self._failure(self._tiers.out_of_memory(error), key, task, stimulus_id)

    @staticmethod
    def _failure(error: MemoryError, key: Key, task: WorkerTask, stimulus_id: str) -> StateMachineEvent:
        return ExecuteFailureEvent.from_exception(
            error, key=key, run_id=task.run_id, stimulus_id=f"gpurt-memory-{stimulus_id}"
        )

    def _reserve_all(self, key: Key) -> None:
        # While everything is reserved, incoming shards and data go to lower tiers.
        self._tiered_buffer.reservations.reserve(
            reservation(key), self._tiered_buffer.reservations.most(Tier.DEVICE), Tier.DEVICE
        )

    async def _spill_all(self) -> None:
        self._metrics.add("memory.retries")
        # The failed task's frames hold its intermediate results in reference cycles.
        await self._tiers.offload(gc.collect)
        await self._tiers.offload(self._tiered_buffer.spill, self._tiered_buffer.live_bytes(Tier.DEVICE))

    def _prefetch(self) -> None:
        """Make the inputs of the next task live in the background while this one computes, if they fit."""
        for task in self._worker.state.ready.peekn(1):
            inputs = [dependency.key for dependency in task.dependencies]
            if inputs and (keys := self._tiered_buffer.not_live(inputs)):
                self._tiers.in_background(self._tiered_buffer.prefetch, keys)


def _out_of_memory(event: StateMachineEvent) -> MemoryError | None:
    """Return the ``MemoryError`` of a task; None if it failed for another reason, or not at all.

    Dask wraps errors of shuffles in a ``RuntimeError`` that names the phase. An error of another type is the
    task's own, also if it was raised from a ``MemoryError``.
    """
    if not isinstance(event, ExecuteFailureEvent):
        return None
    _, error, _ = clean_exception(event.exception.data)
    while type(error) is RuntimeError:
        error = error.__cause__
    return error if isinstance(error, MemoryError) else None


def _for_lack_of_shared_memory(error: BaseException | None) -> SharedMemoryFull | None:
    """Return the error among the causes that spilling cannot help against."""
    while error is not None and not isinstance(error, SharedMemoryFull):
        error = error.__cause__
    return error


# ---- runs of shuffles, found on the thread of a task -------------------------------------------------


class RunLookup:
    """Look up runs for the tasks of a worker.

    ``worker``: the Dask worker. Two methods of its shuffle plugin are replaced on the instance, and fall back
    to the originals for unknown runs.
    """

    def __init__(self, worker: WorkerServer, metrics: Metrics):
        self._worker = worker
        self._metrics = metrics
        self._patches = PatchSet()

    def install(self) -> None:
        """Replace Dask's lookup, if this version of Dask is supported."""
        plugin: Any = self._worker.plugins.get("shuffle")
        if plugin is None:
            self._metrics.fallback(Fallback.SHUFFLE_RUN_LOOKUP, "the worker has no plugin 'shuffle'")
            return
        self._runs = active_runs(plugin)
        try:
            replace_run_lookup(self._patches, plugin, self._or)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.SHUFFLE_RUN_LOOKUP, str(error))

    def uninstall(self) -> None:
        """Restore Dask's lookup."""
        self._patches.restore()

    def _or(self, dasks: Callable[..., Any]) -> Callable[..., Any]:
        def find(shuffle_id: ShuffleId, run_id: int | None = None) -> Any:
            run = self._runs.get(shuffle_id)
            if isinstance(run, ShuffleRun) and run.is_open and run_id in (None, run.run_id):
                return run
            return dasks(shuffle_id) if run_id is None else dasks(shuffle_id, run_id)

        return find
