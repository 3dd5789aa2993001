"""Run the tasks that read a result before the task that makes the next result.

A worker that has finished a task begins another at once. It learns from the scheduler a moment
later which task reads the result, and which inputs can be released. By then the next task has
had the result spilled, and it has to be read back. Where memory is short, waiting for that
moment is cheaper.

The worker is paused by the event that Dask's own pause is made of, for at most ``MAX_PAUSE_S`` seconds, and
it is unpaused whatever happens meanwhile: each look either has the next one called or unpauses, also when it
fails, and looks go on when the runtime has been switched off. Only while Dask has the worker paused, or is
closing it, unpausing is left to Dask, which does so when the status becomes running again.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from dask.typing import Key
from dask.utils import key_split
from distributed.core import Status
from distributed.metrics import time
from distributed.worker_state_machine import PauseEvent, UnpauseEvent

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.observe import Fallback, Metrics

#: Bytes a second at which objects go down and come up again: no task waits for longer than that takes.
SPILL_BYTES_PER_S = 1e9
#: Seconds between looks, the longest pause, and how often in a row it may be in vain after
#: tasks of one prefix.
POLL_INTERVAL_S, MAX_PAUSE_S, MAX_VAIN_PAUSES = 0.001, 0.1, 3
#: Fields of a priority that are the same for all tasks of a graph: the user's, and the graph's number.
_GRAPH_FIELDS = 2


class DependentsFirst:
    """Hold the next task of a worker back for a moment. On the event loop."""

    def __init__(self, worker: WorkerServer, tiered_buffer: TieredBuffer, metrics: Metrics):
        self._worker = worker
        self._metrics = metrics
        self._tiered_buffer = tiered_buffer
        self._waiting = False
        self._in_vain: Counter[str] = Counter()

    @property
    def holds(self) -> bool:
        """Return whether the worker is paused by this."""
        return self._waiting

    def finished(self, key: Key, result: int, inputs: int) -> None:
        """Hold the next task back if one like this would not find room now, so that what follows comes first.

        An error here is only counted, since the task is done and its result is valid.

        Parameters
        ----------
        key
            A task that is done.
        result, inputs
            Bytes of its result and its inputs.
        """
        try:
            self._hold_back(key, result, inputs)
        except Exception as error:
            self._metrics.fallback(Fallback.MEMORY_DEPENDENTS_FIRST, repr(error))

    def _hold_back(self, key: Key, result: int, inputs: int) -> None:
        seconds = min((result + inputs) / SPILL_BYTES_PER_S, MAX_PAUSE_S)
        if self._waiting or seconds < POLL_INTERVAL_S or self._in_vain[key_split(key)] >= MAX_VAIN_PAUSES:
            return
        if self._roomy(result + inputs):
            return
        self._waiting = True
        loop = asyncio.get_running_loop()
        loop.call_later(POLL_INTERVAL_S, self._look, key, result, loop.time() + seconds)
        # Dask's pause: what runs goes on, and nothing begins.
        self._worker.handle_stimulus(PauseEvent(stimulus_id=f"gpurt-following-{time()}"))

    def _look(self, key: Key, result: int, end: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            followed = not self._outlived(key) and (self._brought_forward(key) or self._roomy(result))
        except Exception as error:  # a worker that stays paused does nothing any more
            self._metrics.fallback(Fallback.MEMORY_DEPENDENTS_FIRST, repr(error))
            followed, end = False, loop.time()
        if not followed and loop.time() < end:
            loop.call_later(POLL_INTERVAL_S, self._look, key, result, end)
            return
        self._in_vain[key_split(key)] = 0 if followed else self._in_vain[key_split(key)] + 1
        self._waiting = False
        if self._worker.status is Status.running:  # and not paused by Dask meanwhile
            self._worker.handle_stimulus(UnpauseEvent(stimulus_id=f"gpurt-following-{time()}"))

    def _roomy(self, nbytes: int) -> bool:
        # Shards that a task reads are as large as what it makes of them, and no inputs of Dask's.
        return self._tiered_buffer.reservations.has_room(2 * nbytes, Tier.DEVICE)

    def _brought_forward(self, key: Key) -> bool:
        """Return whether tasks that read the result are here; they come first now.

        Dask may want some of them later, but until the last of them has run the result takes room.
        """
        task = self._worker.state.tasks.get(key)
        if task is None:
            return True
        ready = self._worker.state.ready
        readers = [reader for reader in task.dependents if reader.state == "ready"]
        for reader in readers:
            first = ready.peek().priority
            assert reader.priority is not None  # it is ready
            # The order between graphs is the user's.
            if reader.priority[:_GRAPH_FIELDS] == first[:_GRAPH_FIELDS]:
                ready.remove(reader)
                reader.priority = (*first[:-1], first[-1] - 1)
                ready.add(reader)
        return bool(readers)

    def _outlived(self, key: Key) -> bool:
        """Return whether an input that no task here needs any more is still here."""
        task = self._worker.state.tasks.get(key)
        return task is not None and any(
            dependency.state == "memory" and all(reader.state == "memory" for reader in dependency.dependents)
            for dependency in task.dependencies
        )
