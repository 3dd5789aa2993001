"""Describe what waits: stacks of threads and coroutines, and the waiting lists of Dask and the runtime.

There are three ways to ask a process, since any process may be the one that hangs. A coroutine on its event
loop describes it best (:func:`describe_worker`, :func:`describe_scheduler`). A blocked loop does not
answer: then :func:`arm` has made a signal write the stacks of all threads, which needs neither the loop nor
the GIL. And :class:`Watchdog` looks on a thread of its own whether anything happens at all.
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

#: Seconds between looks of a watchdog at whether anything has happened.
WATCHDOG_POLL_S = 0.25
#: Seconds that a process gets to write its stacks once it was signalled.
SIGNAL_ANSWER_S = 0.5
#: The most keys that are named of each kind, and the most frames of a stack.
MAX_NAMED, MAX_FRAMES = 50, 25
#: The files that stacks are written to by a signal; they have to stay open.
_armed: dict[Path, Any] = {}


def arm(directory: str | Path) -> str:
    """Have SIGUSR1 write the stacks of all threads of this process to a file; returns its path.

    ``faulthandler`` writes them from the signal handler itself, also while a thread in C holds the GIL.
    """
    path = Path(directory) / f"stacks-{os.getpid()}.txt"
    if path not in _armed:
        path.parent.mkdir(parents=True, exist_ok=True)
        _armed[path] = path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=_armed[path], all_threads=True, chain=False)
    return str(path)


def signalled_stacks(directory: str | Path, pids: Iterable[int]) -> dict[int, str]:
    """Signal armed processes, and return the stacks that they have written since. Blocks."""
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
    """Return where each thread of this process is, by name and id."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, '?')}-{ident}": "".join(traceback.format_stack(frame)[-MAX_FRAMES:])
        for ident, frame in sys._current_frames().items()
    }


def coroutine_stacks() -> list[str]:
    """Return where each asyncio task of the running loop waits, down to the innermost await."""
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


# ---- what Dask and the runtime keep waiting ------------------------------------------------


async def describe_worker(dask_worker: Any) -> dict[str, Any]:
    """Return what a worker runs, waits for and keeps waiting, as plain values; on its event loop.

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
    """Return the threads of an executor and what waits for one; None of what has no threads."""
    if not hasattr(executor, "_work_queue") or not hasattr(executor, "_threads"):
        return None
    return {"threads": len(executor._threads), "queued": executor._work_queue.qsize()}


def _shuffles(worker: Any) -> list[str]:
    # Here, since this module is also for processes without Dask's shuffles, or with other ones.
    from dask_gpurt.dask_hooks.shuffle import active_runs

    plugin = worker.plugins.get("shuffle")
    return [repr(run) for run in active_runs(plugin).values()] if plugin is not None else []


def _runtime(plugin: Any) -> dict[str, Any] | None:
    """Ask each part of the runtime on a worker for what waits there; None where the runtime is off."""
    if plugin is None:
        return None
    try:
        found: dict[str, Any] = plugin.waiting()
    # A part that is half set up may raise anything; the other parts are described all the same.
    except Exception as error:
        return {"error": repr(error)}
    return found


async def describe_scheduler(dask_scheduler: Any) -> dict[str, Any]:
    """Return what a scheduler waits for, as plain values; on its event loop.

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


# ---- whether anything happens -----------------------------------------------------------------


class Watchdog:
    """Call for help once, on a thread of its own, each time that nothing has happened for too long.

    Parameters
    ----------
    last
        When something happened last, by ``time.monotonic``; None while nothing is expected to happen.
    limit_s
        Seconds that count as too long.
    stalled
        Called with the seconds.
    """

    def __init__(self, last: Callable[[], float | None], limit_s: float, stalled: Callable[[float], None]):
        self._last = last
        self._limit_s = limit_s
        self._stalled = stalled
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpurt-watchdog", daemon=True)
        #: By how much the looks came late at most: a machine that is busy keeps this thread waiting too.
        self.lateness_s = 0.0

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take_lateness(self) -> float:
        """Return the most that a look came late since the last call, in seconds."""
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
