"""Counters of one process, and what fell back to Dask's own way and why."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

logger = logging.getLogger("dask_gpurt")


class Metrics:
    """Thread-safe counters. Names are dotted: ``exchange.bytes.shared-memory``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[str, float] = defaultdict(int)
        self._fallbacks: dict[str, dict[str, Any]] = {}

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counters[name] += amount

    def peak(self, name: str, value: float) -> None:
        """Keep the largest value seen under ``name``."""
        with self._lock:
            self._counters[name] = max(self._counters[name], value)

    @contextmanager
    def seconds(self, name: str) -> Iterator[None]:
        """Add the time that the body takes."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - start)

    def fallback(self, what: str, reason: str) -> None:
        """Count that ``what`` was not done our way; log it the first time."""
        with self._lock:
            known = self._fallbacks.setdefault(what, {"reason": reason, "count": 0})
            known["count"] += 1
            known["reason"] = reason
            first = known["count"] == 1
        if first:
            logger.warning("%s: %s (said once; `dask gpurt doctor` counts)", what, reason)

    def snapshot(self) -> dict[str, Any]:
        """Counters and fallbacks, as plain values."""
        with self._lock:
            return {
                "counters": dict(self._counters),
                "fallbacks": {what: dict(known) for what, known in self._fallbacks.items()},
            }
