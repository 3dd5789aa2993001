"""Describe everything that waits on a worker or a scheduler, to diagnose a hang, also without the runtime."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, cast

from dask_gpurt.dask_hooks.types import SchedulerServer, WorkerServer

if TYPE_CHECKING:
    from dask_gpurt.worker.plugin import GpurtWorkerPlugin

#: Maximum numbers of keys listed per kind, and of frames per stack.
MAX_NAMED, MAX_FRAMES = 50, 25


# ---- on the event loop of a worker or scheduler ----------------------------------------------


async def describe_worker(dask_worker: WorkerServer) -> dict[str, Any]:
    """Describe a worker's running and waiting tasks and its threads, as plain values. On its event loop.

    For ``client.run``.
    """
    state = dask_worker.state
    return {
        "pid": os.getpid(),
        "address": dask_worker.address,
        "status": str(dask_worker.status),
        "takes new tasks": state.running,
        "tasks": Counter(task.state for task in state.tasks.values()),
        "executing": _named(task.key for task in state.executing),
        "long-running": _named(task.key for task in state.long_running),
        "on threads": dict(dask_worker.active_threads),
        "ready": _named(task.key for task in state.ready.sorted()),
        "constrained": _named(task.key for task in state.constrained.sorted()),
        "waiting": _named(
            (task.key, [dependency.key for dependency in task.waiting_for_data]) for task in state.waiting
        ),
        "in flight": _named((task.key, task.coming_from) for task in state.in_flight_tasks),
        "in flight from": {peer: _named(keys) for peer, keys in state.in_flight_workers.items()},
        "data needed": {peer: _named(t.key for t in tasks) for peer, tasks in state.data_needed.items()},
        "busy peers": sorted(state.busy_workers),
        "missing": _named(task.key for task in state.missing_dep_flight),
        "sending": dask_worker.transfer_outgoing_count,
        "executors": {name: queued(each) for name, each in dask_worker.executors.items()},
        "shuffles": _shuffles(dask_worker),
        "runtime": _runtime(cast(Any, dask_worker.plugins.get("gpurt"))),
        "threads": thread_stacks(),
        "coroutines": coroutine_stacks(),
    }


async def describe_scheduler(dask_scheduler: SchedulerServer) -> dict[str, Any]:
    """Describe a scheduler's waiting tasks, workers and threads, as plain values. On its event loop.

    For ``client.run_on_scheduler``.
    """
    scheduler = dask_scheduler
    return {
        "pid": os.getpid(),
        "tasks": Counter(task.state for task in scheduler.tasks.values()),
        "processing": {
            address: _named(task.key for task in worker.processing)
            for address, worker in scheduler.workers.items()
        },
        "status": {address: str(worker.status) for address, worker in scheduler.workers.items()},
        "last seen": {address: worker.last_seen for address, worker in scheduler.workers.items()},
        "queued": _named(task.key for task in scheduler.queued.sorted()),
        "unrunnable": _named(task.key for task in scheduler.unrunnable),
        "waiting": _named(
            (task.key, [each.key for each in task.waiting_on or ()])
            for task in scheduler.tasks.values()
            if task.state == "waiting"
        ),
        "idle": _named(worker.address for worker in scheduler.idle_task_count),
        "plugins": {name: repr(plugin) for name, plugin in scheduler.plugins.items()},
        "threads": thread_stacks(),
        "coroutines": coroutine_stacks(),
    }


def _named(things: Iterable[object]) -> list[str]:
    named = [str(thing) for thing in things]
    return named[:MAX_NAMED] + ([f"and {len(named) - MAX_NAMED} more"] if len(named) > MAX_NAMED else [])


def _shuffles(worker: WorkerServer) -> list[str]:
    # Imported late: this module must load in processes without Dask's shuffles, or with other versions.
    from dask_gpurt.dask_hooks.shuffle import active_runs

    plugin: Any = worker.plugins.get("shuffle")
    return [repr(run) for run in active_runs(plugin).values()] if plugin is not None else []


def _runtime(plugin: GpurtWorkerPlugin | None) -> dict[str, Any] | None:
    """Return the waiting lists of the runtime's parts on a worker; None if the runtime is off."""
    if plugin is None:
        return None
    try:
        return waiting(plugin)
    # A part that is being set up may raise anything; still describe the rest of the worker.
    except Exception as error:
        return {"error": repr(error)}


# ---- the runtime on a worker -----------------------------------------------------------------


def waiting(plugin: GpurtWorkerPlugin) -> dict[str, Any]:
    """Return what each part of a worker's runtime waits for, as plain values. On its event loop.

    Parts that can hang say so in their ``repr``.

    ``plugin``: the worker plugin; its setup may be incomplete.
    """
    parts: dict[str, Callable[[], Any]] = {
        "lines": lambda: [repr(line) for line in plugin.metrics.lines if line.waiting],
        "memory": lambda: repr(plugin.data),
        "compute": lambda: repr(plugin.reads.turns),
        "tiers": lambda: {
            **(queued(plugin.tiers.executor) or {}),
            "used": plugin.tiers.ledger.snapshot()["cells"],
        },
        "moving": lambda: list(map(str, plugin.tiers.tiered_buffer.moving())),
        "exchange": lambda: queued(plugin.exchange.executor),
        "pulls": lambda: repr(plugin.exchange.puller),
        "shards": lambda: repr(plugin.exchange),
        "room": lambda: repr(plugin.exchange.pools),
        "host room": lambda: repr(plugin.exchange.host_room),
        "pools": lambda: plugin.exchange.pools.describe(),
        "counters": lambda: plugin.metrics.snapshot(),
    }
    return {name: _described(part) for name, part in parts.items()}


def _described(part: Callable[[], Any]) -> Any:
    try:
        return part()
    # A part that is not set up yet, or closed already, must not hide the other parts.
    except Exception as error:
        return f"unknown: {error!r}"


# ---- stacks -------------------------------------------------------------------------------------


def thread_stacks() -> dict[str, str]:
    """Return the stack of each thread of this process, by name and id."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, '?')}-{ident}": "".join(traceback.format_stack(frame)[-MAX_FRAMES:])
        for ident, frame in sys._current_frames().items()
    }


def coroutine_stacks() -> list[str]:
    """Return the stack of each asyncio task of the running loop, down to the innermost await."""
    return sorted(_awaiting(task) for task in asyncio.all_tasks() if task is not asyncio.current_task())


def _awaiting(task: asyncio.Task[Any]) -> str:
    lines = [task.get_name()]
    at: Any = task.get_coro()
    while at is not None and len(lines) <= MAX_FRAMES:
        frame = getattr(at, "cr_frame", None) or getattr(at, "gi_frame", None)
        if frame is None:
            lines.append(f"  {at!r}")
            break
        lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        at = getattr(at, "cr_await", None) or getattr(at, "gi_yieldfrom", None)
    return "\n".join(lines)


def queued(executor: Executor) -> dict[str, int] | None:
    """Return the numbers of threads and queued calls of an executor; None for other kinds of executor."""
    if not hasattr(executor, "_work_queue") or not hasattr(executor, "_threads"):
        return None
    return {"threads": len(executor._threads), "queued": executor._work_queue.qsize()}
