"""Wrap a worker's methods for tasks and data, access its private parts, and send its messages at once.

Wrappers are installed on one instance. The layers of their patch sets decide which is called first.

Decisions and their figures: ``docs/decisions/overlap.md``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast
from weakref import WeakKeyDictionary

from dask.typing import Key
from distributed.core import Status
from distributed.metrics import time
from distributed.threadpoolexecutor import ThreadPoolExecutor, thread_state
from distributed.worker_state_machine import SecedeEvent, UpdateDataEvent

from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.patch import PatchSet, Wrap
from dask_gpurt.dask_hooks.seams import WORKER
from dask_gpurt.dask_hooks.types import Stream, WorkerServer

logger = logging.getLogger(__name__)

#: The statuses of a server that is closing or closed.
CLOSING = (Status.closing, Status.closed, Status.failed)
#: The statuses of a worker that has left, or retires.
LEAVING = (*CLOSING, Status.closing_gracefully)


def wrap_execute(patches: PatchSet, worker: WorkerServer, wrap: Wrap) -> None:
    """Wrap the coroutine ``execute(key, *, stimulus_id)``, which runs a task and returns an event.

    Raises UnsupportedError if it differs from the known one.
    """
    patches.replace(WORKER["execute"], wrap, on=worker)


def wrap_data_access(
    patches: PatchSet, worker: WorkerServer, *, execute: Wrap, gather_dep: Wrap, get_data: Wrap
) -> None:
    """Wrap everything that reads or stores a worker's data, or nothing if any of it differs.

    ``execute``: the coroutine ``execute(key, *, stimulus_id)``, which runs a task and returns an event.
    ``gather_dep``: the coroutine ``gather_dep(worker, to_gather, total_nbytes, *, stimulus_id)``, which
    fetches.
    ``get_data``: the handler ``get_data(comm, keys, who, serializers)``, which serves peers.
    Raises UnsupportedError if one of them differs from the known one.
    """
    if (difference := WORKER["get_data"].difference()) is not None:
        raise UnsupportedError(difference)
    patches.replace_all({WORKER["execute"]: execute, WORKER["gather_dep"]: gather_dep}, on=worker)
    patches.put_item(worker.handlers, "get_data", get_data)


def wrap_submit(patches: PatchSet, worker: WorkerServer, wrap: Wrap) -> None:
    """Wrap ``submit`` of the thread pool that runs tasks."""
    patches.put(worker.executors["default"], "submit", wrap)


def widen_pool(worker: WorkerServer, by: int) -> Callable[[], None]:
    """Add threads to a worker's pool beyond its slots. Dask still submits only as many tasks as it has slots.

    Returns a function that restores the size: as many threads as were added end once they are idle.
    Raises UnsupportedError if the worker's tasks run in a pool of another class.
    """
    pool = worker.executors["default"]
    if type(pool) is not ThreadPoolExecutor:
        raise UnsupportedError(f"tasks run in a {type(pool).__name__}")
    with pool._rejoin_lock:
        pool._max_workers += by
        # Threads that were to end may stay. Otherwise those that end later would be counted a second time as
        # the size is restored, and the last thread would leave the pool while a task waits for it.
        pool._rejoin_list[:] = [entry for entry in pool._rejoin_list if not isinstance(entry[0], _Leaver)]

    def restore() -> None:
        with pool._rejoin_lock:
            pool._max_workers -= by
            for _ in range(len(pool._threads) - pool._max_workers):
                leaver = _Leaver(pool)
                pool._rejoin_list.insert(0, (leaver, leaver))  # the last entry is served first

    return restore


class _Leaver:
    """End one thread of a pool, as a thread that rejoins the pool does, without one that takes its place."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def set(self) -> None:
        """Leave in place of the thread: called once the pool has replaced that thread by this object."""
        self._pool._threads.discard(self)
        self._pool._adjust_thread_count()  # if others have seceded since, tasks may wait for this thread

    def join(self, timeout: float | None = None) -> None:
        """Return: the pool may be shut down between these two."""


def has_left_pool(worker: WorkerServer, thread: threading.Thread) -> bool:
    """Return whether a thread of a worker's tasks has seceded from its pool."""
    return thread not in cast(Any, worker.executors["default"])._threads


def rejoin_pool(worker: WorkerServer) -> bool:
    """Let the current thread rejoin its pool at once if it submits for ``rejoin``; return whether it does.

    Dask would wait until another thread of the pool has ended its task. The caller may wait for something
    else instead: ``rejoin`` goes on when this submission returns.
    """
    pool, thread = cast(Any, worker.executors["default"]), threading.current_thread()
    if getattr(thread_state, "proceed", True):
        return False  # it has not left the pool
    with pool._rejoin_lock:
        for entry in [one for one in pool._rejoin_list if one[0] is thread]:
            pool._rejoin_list.remove(entry)
            pool._threads.add(thread)
            entry[1].set()
        # Otherwise an idle thread has let it in already, or it submits something else.
        return thread in pool._threads


