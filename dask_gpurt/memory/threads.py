"""Run blocking functions beside the event loop, also while the interpreter exits.

A program that never closes its ``LocalCluster(processes=False)`` has it closed by a handler at exit. By then
Python has joined the threads of all executors and starts no others. So what closes a worker is called on its
event loop, which nothing else waits for any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


def is_exiting() -> bool:
    """Return whether the interpreter exits: the main thread has ended, and handlers at exit run."""
    return not threading.main_thread().is_alive()


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a blocking function in a thread; in this one if the interpreter exits."""
    if is_exiting():
        return function(*args)
    return await asyncio.to_thread(function, *args)
