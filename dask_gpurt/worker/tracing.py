"""Record traces on workers and the scheduler, and return them in batches.

A client begins a trace on the scheduler, then takes batches of all servers through the scheduler until it
ends the trace. A worker that joins later starts recording when its first batch is requested. A cluster
records one trace at a time. A trace ends by itself if no client has taken a batch for ``LEASE_S``.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.exchange import Exchange
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.recording import TASK, Batch, Event, Kind, Recording
from dask_gpurt.protocol import END_TRACE_HANDLER, TAKE_EVENTS_HANDLER, is_off

#: A trace ends after this time without a client that takes batches, in seconds.
LEASE_S = 60.0


class Recorder:
    """Begin and end recordings of one server, for one trace at a time. On the event loop."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self.token: str | None = None
        self._expires: asyncio.TimerHandle | None = None

    def begin(self, token: str) -> Recording:
        """Return the recording of a trace, started if necessary; it replaces that of any other trace."""
        recording = self._metrics.recording
        if recording is None or self.token != token:
            self.token = token
            recording = self._metrics.recording = Recording()
        self._renew(token)
        return recording

    def end(self, token: str | None = None) -> None:
        """End the recording of a trace, by default of any trace."""
        if token in (None, self.token):
            self.token = self._metrics.recording = None
            if self._expires is not None:
                self._expires.cancel()

    def _renew(self, token: str) -> None:
        if self._expires is not None:
            self._expires.cancel()
        self._expires = asyncio.get_running_loop().call_later(LEASE_S, self.end, token)


class WorkerTracing:
    """Record traces on a worker.

    ``worker``: the Dask worker. Its tasks are recorded with Dask's own timings.
    """

    def __init__(self, worker: WorkerServer, metrics: Metrics, exchange: Exchange):
        self._worker = worker
        self._metrics = metrics
        self._exchange = exchange
        self._recorder = Recorder(metrics)
        self._patches = PatchSet()
        #: The last transfer that was recorded.
        self._transfer: Any = None

    def install(self) -> None:
        """Register the handlers."""
        handlers = {TAKE_EVENTS_HANDLER: self._exchange.until_closed(self.take), END_TRACE_HANDLER: self.end}
        self._patches.add_handlers(self._worker.handlers, handlers, off=is_off)

    def uninstall(self) -> None:
        """Answer no longer, and end any recording."""
        self._patches.restore()
        self._recorder.end()

    async def take(self, token: str, limit: int) -> dict[str, Any]:
        """Return the next events of a trace, and start recording if necessary (handler)."""
        recording = self._recorder.begin(token)
        batch: dict[str, Any] = await self._exchange.offload(packed, recording, limit)
        return batch

    async def end(self, token: str) -> None:
        """End the recording of a trace (handler)."""
        self._recorder.end(token)

    def task_ended(self, key: Key) -> None:
        """Record a task that has run, with Dask's timing."""
        recording, task = self._metrics.recording, self._worker.state.tasks.get(key)
        if recording is None or task is None or task.start_time is None:
            return
        # Dask adds "disk-write" after "compute" where the store took more than 5 ms to take the result.
        timed = next((timed for timed in reversed(task.startstops) if timed["action"] != "disk-write"), None)
        if timed is not None and timed["action"] == "compute":
            thread = self._worker.threads.get(key, 0)
            recording.see(thread)
            # Dask corrects the start of a task by the clock offset of a heartbeat, which is off by the
            # heartbeat's latency. start_time, at which the task is submitted to its thread, is not corrected.
            began, seconds = task.start_time - recording.epoch, timed["stop"] - timed["start"]
            recording.add(Event(Kind.SPAN, TASK, began, seconds, thread, str(key), {}))

    def fetched(self) -> None:
        """Record the latest transfer that fetched an input, once, with Dask's timing."""
        recording, timed = self._metrics.recording, next(reversed(self._worker.transfer_incoming_log), None)
        if recording is None or timed is None or timed is self._transfer:
            return
        self._transfer = timed
        began = timed["start"] - self._worker.scheduler_delay - recording.epoch
        args = {"bytes": timed["total"], "from": timed["who"], "keys": len(timed["keys"])}
        recording.add(Event(Kind.WAIT, "transfer", began, timed["stop"] - timed["start"], 0, "", args))


def packed(recording: Recording, limit: int) -> dict[str, Any]:
    """Take events out of a recording. They are encoded as JSON, so that the comm sends one buffer."""
    batch: Batch = recording.take(limit)
    return {
        "events": json.dumps(batch.events, default=str).encode(),
        "threads": {str(thread): name for thread, name in batch.threads.items()},
        "began": recording.began,
        "epoch": recording.epoch,
        "lost": batch.lost,
        "taken": batch.taken,
        "more": batch.more,
        "process": os.getpid(),
    }
