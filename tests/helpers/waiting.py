"""Wait for a condition, with one generous limit for all tests, since machines may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 60
POLL_INTERVAL_S = 0.01


def until(holds: Callable[[], object], found: Callable[[], object] | None = None) -> None:
    """Return once ``holds`` is true; on timeout fail with the last value of ``found``."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, found and found()
        time.sleep(POLL_INTERVAL_S)
