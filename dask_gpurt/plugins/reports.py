"""Report what the runtime on a cluster did: on workers that are there, and on those that have left since.

A worker that is killed can not be asked. Each heartbeat carries its counters, so that what it did until its
last one stays in the totals of the cluster.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distributed.metrics import time

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.types import SchedulerServer, WorkerServer
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.metrics import combine

#: The name of the heartbeat metric.
METRIC = "gpurt_counters"
#: The handler of a worker that is asked for its report.
REPORT = "gpurt_report"
#: Seconds for a worker to answer, which may be busy, and less where a person waits for a doctor.
REPLY_TIMEOUT_S, CONNECT_TIMEOUT_S = 20.0, 6.0
#: The most workers that have left of which a report tells one by one; all of them are in its totals.
MAX_DEPARTED = 100
#: Counted on each worker that takes part, and once by the scheduler: its own number is that of the cluster.
ONCE_A_CLUSTER = "shuffle.runs"

Snapshot = Mapping[str, Any]


class HeartbeatCounters:
    """Send the counters of a worker with its heartbeats.

    Parameters
    ----------
    worker
        The Dask worker.
    snapshot
        Returns ``counters`` and ``fallbacks`` as plain values.
    token
        Of the scheduler's plugin: the scheduler may still have the heartbeat of an earlier one.
    """

    def __init__(self, worker: WorkerServer, snapshot: Callable[[], Snapshot], token: str):
        self._worker = worker
        self._snapshot = snapshot
        self._token = token
        # In a new dictionary: a heartbeat that is being put together goes over the old one.
        worker.metrics = {**worker.metrics, METRIC: self._read}

    def _read(self, _worker: Any) -> dict[str, Any]:
        return {**self._snapshot(), "token": self._token}

    def close(self) -> None:
        """Send nothing any more."""
        metrics = self._worker.metrics
        if metrics.get(METRIC) == self._read:  # else another has put its own there
            self._worker.metrics = {name: metric for name, metric in metrics.items() if name != METRIC}


class ClusterReports:
    """Ask workers for their reports, and keep the counters of those that leave.

    Parameters
    ----------
    scheduler
        Dask's.
    metrics
        The scheduler's own.
    token
        That the workers' plugins have been given.
    """

    def __init__(self, scheduler: SchedulerServer, metrics: Metrics, token: str):
        self._scheduler = scheduler
        self._metrics = metrics
        self._token = token
        # Dask has forgotten the state of a worker by the time that it says that the worker is gone.
        self._states = dict(scheduler.workers)
        self._departed: deque[dict[str, Any]] = deque(maxlen=MAX_DEPARTED)
        self._totals: dict[str, float] = {}

    def add(self, worker: str) -> None:
        """Keep an eye on a worker that has come."""
        self._states[worker] = self._scheduler.workers[worker]

    def remove(self, worker: str) -> None:
        """Keep the counters of a worker that has left, as of its last heartbeat."""
        if (state := self._states.pop(worker, None)) is None:
            return
        known = state.metrics.get(METRIC) or {}
        if known.get("token") != self._token:
            known = {}
        now = time()
        self._totals = _combine([self._totals, known.get("counters", {})])
        self._departed.append(
            {
                "address": worker,
                "name": str(state.name),
                "left": now,
                "silent": max(0.0, now - state.last_seen) if known else None,
                "counters": known.get("counters", {}),
                "fallbacks": known.get("fallbacks", {}),
            }
        )

    def known(self) -> dict[str, Any]:
        """Return what is known without a question to the workers, as of their last heartbeats.

        Returns
        -------
        dict
            As of :meth:`collect`, the ``workers`` with no more than ``counters`` and ``fallbacks``, without
            those that have not reported yet.
        """
        heard = {worker: state.metrics.get(METRIC) or {} for worker, state in self._scheduler.workers.items()}
        return self._report({w: one for w, one in heard.items() if one.get("token") == self._token})

    async def collect(self, connect: bool) -> dict[str, Any]:
        """Return the report of the cluster as plain values.

        Parameters
        ----------
        connect
            Whether the workers shall find out the paths to all their peers first.
        """
        asked = list(self._scheduler.workers)
        answers = await asyncio.gather(*(self._ask(worker, connect) for worker in asked))
        # One that was lost meanwhile is among those that have left.
        workers = {
            w: answer for w, answer in zip(asked, answers, strict=True) if w in self._scheduler.workers
        }
        return self._report(workers)

    def _report(self, workers: dict[str, dict[str, Any]]) -> dict[str, Any]:
        own = self._metrics.snapshot()
        counters = combine(
            [own["counters"], self._totals, _combine(one.get("counters", {}) for one in workers.values())]
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
        """Return the report of one worker, or an ``error``; one that stands still keeps no other waiting."""
        if not connect:
            return await self._reply(worker, False, REPLY_TIMEOUT_S)
        # A peer may stand still, to which it finds out the path: what is known without that is ready then.
        found, known = await asyncio.gather(
            self._reply(worker, True, CONNECT_TIMEOUT_S),
            self._reply(worker, False, CONNECT_TIMEOUT_S),
        )
        return known if "error" in found else found

    async def _reply(self, worker: str, connect: bool, timeout_s: float) -> dict[str, Any]:
        message = {"op": REPORT, "connect": connect}
        try:
            async with asyncio.timeout(timeout_s):
                replies = await self._scheduler.broadcast(msg=message, workers=[worker], on_error="return")
        except TimeoutError:
            return {"error": f"no answer within {timeout_s:g} s"}
        reply = replies[worker]
        return reply if isinstance(reply, dict) else {"error": str(reply)}


def _combine(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Put the counters of workers together, without those that the scheduler counts."""
    counters = combine(reports)
    counters.pop(ONCE_A_CLUSTER, None)
    return counters
