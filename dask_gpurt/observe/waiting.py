"""Describe what a process waits for: the stacks of its threads and coroutines, and queued calls.

What the runtime and Dask wait for beside that, :mod:`dask_gpurt.monitor.waiting` adds.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from concurrent.futures import Executor
from typing import Any

#: Maximum number of frames per stack.
MAX_FRAMES = 25


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
