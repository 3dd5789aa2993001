"""Record traces on workers and the scheduler, return them in batches, and measure offsets of clocks.

A client begins a trace on the scheduler, then takes batches of all servers through the scheduler until it
ends the trace. A worker that joins later starts recording when its first batch is requested. A cluster
records one trace at a time. A trace ends by itself if no client has taken a batch for ``LEASE_S``.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable
from time import perf_counter, time
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.types import SchedulerServer, WorkerServer
from dask_gpurt.exchange import Exchange
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.recording import TASK, Batch, Event, Kind, Ranges, Recording

#: Handlers of workers: read the clock, take a batch of events, end a trace.
CLOCK_HANDLER, TAKE_EVENTS_HANDLER, END_TRACE_HANDLER = "gpurt_clock", "gpurt_trace_take", "gpurt_trace_end"
WORKER_HANDLERS = (CLOCK_HANDLER, TAKE_EVENTS_HANDLER, END_TRACE_HANDLER)
#: Handlers of the scheduler.
BEGIN_TRACES_HANDLER, TAKE_TRACES_HANDLER, END_TRACES_HANDLER = (
    "gpurt_trace_begin",
    "gpurt_traces_take",
    "gpurt_traces_end",
)
#: A trace ends after this time without a client that takes batches, in seconds.
LEASE_S = 60.0
#: How long to wait for the events of a worker, in seconds.
ANSWER_TIMEOUT_S = 10.0
#: How often the clock of a worker is read (the reading with the shortest round trip counts), and the time
#: limit for all readings, in seconds.
CLOCK_ROUNDS, CLOCK_TIMEOUT_S = 5, 2.0
#: How many workers' clocks are read concurrently. More would delay each other's replies.
CLOCKS_AT_ONCE = 4


class Recorder:
    """Begin and end recordings of one server, for one trace at a time. On the event loop.

    Parameters
    ----------
    metrics
        The server's metrics, which hold the active recording.
    """

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self.token: str | None = None
        self._expires: asyncio.TimerHandle | None = None

    def begin(self, token: str) -> Recording:
        """Return the recording of a trace, started if necessary; it replaces that of any other trace."""
        recording = self._metrics.recording
        if recording is None or self.token != token:
            self.token = token
            recording = self._metrics.recording = Recording(ranges=Ranges.find())
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

    Parameters
    ----------
    worker
        The Dask worker. Its tasks are recorded with Dask's own timings.
    exchange
        Runs slow functions on its threads.
    """

    def __init__(self, worker: WorkerServer, metrics: Metrics, exchange: Exchange):
        self._worker = worker
        self._metrics = metrics
        self._exchange = exchange
        self._recorder = Recorder(metrics)
        self._patches = PatchSet()
        #: The wall-clock time, as Dask uses it, at which the clock of events is 0.
        self._epoch = 0.0
        #: The last transfer that was recorded.
        self._transfer: Any = None

    def install(self) -> None:
        """Register the handlers."""
        for name, handler in {
            CLOCK_HANDLER: self.clock,
            TAKE_EVENTS_HANDLER: self._exchange.until_closed(self.take),
            END_TRACE_HANDLER: self.end,
        }.items():
            self._patches.add_item(self._worker.handlers, name, handler)

    def uninstall(self) -> None:
        """Remove the handlers, and end any recording."""
        self._patches.restore()
        self._recorder.end()

    async def clock(self) -> float:
        """Return the time on the clock of events, in seconds (handler)."""
        return perf_counter()

    async def take(self, token: str, limit: int) -> dict[str, Any]:
        """Return the next events of a trace, and start recording if necessary (handler)."""
        recording = self._recorder.begin(token)
        self._epoch = time() - perf_counter()
        packed: dict[str, Any] = await self._exchange.offload(_packed, recording, limit)
        return packed

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
            began, seconds = task.start_time - self._epoch, timed["stop"] - timed["start"]
            recording.add(Event(Kind.SPAN, TASK, began, seconds, thread, str(key), {}))

    def fetched(self) -> None:
        """Record the latest transfer that fetched an input, once, with Dask's timing."""
        recording, timed = self._metrics.recording, next(reversed(self._worker.transfer_incoming_log), None)
        if recording is None or timed is None or timed is self._transfer:
            return
        self._transfer = timed
        began = timed["start"] - self._worker.scheduler_delay - self._epoch
        args = {"bytes": timed["total"], "from": timed["who"], "keys": len(timed["keys"])}
        recording.add(Event(Kind.WAIT, "transfer", began, timed["stop"] - timed["start"], 0, "", args))


