"""Describe what a process waits for: the stacks of its threads and coroutines, and queued calls.

Any process may be the one that hangs, so there are three ways to inspect it. A coroutine on its event loop
gives the fullest description (``describe_worker`` and ``describe_scheduler`` of
:mod:`dask_gpurt.monitor.waiting`). If the loop is blocked, a signal writes the stacks of all threads without
the loop or the GIL, provided that :func:`arm` was called before. :class:`Watchdog` detects from its own
thread that nothing happens.
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
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TextIO

#: Poll interval of a watchdog, in seconds.
WATCHDOG_POLL_S = 0.25
#: Time that a signalled process gets to write its stacks, in seconds.
SIGNAL_ANSWER_S = 0.5
#: Maximum number of frames per stack.
MAX_FRAMES = 25
#: The files that the signal handler writes stacks to, which have to stay open.
_armed: dict[Path, TextIO] = {}


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


def queued(executor: Executor) -> dict[str, int] | None:
    """Return the numbers of threads and queued calls of an executor; None for other kinds of executor."""
    if not hasattr(executor, "_work_queue") or not hasattr(executor, "_threads"):
        return None
    return {"threads": len(executor._threads), "queued": executor._work_queue.qsize()}


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
