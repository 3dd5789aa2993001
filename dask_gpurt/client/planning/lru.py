"""Provide a bounded, thread-safe cache that evicts the least recently used value."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRU(Generic[Value]):
    """Keep the most recently used values. Thread-safe.

    Parameters
    ----------
    limit
        The maximum number of values.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key and mark it as used; None if there is none."""
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
            return found

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value, and evict the least recently used one if there are too many."""
        dropped = None
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._limit:
                dropped = self._values.popitem(last=False)
        del dropped  # outside the lock: its finaliser may run any code

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            values, self._values = self._values, OrderedDict()
        values.clear()
