"""Record traces on workers and on the scheduler, hand them out in batches, and compare the workers' clocks.

A client begins a trace on the scheduler, then takes batches from all servers through it until it ends the
trace. A worker that joins meanwhile records from the first batch on that it is asked for. One trace of a
cluster is recorded at a time; one that no client has asked for ``LEASE_S`` ends by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from time import perf_counter, time
from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.types import SchedulerServer, WorkerServer
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.recording import TASK, Batch, Event, Kind, Ranges, Recording

#: Handlers of workers: their clock, a batch of their events, and the end of a trace.
CLOCK, TAKE, END = "gpurt_clock", "gpurt_trace_take", "gpurt_trace_end"
WORKER_HANDLERS = (CLOCK, TAKE, END)
#: Handlers of the scheduler.
BEGIN_ALL, TAKE_ALL, END_ALL = "gpurt_trace_begin", "gpurt_traces_take", "gpurt_traces_end"
#: Seconds after which a trace ends that no client has asked for.
LEASE_S = 60.0
#: Seconds for which a worker is waited for that is asked for its events.
ANSWER_TIMEOUT_S = 10.0
#: Questions for the clock of a worker, of which the one with the shortest round trip counts, and seconds for
#: which they may take altogether.
CLOCK_ROUNDS, CLOCK_TIMEOUT_S = 5, 2.0
#: Workers that are asked at a time: many answers at once would wait for each other.
CLOCKS_AT_ONCE = 4


class Recorder:
    """Begin and end recordings of one server, for one trace at a time. On the event loop.

    Parameters
    ----------
    metrics
        Of the server; gets the recording while one goes on.
    """

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self.token: str | None = None
        self._expires: asyncio.TimerHandle | None = None

    def begin(self, token: str) -> Recording:
        """Return the recording of a trace, and begin it if need be; that of another trace ends."""
        recording = self._metrics.recording
        if recording is None or self.token != token:
            self.token = token
            recording = self._metrics.recording = Recording(ranges=Ranges.find())
        self._renew(token)
        return recording

    def end(self, token: str | None = None) -> None:
        """End the recording of a trace, or any."""
        if token in (None, self.token):
            self.token = self._metrics.recording = None
            if self._expires is not None:
                self._expires.cancel()

    def _renew(self, token: str) -> None:
        if self._expires is not None:
            self._expires.cancel()
        self._expires = asyncio.get_running_loop().call_later(LEASE_S, self.end, token)


class WorkerTracing:
    """Record a worker.

    Parameters
    ----------
    worker
        The Dask worker. Its tasks are recorded as Dask has timed them.
    offload
        Runs what takes a while on a thread.
    """

    def __init__(self, worker: WorkerServer, metrics: Metrics, offload: Callable[..., Awaitable[Any]]):
        self._worker = worker
        self._metrics = metrics
        self._offload = offload
        self._recorder = Recorder(metrics)
        self._patches = PatchSet()
        #: The time on the clock of Dask's times at which the clock of events shows 0.
        self._epoch = 0.0
        #: The last transfer that was recorded.
        self._transfer: Any = None

    def install(self) -> None:
        """Answer the scheduler from now on."""
        for name, handler in {CLOCK: self.clock, TAKE: self.take, END: self.end}.items():
            self._patches.add_item(self._worker.handlers, name, handler)

    def uninstall(self) -> None:
        """Record nothing any more."""
        self._patches.restore()
        self._recorder.end()

    async def clock(self) -> float:
        """Handle a question for the clock that times events."""
        return perf_counter()

    async def take(self, token: str, limit: int) -> dict[str, Any]:
        """Handle a question for the next events of a trace."""
        recording = self._recorder.begin(token)
        self._epoch = time() - perf_counter()
        packed: dict[str, Any] = await self._offload(_packed, recording, limit)
        return packed

    async def end(self, token: str) -> None:
        """Handle the end of a trace."""
        self._recorder.end(token)

    def task_ended(self, key: Key) -> None:
        """Record a task that has been executed, as Dask has timed it."""
        recording, task = self._metrics.recording, self._worker.state.tasks.get(key)
        if recording is None or task is None or task.start_time is None or not task.startstops:
            return
        timed = task.startstops[-1]
        if timed["action"] == "compute":
            thread = self._worker.threads.get(key, 0)
            recording.see(thread)
            # Dask has corrected the begin of the task by the difference of clocks from a heartbeat, which is
            # off by as much as heartbeats are under way. The time of its hand-over to its thread is not
            # corrected.
            began, seconds = task.start_time - self._epoch, timed["stop"] - timed["start"]
            recording.add(Event(Kind.SPAN, TASK, began, seconds, thread, str(key), {}))

    def fetched(self) -> None:
        """Record the transfer that has just brought an input, once, as Dask has timed it."""
        recording, timed = self._metrics.recording, next(reversed(self._worker.transfer_incoming_log), None)
        if recording is None or timed is None or timed is self._transfer:
            return
        self._transfer = timed
        began = timed["start"] - self._worker.scheduler_delay - self._epoch
        args = {"bytes": timed["total"], "from": timed["who"], "keys": len(timed["keys"])}
        recording.add(Event(Kind.WAIT, "transfer", began, timed["stop"] - timed["start"], 0, "", args))


class SchedulerTracing:
    """Record the scheduler, and collect what its workers have recorded.

    Parameters
    ----------
    scheduler
        Dask's.
    """

    def __init__(self, scheduler: SchedulerServer, metrics: Metrics):
        self._scheduler: Any = scheduler
        self._recorder = Recorder(metrics)

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Return what clients call, by name."""
        return {BEGIN_ALL: self.begin, TAKE_ALL: self.take, END_ALL: self.end}

    def close(self) -> None:
        """Record nothing any more."""
        self._recorder.end()

    async def begin(self, token: str) -> dict[str, Any]:
        """Handle the begin of a trace.

        Returns
        -------
        dict
            ``clocks`` of the workers; ``now``, the clock of the scheduler as it began, and the ``time``
            of day then.

        Raises
        ------
        RuntimeError
            When another one is being recorded.
        """
        if self._recorder.token not in (None, token):
            raise RuntimeError(
                "another trace of this cluster is being recorded: wait for its end, or "
                f"{LEASE_S:.0f} s if its client is gone"
            )
        now, of_day = perf_counter(), time()
        await self.take(token, 0)
        return {"clocks": await self._clocks(), "now": now, "time": of_day}

    async def take(self, token: str, limit: int) -> dict[str, Any]:
        """Handle a question for the next events of all servers.

        Parameters
        ----------
        limit
            Events of each server, at most.

        Returns
        -------
        dict
            By address, what the server has; under "scheduler" what this one has. A worker that does not
            answer has an ``error``.
        """
        own = await asyncio.to_thread(_packed, self._recorder.begin(token), limit)
        names = {worker: str(state.name) for worker, state in self._scheduler.workers.items()}
        replies = await self._ask_all(names, TAKE, token=token, limit=limit)
        workers = {worker: {**reply, "name": names[worker]} for worker, reply in replies.items()}
        return {"scheduler": {**own, "name": "scheduler"}, **workers}

    async def end(self, token: str) -> dict[str, Any]:
        """Handle the end of a trace: the ``clocks`` of the workers as they are now."""
        clocks = await self._clocks()
        self._recorder.end(token)
        await self._ask_all(self._scheduler.workers, END, token=token)
        return {"clocks": clocks}

    async def _ask_all(self, workers: Iterable[str], op: str, **message: Any) -> dict[str, dict[str, Any]]:
        """Call a handler of all workers; return their answers, or the ``error`` of those that do not answer.

        One that stands still keeps the others waiting for a while only: their recordings would end meanwhile.
        """

        async def ask(worker: str) -> dict[str, Any]:
            try:
                call = getattr(self._scheduler.rpc(worker), op)(**message)
                reply = await asyncio.wait_for(call, ANSWER_TIMEOUT_S)
            except TimeoutError:
                return {"error": f"no answer in {ANSWER_TIMEOUT_S:.0f} s"}
            except Exception as error:  # whatever it has failed with there
                return {"error": str(error)}
            return reply if isinstance(reply, dict) else {"error": "the runtime is off there"}

        workers = list(workers)
        return dict(zip(workers, await asyncio.gather(*map(ask, workers)), strict=True))

    async def _clocks(self) -> dict[str, dict[str, float]]:
        """Return by worker the ``offset`` of its clock to this one, and the ``round_trip`` that showed it.

        The answer with the shortest round trip is off by half of that at most. Workers that do not answer in
        time are left out.
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
            there = await getattr(remote, CLOCK)()
            answered = perf_counter()
            if not isinstance(there, float):  # Dask's answer to an operation that it does not know
                return None
            clock = {"offset": there - (asked + answered) / 2, "round_trip": answered - asked}
            best = min(filter(None, (best, clock)), key=lambda one: one["round_trip"])
        return best


def _packed(recording: Recording, limit: int) -> dict[str, Any]:
    """Take events out of a recording, and write them as JSON: for the comm they are one buffer."""
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
