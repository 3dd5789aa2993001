"""Wait for what comes about by itself, with one limit for all: a busy machine takes its time."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 60
POLL_INTERVAL_S = 0.01


def until(holds: Callable[[], object], found: Callable[[], object] | None = None) -> None:
    """Return once ``holds`` is true; where it never is, fail with what was ``found`` last."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, found and found()
        time.sleep(POLL_INTERVAL_S)
