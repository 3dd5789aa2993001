"""Collect what the workers of a cluster report: counters, fallbacks and traces.

A killed worker cannot be queried. Each heartbeat carries the worker's counters, so the cluster's totals
include everything up to its last heartbeat, or up to the last report that it has answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distributed.metrics import time

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.metrics import combine
from dask_gpurt.protocol import (
    BEGIN_TRACES_HANDLER,
    END_TRACE_HANDLER,
    END_TRACES_HANDLER,
    TAKE_EVENTS_HANDLER,
    TAKE_TRACES_HANDLER,
    WORKER_REPORT_HANDLER,
)
from dask_gpurt.scheduler.worker_calls import ask, ask_all, heartbeat_of
from dask_gpurt.worker.tracing import LEASE_S, Recorder, packed

#: How long to wait for a worker, which may be busy, in seconds; less for the doctor, which a user waits for.
REPLY_TIMEOUT_S, CONNECT_TIMEOUT_S = 20.0, 6.0
#: The most departed workers that a report lists individually; its totals include all of them.
MAX_DEPARTED = 100
#: Counted on each participating worker, and once on the scheduler. The scheduler's count is the cluster's.
ONCE_A_CLUSTER = "shuffle.runs"

#: What is kept of a worker's answer.
KEPT = ("counters", "fallbacks")

Snapshot = Mapping[str, Any]


class ClusterReports:
    """Collect the workers' reports, and keep the counters of workers that leave.

    ``token``: the token that the workers' plugins were given.
    """

    def __init__(self, scheduler: SchedulerServer, metrics: Metrics, token: str):
        self._scheduler = scheduler
        self._metrics = metrics
        self._token = token
        # Kept here, since Dask forgets the state of a worker before it calls remove_worker.
        self._states = dict(scheduler.workers)
        #: The last answer of each worker, and when it arrived: totals that a user has seen never decrease.
        self._answers: dict[str, tuple[float, Snapshot]] = {}
        self._departed: deque[dict[str, Any]] = deque(maxlen=MAX_DEPARTED)
        self._totals: dict[str, float] = {}

    def add(self, worker: str) -> None:
        """Track a worker that has joined."""
        self._states[worker] = self._scheduler.workers[worker]

    def remove(self, worker: str) -> None:
        """Keep the counters of a worker that has left, as of its last heartbeat or answer."""
        if (state := self._states.get(worker)) is None:
            return
        known = self._heard(worker)
        del self._states[worker]
        answered, _ = self._answers.pop(worker, (0.0, {}))
        now = time()
        self._totals = _combine([self._totals, known.get("counters", {})])
        self._departed.append(
            {
                "address": worker,
                "name": str(state.name),
                "left": now,
                "silent": max(0.0, now - max(state.last_seen, answered)) if known else None,
                "counters": known.get("counters", {}),
                "fallbacks": known.get("fallbacks", {}),
            }
        )

    def _heard(self, worker: str) -> Snapshot:
        """Return the counters of a worker from its last heartbeat and answer; empty if there were none."""
        beat = heartbeat_of(self._states[worker], self._token)
        heard: list[Snapshot] = [] if beat is None else [beat]
        if worker in self._answers:
            heard.append(self._answers[worker][1])
        return _latest(heard) if heard else {}

    def known(self) -> dict[str, Any]:
        """Return a report from what is known of the workers, without querying them.

        As :meth:`collect`, but each worker has only ``counters`` and ``fallbacks``, and workers
        without a heartbeat yet are left out.
        """
        heard = {worker: self._heard(worker) for worker in self._states}
        return self._report({worker: dict(known) for worker, known in heard.items() if known})

    async def collect(self, connect: bool) -> dict[str, Any]:
        """Query all workers, and return the report of the cluster as plain values.

        ``connect``: have the workers detect the paths to all of their peers first.
        """
        asked = dict(self._states)
        answers = await asyncio.gather(*(self._ask(worker, connect) for worker in asked))
        # A worker that has left meanwhile is listed under "departed", even if another one has its address.
        workers = {
            worker: answer
            for (worker, state), answer in zip(asked.items(), answers, strict=True)
            if self._states.get(worker) is state
        }
        return self._report(workers)

    def _report(self, workers: dict[str, dict[str, Any]]) -> dict[str, Any]:
        own = self._metrics.snapshot()
        counted = (self._heard(w) if "error" in one else one for w, one in workers.items())
        counters = combine(
            [own["counters"], self._totals, _combine(one.get("counters", {}) for one in counted)]
        )
        return {
            "enabled": True,
            "version": __version__,
            "counters": counters,
            "fallbacks": own["fallbacks"],
            "workers": workers,
            "departed": list(self._departed),
        }

    async def _ask(self, worker: str, connect: bool) -> dict[str, Any]:
        """Return the report of one worker, or an ``error`` if it is stuck."""
        if not connect:
            return await self._reply(worker, False, REPLY_TIMEOUT_S)
        # Detecting the path to a stuck peer may time out: request the report without new paths as well.
        found, known = await asyncio.gather(
            self._reply(worker, True, CONNECT_TIMEOUT_S), self._reply(worker, False, CONNECT_TIMEOUT_S)
        )
        return known if "error" in found else found

    async def _reply(self, worker: str, connect: bool, timeout_s: float) -> dict[str, Any]:
        state = self._states[worker]
        reply = await ask(self._scheduler, worker, WORKER_REPORT_HANDLER, timeout_s, connect=connect)
        if not isinstance(reply, dict):
            return {"error": str(reply)}
        # Meanwhile the worker may have left, and been counted, and another one may have its address.
        if self._states.get(worker) is state:
            self._answers[worker] = time(), {name: reply.get(name, {}) for name in KEPT}
        return reply


def _latest(heard: Iterable[Snapshot]) -> Snapshot:
    """Combine what one worker has reported at several times, in any order: all its values only grow."""
    counters: dict[str, float] = {}
    fallbacks: dict[str, Any] = {}
    for known in heard:
        for name, value in known["counters"].items():
            counters[name] = max(value, counters.get(name, value))
        for id, fallback in known["fallbacks"].items():
            if id not in fallbacks or fallback["count"] > fallbacks[id]["count"]:
                fallbacks[id] = fallback
    return {"counters": counters, "fallbacks": fallbacks}


def _combine(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine the counters of workers, without the one that the scheduler counts for the cluster."""
    counters = combine(reports)
    counters.pop(ONCE_A_CLUSTER, None)
    return counters


# ---- traces ------------------------------------------------------------------------------------------


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
