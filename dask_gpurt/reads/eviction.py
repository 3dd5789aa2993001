"""Keep things in memory that nothing else needs, and drop those that were not used for longest. Pure."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dask_gpurt.observe import Metrics

#: While a cache is full, one new thing in so many is kept as one that was used; the others go first, or are
#: not kept at all. So a table that is larger than the cache, and read again and again, does not evict itself.
ADMITTED_ONE_IN = 8


def count_found(metrics: Metrics, cache: EvictingCache, nbytes: int, source: str) -> None:
    """Count bytes that a task has found in a cache, and the time that it did not spend on getting them."""
    metrics.add("reads.bytes.{source}", nbytes, source)
    metrics.add("reads.hits.{source}", 1, source)
    metrics.add("reads.seconds.saved", cache.saved(nbytes))


class EvictingCache(ABC):
    """Count the bytes of what a cache has, and choose what it drops. Thread-safe.

    ``room``: returns the bytes that the cache may have now. Must not block.
    ``changed``: called with the bytes that the cache has after each change. Must not block.
    """

    def __init__(self, room: Callable[[], int], changed: Callable[[int], None]):
        self._room = room
        self._changed = changed
        #: The bytes of each thing; the one to drop next comes first.
        self._order: OrderedDict[Any, int] = OrderedDict()
        self._lock = threading.Lock()
        #: Held while a thing is freed, which may take long; taken before the other lock.
        self._freeing = threading.RLock()
        self.nbytes = 0
        #: How many things have been released, and freed.
        self.releases = 0
        #: The bytes that were not here, and the seconds that it took to get them.
        self._missed: tuple[int, float] = 0, 0.0

    @contextmanager
    def missing(self) -> Iterator[list[int]]:
        """Measure how long it takes to get what is not here, whose bytes the block appends to a list."""
        sizes: list[int] = []
        began = time.perf_counter()
        yield sizes
        seconds = time.perf_counter() - began
        with self._lock:
            self._missed = self._missed[0] + sum(sizes), self._missed[1] + seconds

    def saved(self, nbytes: int) -> float:
        """Return the seconds that it would have taken to get bytes that are here, by the mean of others."""
        missed, seconds = self._missed
        return nbytes * seconds / missed if missed else 0.0

    def excess(self) -> int:
        """Return the bytes that there is no room for any more; 0 or less if there are none."""
        return self.nbytes and self.nbytes - self._room()

    def fit(self) -> None:
        """Drop what there is no room for any more."""
        if (beyond := self.excess()) > 0:
            self.release(beyond)

    def release(self, nbytes: int) -> int:
        """Drop at least so many bytes, if there are as many; return how many were dropped.

        One thing is freed after the other, so that what is here is what another thread can still free, and
        nobody finds nothing to drop while the last thing is being freed::

            Thread 1: drops everything, for a task        Thread 2: runs that task, and has no memory;
            that starts, and begins to free it            must not find that there is nothing to drop
        """
        released = 0
        while released < nbytes and (size := self._release_next()) is not None:
            released += size
        return released

    def _release_next(self) -> int | None:
        """Drop what is to go next, and return its bytes; None if there is nothing."""
        with self._freeing:
            with self._lock:
                if not self._order:
                    return None
                key, size = next(iter(self._order.items()))
                dropped = [self._drop(key)]
                self._changed(self.nbytes)
            self._free(dropped)  # without the lock: freeing memory of a device may take long
            with self._lock:
                self.releases += 1
            return size

    def close(self) -> None:
        """Drop everything, and keep nothing from now on."""
        self._room = int
        self.release(sys.maxsize)  # also what another thread keeps just now, having asked for room before

    def _free(self, dropped: list[Any]) -> None:
        """Free things that were dropped, whose only references these are. Without the lock."""
        dropped.clear()

    # ---- under the lock ----------------------------------------------------------------------------

    def _add(self, key: Any, nbytes: int) -> None:
        self._order[key] = nbytes
        self.nbytes += nbytes

    def _drop(self, key: Any) -> Any:
        """Forget a thing, and return it, so that it is freed by the caller."""
        self.nbytes -= self._order.pop(key)
        return self._forget(key)

    @abstractmethod
    def _forget(self, key: Any) -> Any:
        """Remove a thing, and return it."""