def leave_slot(worker: WorkerServer, key: Key) -> bool:
    """Release the slot of a running task for the next ready one; return whether the task had a slot.

    On the event loop. The scheduler may then send one more task. This resembles ``secede``, but the thread
    stays in the pool, and the scheduler does not receive the time so far, which it would take for the task's
    duration.
    """
    task = worker.state.tasks.get(key)
    if task is None or task.state != "executing":
        return False
    duration = cast(float, None)  # the scheduler accepts None, as for a task that was cancelled meanwhile
    worker.handle_stimulus(
        SecedeEvent(key=key, compute_duration=duration, stimulus_id=f"gpurt-read-{time()}")
    )
    return True


def put_results(worker: WorkerServer, results: Mapping[Key, object]) -> None:
    """Store results that the scheduler has sent, and counts as this worker's replicas. On the event loop."""
    tasks, stimulus_id = worker.state.tasks, f"gpurt-results-{time()}"
    states = {key: "released" if (task := tasks.get(key)) is None else task.state for key in results}
    new = {key: value for key, value in results.items() if states[key] == "released"}
    if new:
        worker.handle_stimulus(UpdateDataEvent(data=new, stimulus_id=stimulus_id))
    for key, state in states.items():
        if state == "memory":
            # It was fetched, and its task has run again before the scheduler had heard of this replica.
            worker.state.data[key] = results[key]
        elif state != "released":
            # The key is being fetched or computed. That continues and reports the replica at its end; until
            # then withdraw the replica.
            worker.batched_stream.send({"op": "release-worker-data", "key": key, "stimulus_id": stimulus_id})


async def call_scheduler(
    worker: WorkerServer,
    op: str,
    /,
    *,
    subject: object,
    pause_s: float,
    wanted: Callable[[], bool],
    **message: Any,
) -> Any:
    """Call a handler of the scheduler, and retry while connections break.

    ``subject``: the caller, for the log.
    ``pause_s``: the pause between two calls, in seconds.
    ``wanted``: returns whether to retry, or raises; called after each pause.
    Raises OSError if the connection breaks and the call is not wanted any more.
    """
    while True:
        try:
            return await getattr(worker.scheduler, op)(**message)
        except OSError as error:
            logger.warning("%s cannot reach the scheduler, retrying: %s", subject, error)
            await asyncio.sleep(pause_s)
            if not wanted():
                raise


def replace_data(worker: WorkerServer, data: MutableMapping[Key, object]) -> None:
    """Replace the mapping of a worker's data in all places that refer to it."""
    worker.memory_manager.data = worker.state.data = data


def call_soon(server: Any, function: Callable[..., Any], *args: Any) -> None:
    """Run a coroutine function on a server's loop. It is cancelled when the server closes."""
    server._ongoing_background_tasks.call_soon(function, *args)


def is_finalizing(server: Any) -> bool:
    """Return whether the interpreter is shutting down, according to a server."""
    return cast(bool, server._is_finalizing())


def is_closing(server: Any) -> bool:
    """Return whether a server is closing, or its interpreter is shutting down."""
    return is_finalizing(server) or server.status in CLOSING


# ---- streams between workers and the scheduler -------------------------------------------------------

#: The batching interval, in seconds.
MESSAGE_INTERVAL_S = 0.0


class PromptStreams:
    """Send messages between scheduler and workers without the batching interval of Dask's streams.

    Two messages are on the critical path between a task and its dependent: the end of the task to the
    scheduler, and the dependent to a worker. Dask sends a batch every 2 ms to the scheduler and every 5 ms to
    each worker, so a shorter task is followed by a gap of 5 ms. Messages that arrive while a batch is being
    written still share the next batch, so a busy scheduler batches as before.

    Sending needs the GIL, which the next task needs at the same moment. So a worker with ready tasks batches
    the ends of tasks as Dask does, until its last task runs. On the event loop.
    """

    def __init__(self) -> None:
        #: The original interval of each stream, weakly, since streams end with their workers.
        self._before: WeakKeyDictionary[Stream, float] = WeakKeyDictionary()

    def add(self, stream: Stream) -> None:
        """Have a stream send messages immediately."""
        if stream not in self._before:
            self._before[stream] = stream.interval
            stream.interval = MESSAGE_INTERVAL_S

    def gather(self, stream: Stream, gathers: bool) -> None:
        """Have a stream batch messages with Dask's interval, or send them immediately again."""
        ours = (MESSAGE_INTERVAL_S, before := self._before[stream])
        if stream.interval in ours:
            stream.interval = before if gathers else MESSAGE_INTERVAL_S

    def restore(self) -> None:
        """Restore the intervals of all streams, except those that other code has changed since."""
        while self._before:
            stream, interval = self._before.popitem()
            if stream.interval == MESSAGE_INTERVAL_S:
                stream.interval = interval
