"""Run the dependents of a result before tasks that produce further results, when memory is short.

A worker that has finished a task starts another one at once. Only a moment later the scheduler tells it which
tasks depend on the result, and which inputs can be released. By then the other task may have caused the
result to be spilled, and it must be read back. If memory is short, pausing for that moment is cheaper.

The worker is paused with the event of Dask's own pause, for at most ``MAX_PAUSE_S`` seconds. It always
resumes: each poll either schedules the next one or unpauses, even if it fails, and polls continue after the
runtime is switched off. If Dask pauses or closes the worker meanwhile, unpausing is left to Dask.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

import asyncio

from dask.typing import Key
from dask.utils import key_split
from distributed.core import Status
from distributed.metrics import time
from distributed.worker_state_machine import PauseEvent, UnpauseEvent
from zict import LRU

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.memory.admission import PREFIXES_REMEMBERED
from dask_gpurt.memory.ledger import Tier
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.observe import Fallback, Metrics

#: Throughput of spilling and reading back, in bytes per second. A pause lasts no longer than that takes.
SPILL_BYTES_PER_S = 1e9
#: The poll interval and the longest pause, in seconds, and how many pauses in a row may be useless after
#: tasks of one prefix.
POLL_INTERVAL_S, MAX_PAUSE_S, MAX_VAIN_PAUSES = 0.001, 0.1, 3
#: Leading fields of a priority that are equal for all tasks of a graph: user priority and graph number.
_GRAPH_FIELDS = 2


class DependentsFirst:
    """Briefly hold back the next task of a worker. On the event loop."""

    def __init__(self, worker: WorkerServer, tiered_buffer: TieredBuffer, metrics: Metrics):
        self._worker = worker
        self._metrics = metrics
        self._tiered_buffer = tiered_buffer
        self._waiting = False
        #: Useless pauses in a row after tasks of a prefix.
        self._in_vain: LRU[str, int] = LRU(PREFIXES_REMEMBERED, {})

    def __repr__(self) -> str:
        what = "tasks wait for the dependents of a result" if self._waiting else "nothing waits"
        return f"<DependentsFirst, {what}>"

    @property
    def holds(self) -> bool:
        """Return whether this object has paused the worker."""
        return self._waiting

    def finished(self, key: Key, result: int, inputs: int) -> None:
        """Pause the worker if a similar task would not fit into memory now, so that dependents run first.

        Errors are only counted, since the task is done and its result is valid.

        ``result``, ``inputs``: sizes of its result and of its inputs, in bytes.
        """
        try:
            self._hold_back(key, result, inputs)
        except Exception as error:
            self._metrics.fallback(Fallback.MEMORY_DEPENDENTS_FIRST, repr(error))

    def _hold_back(self, key: Key, result: int, inputs: int) -> None:
        seconds = min((result + inputs) / SPILL_BYTES_PER_S, MAX_PAUSE_S)
        if self._waiting or seconds < POLL_INTERVAL_S:
            return
        if self._in_vain.get(key_split(key), 0) >= MAX_VAIN_PAUSES or self._roomy(result + inputs):
            return
        self._waiting = True
        loop = asyncio.get_running_loop()
        loop.call_later(POLL_INTERVAL_S, self._end_pause_or_poll, key, result, loop.time() + seconds)
        # Dask's pause: running tasks continue, and no task starts.
        self._worker.handle_stimulus(PauseEvent(stimulus_id=f"gpurt-dependents-first-{time()}"))

    def _end_pause_or_poll(self, key: Key, result: int, end: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            followed = not self._outlived(key) and (self._brought_forward(key) or self._roomy(result))
        except Exception as error:  # the worker must not stay paused
            self._metrics.fallback(Fallback.MEMORY_DEPENDENTS_FIRST, repr(error))
            followed, end = False, loop.time()
        if not followed and loop.time() < end:
            loop.call_later(POLL_INTERVAL_S, self._end_pause_or_poll, key, result, end)
            return
        prefix = key_split(key)
        self._in_vain[prefix] = 0 if followed else self._in_vain.get(prefix, 0) + 1
        self._waiting = False
        if self._worker.status is Status.running:  # Dask has not paused or closed it meanwhile
            self._worker.handle_stimulus(UnpauseEvent(stimulus_id=f"gpurt-dependents-first-{time()}"))

    def _roomy(self, nbytes: int) -> bool:
        # Twice, for tasks that read shards: these are as large as the result, and are not inputs in Dask.
        return self._tiered_buffer.reservations.has_room(2 * nbytes, Tier.DEVICE)

    def _brought_forward(self, key: Key) -> bool:
        """Move the ready dependents of a result to the front; return whether there are any.

        Dask may have ordered some of them later, but the result occupies memory until the last one has run.
        """
        task = self._worker.state.tasks.get(key)
        if task is None:
            return True
        ready = self._worker.state.ready
        readers = [reader for reader in task.dependents if reader.state == "ready"]
        for reader in readers:
            first = ready.peek().priority
            assert reader.priority is not None  # both are ready
            assert first is not None
            # Keep the order between graphs, and between user priorities.
            if reader.priority[:_GRAPH_FIELDS] == first[:_GRAPH_FIELDS]:
                ready.remove(reader)
                reader.priority = (*first[:-1], first[-1] - 1)
                ready.add(reader)
        return bool(readers)

    def _outlived(self, key: Key) -> bool:
        """Return whether the worker still holds an input that none of its tasks needs any more."""
        task = self._worker.state.tasks.get(key)
        return task is not None and any(
            dependency.state == "memory" and all(reader.state == "memory" for reader in dependency.dependents)
            for dependency in task.dependencies
        )
