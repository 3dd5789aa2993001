"""Begin and end traces on all servers, and collect their events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import time
from typing import Any

from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.observe import Metrics
from dask_gpurt.protocol import (
    BEGIN_TRACES_HANDLER,
    END_TRACE_HANDLER,
    END_TRACES_HANDLER,
    TAKE_EVENTS_HANDLER,
    TAKE_TRACES_HANDLER,
)
from dask_gpurt.scheduler.worker_calls import ask_all
from dask_gpurt.worker.tracing import LEASE_S, Recorder, packed

#: How long to wait for the events of a worker, in seconds.
ANSWER_TIMEOUT_S = 10.0


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

        Returns ``time``: that of the beginning, in seconds since the epoch.
        Raises RuntimeError if another trace is being recorded.
        """
        if self._recorder.token not in (None, token):
            raise RuntimeError(
                "another trace of this cluster is being recorded: wait until it ends, or "
                f"{LEASE_S:.0f} s if its client is gone"
            )
        began = time()
        await self.take(token, 0)
        return {"time": began}

    async def take(self, token: str, limit: int) -> dict[str, Any]:
        """Return the next events of all servers (handler).

        Returns the batch of each worker by address, and the scheduler's under "scheduler". A worker that does
        not answer has an ``error``.
        """
        own = await asyncio.to_thread(packed, self._recorder.begin(token), limit)
        names = {worker: str(state.name) for worker, state in self._scheduler.workers.items()}
        replies = await ask_all(
            self._scheduler, names, TAKE_EVENTS_HANDLER, ANSWER_TIMEOUT_S, token=token, limit=limit
        )
        workers = {worker: {**_batch(reply), "name": names[worker]} for worker, reply in replies.items()}
        return {"scheduler": {**own, "name": "scheduler"}, **workers}

    async def end(self, token: str) -> None:
        """End a trace (handler)."""
        self._recorder.end(token)
        await ask_all(
            self._scheduler, self._scheduler.workers, END_TRACE_HANDLER, ANSWER_TIMEOUT_S, token=token
        )


def _batch(reply: Any) -> dict[str, Any]:
    """Return the reply of a worker; an ``error`` if it is none."""
    if isinstance(reply, dict):
        return reply
    return {"error": "the runtime is off there" if reply is None else str(reply)}