class SchedulerTracing:
    """Record traces on the scheduler, and collect the events of its workers.

    Parameters
    ----------
    scheduler
        Dask's scheduler.
    """

    def __init__(self, scheduler: SchedulerServer, metrics: Metrics):
        self._scheduler: SchedulerServer = scheduler
        self._recorder = Recorder(metrics)

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Return the handlers for clients, by name."""
        return {
            BEGIN_TRACES_HANDLER: self.begin,
            TAKE_TRACES_HANDLER: self.take,
            END_TRACES_HANDLER: self.end,
        }

    def close(self) -> None:
        """End any recording."""
        self._recorder.end()

    async def begin(self, token: str) -> dict[str, Any]:
        """Begin a trace on all servers (handler).

        Returns
        -------
        dict
            ``clocks``: the workers' clocks; ``now`` and ``time``: the scheduler's clock and the wall-clock
            time at the beginning.

        Raises
        ------
        RuntimeError
            If another trace is being recorded.
        """
        if self._recorder.token not in (None, token):
            raise RuntimeError(
                "another trace of this cluster is being recorded: wait until it ends, or "
                f"{LEASE_S:.0f} s if its client is gone"
            )
        now, of_day = perf_counter(), time()
        await self.take(token, 0)
        return {"clocks": await self._clocks(), "now": now, "time": of_day}

    async def take(self, token: str, limit: int) -> dict[str, Any]:
        """Return the next events of all servers (handler).

        Parameters
        ----------
        limit
            The most events of each server.

        Returns
        -------
        dict
            The batch of each worker by address, and the scheduler's under "scheduler". A worker that does not
            answer has an ``error``.
        """
        own = await asyncio.to_thread(_packed, self._recorder.begin(token), limit)
        names = {worker: str(state.name) for worker, state in self._scheduler.workers.items()}
        replies = await self._ask_all(names, TAKE_EVENTS_HANDLER, token=token, limit=limit)
        workers = {worker: {**reply, "name": names[worker]} for worker, reply in replies.items()}
        return {"scheduler": {**own, "name": "scheduler"}, **workers}

    async def end(self, token: str) -> dict[str, Any]:
        """End a trace, and return the workers' current ``clocks`` (handler)."""
        clocks = await self._clocks()
        self._recorder.end(token)
        await self._ask_all(self._scheduler.workers, END_TRACE_HANDLER, token=token)
        return {"clocks": clocks}

    async def _ask_all(self, workers: Iterable[str], op: str, **message: Any) -> dict[str, dict[str, Any]]:
        """Call a handler of all workers, and return their replies, or an ``error`` for each that fails.

        Waits a limited time for a stuck worker, or the leases of the other recordings would run out.
        """

        async def ask(worker: str) -> dict[str, Any]:
            try:
                call = getattr(self._scheduler.rpc(worker), op)(**message)
                reply = await asyncio.wait_for(call, ANSWER_TIMEOUT_S)
            except TimeoutError:
                return {"error": f"no answer in {ANSWER_TIMEOUT_S:.0f} s"}
            except Exception as error:  # whatever the handler raised on the worker
                return {"error": str(error)}
            return reply if isinstance(reply, dict) else {"error": "the runtime is off there"}

        workers = list(workers)
        return dict(zip(workers, await asyncio.gather(*map(ask, workers)), strict=True))

    async def _clocks(self) -> dict[str, dict[str, float]]:
        """Return for each worker the ``offset`` of its clock to the scheduler's, and the ``round_trip`` time.

        The reading with the shortest round trip counts; its error is at most half of the round trip. Workers
        that do not answer in time are left out.
        """
        turns = asyncio.Semaphore(CLOCKS_AT_ONCE)

        async def ask(worker: str) -> dict[str, float] | None:
            async with turns:
                try:
                    return await asyncio.wait_for(self._clock(worker), CLOCK_TIMEOUT_S)
                except (OSError, TimeoutError):
                    return None

        workers = list(self._scheduler.workers)
        found = await asyncio.gather(*map(ask, workers))
        return {worker: clock for worker, clock in zip(workers, found, strict=True) if clock is not None}

    async def _clock(self, worker: str) -> dict[str, float] | None:
        best: dict[str, float] | None = None
        remote = self._scheduler.rpc(worker)
        for _ in range(CLOCK_ROUNDS):
            asked = perf_counter()
            there = await getattr(remote, CLOCK_HANDLER)()
            answered = perf_counter()
            if not isinstance(there, float):  # Dask's reply to an unknown operation
                return None
            clock = {"offset": there - (asked + answered) / 2, "round_trip": answered - asked}
            best = min(filter(None, (best, clock)), key=lambda one: one["round_trip"])
        return best


def _packed(recording: Recording, limit: int) -> dict[str, Any]:
    """Take events out of a recording. They are encoded as JSON, so that the comm sends one buffer."""
    batch: Batch = recording.take(limit)
    return {
        "events": json.dumps(batch.events, default=str).encode(),
        "threads": {str(thread): name for thread, name in batch.threads.items()},
        "began": recording.began,
        "lost": batch.lost,
        "taken": batch.taken,
        "more": batch.more,
        "process": os.getpid(),
    }
