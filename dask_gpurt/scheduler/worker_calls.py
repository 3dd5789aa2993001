"""Ask workers from the scheduler, and keep tasks off those that do not answer until they are heard again.

Each is asked for itself and for a limited time, so that none delays the others.

A process that is stopped, or a host that hangs, keeps its connections: calls to it wait until Dask removes
the worker, by default after five minutes (``distributed.scheduler.worker-ttl``). A run waits much shorter: if
a call to a worker has no reply, and no heartbeat of the worker has arrived either, others do its part.

The worker may be healthy all the same, since a task that holds Python's global lock stops the event loop.
Then some work is done twice, and nothing else: the worker stays in the cluster, and what it sends late is
refused where others have taken over. Nevertheless a worker that runs tasks is given more time.

Meanwhile Dask would send tasks to that worker, which looks idle. So it counts as paused, until it replies
with its actual status to a question on its stream. On the stream, the reply is ordered with all changes of
that status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from distributed.core import Status
from distributed.metrics import time
from distributed.scheduler import heartbeat_interval

from dask_gpurt.dask_hooks.shuffle import id_from_key
from dask_gpurt.dask_hooks.types import SchedulerServer, WorkerState
from dask_gpurt.observe import Metrics
from dask_gpurt.protocol import ASK_STATUS_OP, HEARTBEAT_METRIC, MAKE_ROOM_HANDLER

#: Seconds for which a round for room waits for each worker; the next round follows twice a second.
ROOM_TIMEOUT_S = 2.0


async def ask(scheduler: SchedulerServer, worker: str, op: str, timeout_s: float, **message: Any) -> Any:
    """Call a handler of a worker; return its reply, or the error if it fails or takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            return await getattr(scheduler.rpc(worker), op)(**message)
    except TimeoutError:
        return TimeoutError(f"no answer within {timeout_s:g} s")
    except Exception as error:  # whatever the handler raises on the worker, too
        return error


async def ask_all(
    scheduler: SchedulerServer, workers: Iterable[str], op: str, timeout_s: float, **message: Any
) -> dict[str, Any]:
    """Call a handler of several workers, and return for each what :func:`ask` does."""
    workers = list(workers)
    replies = await asyncio.gather(*(ask(scheduler, each, op, timeout_s, **message) for each in workers))
    return dict(zip(workers, replies, strict=True))


async def make_room(scheduler: SchedulerServer, host: str) -> dict[str, int | None]:
    """Make the workers of a host return memory behind their pools.

    Returns the bytes that each worker still uses; None if it does not tell in time.
    """
    workers = [worker for worker, state in scheduler.workers.items() if state.host == host]
    replies = await ask_all(scheduler, workers, MAKE_ROOM_HANDLER, ROOM_TIMEOUT_S)
    # Without the runtime a worker has no such handler. Dask then replies None, and it has no pool.
    return {worker: None if isinstance(reply, Exception) else reply or 0 for worker, reply in replies.items()}


# ---- workers that have fallen silent -------------------------------------------------------------------

logger = logging.getLogger(__name__)

#: Seconds without a heartbeat after which a worker that does not reply is silent: one without tasks, and one
#: with tasks, which may hold Python's global lock.
SILENT_S, SILENT_AT_WORK_S = 10.0, 30.0
#: The least number of missed heartbeats; large clusters have long intervals.
MISSED = 4


class SilentWorkers:
    """Hold the workers that runs have given up waiting for, until they are heard again."""

    def __init__(self, scheduler: SchedulerServer, metrics: Metrics):
        self._scheduler = scheduler
        self._metrics = metrics
        #: The held workers, each with whether it was paused here.
        self._held: dict[str, bool] = {}
        #: By worker, its last heartbeat and the time of the first look that found this heartbeat too old.
        self._looks: dict[str, tuple[float, float]] = {}

    def __contains__(self, worker: object) -> bool:
        return worker in self._held

    def is_silent(self, worker: str, patience_s: float | None = None) -> bool:
        """Return whether a worker that does not reply has sent no heartbeat for too long, at two looks.

        While the scheduler's own event loop is busy, it reads no heartbeats; it does between the two looks.

        ``patience_s``: the seconds that are too long; by default those of a run that waits for the worker.
        """
        if (state := self._scheduler.workers.get(worker)) is None:
            return False
        if worker in self._held:
            return True
        now, interval = time(), heartbeat_interval(len(self._scheduler.workers))
        patience_s = _patience(state) if patience_s is None else patience_s
        if now - state.last_seen < max(patience_s, MISSED * interval):
            return False
        heartbeat, looked = self._looks.get(worker, (None, now))
        if heartbeat != state.last_seen:
            self._looks[worker] = state.last_seen, now
            return False
        return now - looked >= interval

    def hold(self, worker: str) -> None:
        """Keep tasks off a worker until it is heard again. Idempotent."""
        if worker in self._held:
            return
        state = self._scheduler.workers[worker]
        logger.warning(
            "Worker %s does not reply, and its last heartbeat is %.0f s old: "
            "shuffles go on without it, and it gets no tasks until it is heard again",
            worker,
            time() - state.last_seen,
        )
        self._metrics.add("shuffle.workers.silent")
        self._held[worker] = state.status is Status.running
        if self._held[worker]:
            self._set_status(worker, Status.paused)
        self._scheduler.send_all({}, {worker: [{"op": ASK_STATUS_OP}]})

    def is_back(self, worker: str, status: str) -> None:
        """Release a worker that has told its status (stream handler)."""
        if worker not in self._held:
            return
        logger.info("Worker %s is heard again, and is %s", worker, status)
        if self._held.pop(worker):
            self._set_status(worker, Status[status])

    def remove(self, worker: str) -> None:
        """Forget a worker that has left the cluster."""
        self._held.pop(worker, None)
        self._looks.pop(worker, None)

    def close(self) -> None:
        """Release all workers: while the runtime is off, Dask decides about them alone."""
        for worker, paused in self._held.items():
            if paused:
                self._set_status(worker, Status.running)
        self._held.clear()

    def _set_status(self, worker: str, status: Status) -> None:
        # Other statuses are newer: the worker is being retired, for example.
        if self._scheduler.workers[worker].status in (Status.running, Status.paused):
            self._scheduler.handle_worker_status_change(status, worker, f"gpurt-silence-{time()}")


def _patience(state: WorkerState) -> float:
    """Return the seconds for which a worker may be without a heartbeat."""
    at_work = any(id_from_key(task.key) is None for task in state.processing)  # barriers do not compute
    return SILENT_AT_WORK_S if at_work else SILENT_S


def heartbeat_of(state: WorkerState, token: str) -> Mapping[str, Any] | None:
    """Return what the last heartbeat of a worker has told of a runtime; None if none has yet.

    ``token``: identifies the runtime. Another one may have told before it on the same worker.
    """
    beat: Mapping[str, Any] = state.metrics.get(HEARTBEAT_METRIC) or {}
    return beat if beat.get("token") == token else None
