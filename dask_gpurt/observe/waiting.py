"""Describe what a process waits for: stacks of threads and coroutines, waiting lists of Dask and the runtime.

Any process may be the one that hangs, so there are three ways to inspect it. A coroutine on its event loop
gives the fullest description (:func:`describe_worker`, :func:`describe_scheduler`). If the loop is blocked, a
signal writes the stacks of all threads without the loop or the GIL, provided that :func:`arm` was called
before. :class:`Watchdog` detects from its own thread that nothing happens.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: Poll interval of a watchdog, in seconds.
WATCHDOG_POLL_S = 0.25
#: Time that a signalled process gets to write its stacks, in seconds.
SIGNAL_ANSWER_S = 0.5
#: Maximum number of keys listed per kind, and of frames per stack.
MAX_NAMED, MAX_FRAMES = 50, 25
#: The files that the signal handler writes stacks to, which have to stay open.
_armed: dict[Path, Any] = {}


def arm(directory: str | Path) -> str:
    """Make SIGUSR1 write the stacks of all threads of this process to a file; return its path.

    ``faulthandler`` writes them from the signal handler itself, even while a C function holds the GIL.
    """
    path = Path(directory) / f"stacks-{os.getpid()}.txt"
    if path not in _armed:
        path.parent.mkdir(parents=True, exist_ok=True)
        _armed[path] = path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=_armed[path], all_threads=True, chain=False)
    return str(path)


def signalled_stacks(directory: str | Path, pids: Iterable[int]) -> dict[int, str]:
    """Signal armed processes, wait, and return the stacks that they wrote, by process id."""
    files = {pid: Path(directory) / f"stacks-{pid}.txt" for pid in pids}
    sizes = {pid: path.stat().st_size for pid, path in files.items() if path.exists()}
    for pid in sizes:
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue
    time.sleep(SIGNAL_ANSWER_S)
    return {pid: _text_from(files[pid], size) or "no answer to the signal" for pid, size in sizes.items()}


def _text_from(path: Path, start: int) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        file.seek(start)
        return file.read()


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


# ---- waiting lists of Dask and the runtime -------------------------------------------------


async def describe_worker(dask_worker: Any) -> dict[str, Any]:
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
        "runtime": _runtime(dask_worker.plugins.get("gpurt")),
        "threads": thread_stacks(),
        "coroutines": coroutine_stacks(),
    }


def _named(things: Iterable[Any]) -> list[str]:
    named = [str(thing) for thing in things]
    return named[:MAX_NAMED] + ([f"and {len(named) - MAX_NAMED} more"] if len(named) > MAX_NAMED else [])


def queued(executor: Any) -> dict[str, int] | None:
    """Return the numbers of threads and queued calls of an executor; None for other kinds of executor."""
    if not hasattr(executor, "_work_queue") or not hasattr(executor, "_threads"):
        return None
    return {"threads": len(executor._threads), "queued": executor._work_queue.qsize()}


def _shuffles(worker: Any) -> list[str]:
    # Imported late: this module must load in processes without Dask's shuffles, or with other versions.
    from dask_gpurt.dask_hooks.shuffle import active_runs

    plugin = worker.plugins.get("shuffle")
    return [repr(run) for run in active_runs(plugin).values()] if plugin is not None else []


def _runtime(plugin: Any) -> dict[str, Any] | None:
    """Return the waiting lists of the runtime's parts on a worker; None if the runtime is off."""
    if plugin is None:
        return None
    try:
        found: dict[str, Any] = plugin.waiting()
    # A part that is being set up may raise anything; still describe the rest of the worker.
    except Exception as error:
        return {"error": repr(error)}
    return found


async def describe_scheduler(dask_scheduler: Any) -> dict[str, Any]:
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
        "queued": _named(task.key for task in scheduler.queued.sorted()),
        "unrunnable": _named(task.key for task in scheduler.unrunnable),
        "waiting": _named(
            (task.key, [each.key for each in task.waiting_on])
            for task in scheduler.tasks.values()
            if task.state == "waiting"
        ),
        "idle": _named(worker.address for worker in scheduler.idle_task_count),
        "plugins": {name: repr(plugin) for name, plugin in scheduler.plugins.items()},
        "threads": thread_stacks(),
        "coroutines": coroutine_stacks(),
    }


# ---- the watchdog -----------------------------------------------------------------------------


class Watchdog:
    """Call ``stalled`` from its own thread, once for each stall.

    Parameters
    ----------
    last
        Returns the time of the last activity, by ``time.monotonic``; None while no activity is expected.
    limit_s
        Seconds without activity that count as a stall.
    stalled
        Called with the seconds since the last activity.
    """

    def __init__(self, last: Callable[[], float | None], limit_s: float, stalled: Callable[[float], None]):
        self._last = last
        self._limit_s = limit_s
        self._stalled = stalled
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpurt-watchdog", daemon=True)
        #: The largest delay of a poll, in seconds: a busy machine delays this thread too.
        self.lateness_s = 0.0

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take_lateness(self) -> float:
        """Return the largest delay of a poll since the last call, in seconds."""
        lateness, self.lateness_s = self.lateness_s, 0.0
        return lateness

    def _watch(self) -> None:
        said: float | None = None
        looked = time.monotonic()
        while not self._stop.wait(WATCHDOG_POLL_S):
            now, last = time.monotonic(), self._last()
            self.lateness_s = max(self.lateness_s, now - looked - WATCHDOG_POLL_S)
            looked = now
            if last is not None and last != said and now - last > self._limit_s:
                said = last
                self._stalled(now - last)
                looked = time.monotonic()
