"""Begin and end traces on all servers, collect their events, and measure offsets of clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter, time
from typing import Any

from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.observe import Metrics
from dask_gpurt.protocol import (
    BEGIN_TRACES_HANDLER,
    CLOCK_HANDLER,
    END_TRACE_HANDLER,
    END_TRACES_HANDLER,
    TAKE_EVENTS_HANDLER,
    TAKE_TRACES_HANDLER,
)
from dask_gpurt.scheduler.worker_calls import ask_all
from dask_gpurt.worker.tracing import LEASE_S, Recorder, packed

#: How long to wait for the events of a worker, in seconds.
ANSWER_TIMEOUT_S = 10.0
#: How often the clock of a worker is read (the reading with the shortest round trip counts), and the time
#: limit for all readings, in seconds.
CLOCK_ROUNDS, CLOCK_TIMEOUT_S = 5, 2.0
#: How many workers' clocks are read concurrently. More would delay each other's replies.
CLOCKS_AT_ONCE = 4


class SchedulerTracing:
    """Record traces on the scheduler, and collect the events of its workers."""

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

        Returns
        -------
        dict
            The batch of each worker by address, and the scheduler's under "scheduler". A worker that does not
            answer has an ``error``.
        """
        own = await asyncio.to_thread(packed, self._recorder.begin(token), limit)
        names = {worker: str(state.name) for worker, state in self._scheduler.workers.items()}
        replies = await ask_all(
            self._scheduler, names, TAKE_EVENTS_HANDLER, ANSWER_TIMEOUT_S, token=token, limit=limit
        )
        workers = {worker: {**_batch(reply), "name": names[worker]} for worker, reply in replies.items()}
        return {"scheduler": {**own, "name": "scheduler"}, **workers}

    async def end(self, token: str) -> dict[str, Any]:
        """End a trace, and return the workers' current ``clocks`` (handler)."""
        clocks = await self._clocks()
        self._recorder.end(token)
        await ask_all(
            self._scheduler, self._scheduler.workers, END_TRACE_HANDLER, ANSWER_TIMEOUT_S, token=token
        )
        return {"clocks": clocks}

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


def _batch(reply: Any) -> dict[str, Any]:
    """Return the reply of a worker; an ``error`` if it is none."""
    if isinstance(reply, dict):
        return reply
    return {"error": "the runtime is off there" if reply is None else str(reply)}
