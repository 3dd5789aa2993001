"""Wrap the methods of a worker for tasks and data, and use its private parts.

Each wrapper is put on one worker, by a set of replacements whose layer says which of several is called first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

from dask.typing import Key
from distributed.core import Status
from distributed.metrics import time
from distributed.threadpoolexecutor import ThreadPoolExecutor
from distributed.worker_state_machine import SecedeEvent, UpdateDataEvent

from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.patch import PatchSet, Wrap
from dask_gpurt.dask_hooks.seams import REPLICA_CHOICE, WORKER
from dask_gpurt.dask_hooks.types import WorkerServer, WorkerStateMachine

#: The states of a server that takes part in nothing any more.
CLOSING = (Status.closing, Status.closed, Status.failed)


def wrap_execute(patches: PatchSet, worker: WorkerServer, wrap: Wrap) -> None:
    """Wrap the coroutine ``execute(key, *, stimulus_id)``, which runs a task and returns an event.

    Raises
    ------
    UnsupportedError
        When it is not as it is known.
    """
    patches.replace(WORKER["execute"], wrap, on=worker)


def wrap_data_access(
    patches: PatchSet, worker: WorkerServer, *, execute: Wrap, gather_dep: Wrap, get_data: Wrap
) -> None:
    """Wrap all that reads or stores a worker's data, or nothing.

    Parameters
    ----------
    execute
        The coroutine ``execute(key, *, stimulus_id)``, which runs a task and returns an event.
    gather_dep
        The coroutine ``gather_dep(worker, to_gather, total_nbytes, *, stimulus_id)``, which fetches.
    get_data
        The handler ``get_data(comm, keys, who, serializers)``, which serves peers.

    Raises
    ------
    UnsupportedError
        When one of them is not as it is known.
    """
    if (difference := WORKER["get_data"].difference()) is not None:
        raise UnsupportedError(difference)
    patches.replace_all({WORKER["execute"]: execute, WORKER["gather_dep"]: gather_dep}, on=worker)
    patches.put_item(worker.handlers, "get_data", get_data)


def wrap_submit(patches: PatchSet, worker: WorkerServer, wrap: Wrap) -> None:
    """Wrap how tasks are handed over to the threads that they run on."""
    patches.put(worker.executors["default"], "submit", wrap)


def widen_pool(worker: WorkerServer, by: int) -> Callable[[], None]:
    """Add threads to the pool of a worker, beyond its slots; Dask hands over as many tasks as have slots.

    Returns
    -------
    Callable
        Takes it back. Threads that are there stay.

    Raises
    ------
    UnsupportedError
        When the worker's tasks run in a pool of another kind, or in one that another package has derived.
    """
    pool = worker.executors["default"]
    if type(pool) is not ThreadPoolExecutor:
        raise UnsupportedError(f"tasks run in a {type(pool).__name__}")
    pool._max_workers += by

    def restore() -> None:
        pool._max_workers -= by

    return restore


def has_left_pool(worker: WorkerServer, thread: threading.Thread) -> bool:
    """Return whether a thread of a worker's tasks has seceded from its pool."""
    return thread not in cast(Any, worker.executors["default"])._threads


def leave_slot(worker: WorkerServer, key: Key) -> bool:
    """Start the next ready task in the slot of a task that goes on; return whether that had a slot.

    On the event loop. The scheduler may send one more task then. As when a task secedes, but its thread stays
    in the pool, and the scheduler is not told how long it took so far: it would take that for its duration.
    """
    task = worker.state.tasks.get(key)
    if task is None or task.state != "executing":
        return False
    duration = cast(float, None)  # which the scheduler knows: of a task that it has had cancelled meanwhile
    worker.handle_stimulus(
        SecedeEvent(key=key, compute_duration=duration, stimulus_id=f"gpurt-read-{time()}")
    )
    return True


def put_results(worker: WorkerServer, results: Mapping[Key, object]) -> None:
    """Store results that the scheduler has sent, and counts as replicas of this worker. On the event loop."""
    tasks, stimulus_id = worker.state.tasks, f"gpurt-results-{time()}"
    states = {key: "released" if (task := tasks.get(key)) is None else task.state for key in results}
    new = {key: value for key, value in results.items() if states[key] == "released"}
    if new:
        worker.handle_stimulus(UpdateDataEvent(data=new, stimulus_id=stimulus_id))
    for key, state in states.items():
        # A fetch or computation under way goes on and is reported at its end; until then the key is not here.
        if state not in ("released", "memory"):
            worker.batched_stream.send({"op": "release-worker-data", "key": key, "stimulus_id": stimulus_id})


def wrap_replica_choice(patches: PatchSet, state: WorkerStateMachine, wrap: Wrap) -> None:
    """Wrap ``(state)``, which yields the workers that are fetched from next, each with the tasks it has.

    Raises
    ------
    UnsupportedError
        When it, or its body, is not as it is known.
    """
    patches.put_class(state, REPLICA_CHOICE["_select_workers_for_gather"], wrap)


def replace_data(worker: WorkerServer, data: MutableMapping[Key, object]) -> None:
    """Replace the mapping of a worker's data, everywhere that refers to it."""
    worker.memory_manager.data = worker.state.data = data


def call_soon(server: Any, function: Callable[..., Any], *args: Any) -> None:
    """Run a coroutine function on a server's loop; cancelled when the server closes."""
    server._ongoing_background_tasks.call_soon(function, *args)


def is_finalizing(server: Any) -> bool:
    """Return whether the interpreter is shutting down, as a server sees it."""
    return cast(bool, server._is_finalizing())


def is_closing(server: Any) -> bool:
    """Return whether a server ends, by itself or with its interpreter."""
    return is_finalizing(server) or server.status in CLOSING
