"""Wait for a condition, with one generous limit for all tests, since machines may be busy."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

LIMIT_S = 60
THREAD_LIMIT_S = 20
POLL_INTERVAL_S = 0.01


def until(holds: Callable[[], object], found: Callable[[], object] | None = None) -> None:
    """Return once ``holds`` is true; on timeout fail with the last value of ``found``."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, found and found()
        time.sleep(POLL_INTERVAL_S)


def on_thread(function: Callable[[], object]) -> None:
    """Run a function on another thread; fail if it waits for this one."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(THREAD_LIMIT_S)
    assert not thread.is_alive()


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop of its own, for a limited time."""

    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), LIMIT_S))

    return run
