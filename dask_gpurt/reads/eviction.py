"""Keep things in memory that nothing else needs, and drop those that were not used for longest. Pure."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

#: While a cache is full, one new thing in so many is kept as one that was used; the others go first, or are
#: not kept at all. So a table that is larger than the cache, and read again and again, does not evict itself.
ADMITTED_ONE_IN = 8


class EvictingCache:
    """Count the bytes of what a cache has, and choose what it drops. Thread-safe.

    Parameters
    ----------
    room
        Returns the bytes that the cache may have now. Must not block.
    changed
        Called with the bytes that the cache has after each change. Must not block.
    """

    def __init__(self, room: Callable[[], int], changed: Callable[[int], None]):
        self._room = room
        self._changed = changed
        #: The bytes of each thing; the one to drop next comes first.
        self._order: OrderedDict[Any, int] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def excess(self) -> int:
        """Return the bytes that there is no room for any more; 0 or less if there are none."""
        return self.nbytes and self.nbytes - self._room()

    def fit(self) -> None:
        """Drop what there is no room for any more."""
        if (beyond := self.excess()) > 0:
            self.release(beyond)

    def release(self, nbytes: int) -> int:
        """Drop at least so many bytes, if there are as many; return how many were dropped."""
        if not self.nbytes:
            return 0
        dropped = []  # freed without the lock, which may take long on a device
        with self._lock:
            before = self.nbytes
            while self._order and self.nbytes > before - nbytes:
                dropped.append(self._drop(next(iter(self._order))))
            self._changed(self.nbytes)
            return before - self.nbytes

    def close(self) -> None:
        """Drop everything, and keep nothing from now on."""
        self._room = int
        self.release(self.nbytes)

    # ---- under the lock ----------------------------------------------------------------------------

    def _add(self, key: Any, nbytes: int) -> None:
        self._order[key] = nbytes
        self.nbytes += nbytes

    def _drop(self, key: Any) -> Any:
        """Forget a thing, and return it, so that it is freed by the caller."""
        self.nbytes -= self._order.pop(key)
        return self._forget(key)

    def _forget(self, key: Any) -> Any:
        raise NotImplementedError
