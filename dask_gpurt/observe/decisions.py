"""Record decisions with their subject, time and reason."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

#: Maximum number of decisions; the oldest are dropped first.
MAX_DECISIONS = 1000


class Decisions:
    """Keep the last decisions of one process. Thread-safe.

    Parameters
    ----------
    clock
        Returns seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)
        self._last: dict[str, tuple[str, str]] = {}

    def note(self, subject: str, decided: str, why: str) -> bool:
        """Record a decision unless it repeats the last one on this subject; return whether it differs."""
        with self._lock:
            if self._last.get(subject) == (decided, why):
                return False
            if len(self._last) >= MAX_DECISIONS:
                self._last.clear()
            self._last[subject] = decided, why
            self._entries.append({"at": self._clock(), "subject": subject, "decided": decided, "why": why})
            return True

    def last(self) -> dict[str, Any] | None:
        """Return the latest record, or None if there is none."""
        with self._lock:
            return dict(self._entries[-1]) if self._entries else None

    def snapshot(self) -> list[dict[str, Any]]:
        """Return all records, oldest first, as plain values."""
        with self._lock:
            return [dict(entry) for entry in self._entries]
