"""Keep things in memory that nothing else needs, such as byte ranges, and drop what is unused longest. Pure.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

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


# ---- byte ranges of files ------------------------------------------------------------------------


class Part(NamedTuple):
    """Describe a part of a wanted range.

    ``start``, ``stop``: its first byte in the file, and the one after its last.
    ``data``: its bytes; None if they are not there.
    ``piece``: the first byte of the piece that has them.
    """

    start: int
    stop: int
    data: memoryview | None = None
    piece: int = -1


class Ranges:
    """Hold pieces of one file that do not overlap. Not thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self.pieces: dict[int, bytes] = {}

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """Divide a range into parts that are there, and gaps."""
        at = start
        for piece in itertools.islice(self._starts, max(0, bisect_right(self._starts, at) - 1), None):
            data = self.pieces[piece]
            end = min(piece + len(data), stop)
            if piece >= stop:
                break
            if end <= at:
                continue
            if piece > at:
                yield Part(at, piece)
                at = piece
            yield Part(at, end, memoryview(data)[at - piece : end - piece], piece)
            at = end
        if at < stop:
            yield Part(at, stop)

    def gaps(self, start: int, stop: int) -> list[Part]:
        """Return the parts of a range that are not there."""
        return [part for part in self.parts(start, stop) if part.data is None]

    def put(self, start: int, data: bytes) -> None:
        """Add a piece that fills a gap, or a part of one."""
        insort(self._starts, start)
        self.pieces[start] = data

    def pop(self, start: int) -> bytes:
        """Remove a piece, and return it."""
        self._starts.remove(start)
        return self.pieces.pop(start)


class RangeCache(EvictingCache):
    """Hold ranges of many files, each of one version. Thread-safe."""

    def __init__(self, room: Callable[[], int], changed: Callable[[int], None]):
        super().__init__(room, changed)
        self._files: dict[Hashable, tuple[Hashable, Ranges]] = {}
        self._inserted = itertools.count(1)

    def parts(self, file: Hashable, version: Hashable, start: int, stop: int) -> list[Part]:
        """Divide a range of a version of a file into parts that are here, and gaps."""
        with self._lock:
            known, ranges = self._files.get(file, (None, None))
            if ranges is None or known != version:
                return [Part(start, stop)]
            found = list(ranges.parts(start, stop))
            for part in found:
                if part.data is not None:
                    self._order.move_to_end((file, part.piece))
            return found

    def keep(self, file: Hashable, version: Hashable, pieces: Mapping[int, bytes]) -> None:
        """Add pieces of a version of a file, as far as there is room; forget other versions of it."""
        with self._lock:
            known, ranges = self._files.get(file, (None, None))
            if ranges is not None and known != version:
                for start in list(ranges.pieces):
                    self._drop((file, start))
            for start, data in pieces.items():
                # Asked again for each: making room for one piece may drop others of the same file.
                for gap in self._ranges(file, version).gaps(start, start + len(data)):
                    self._insert(file, version, gap.start, data[gap.start - start : gap.stop - start])
            self._changed(self.nbytes)

    def _ranges(self, file: Hashable, version: Hashable) -> Ranges:
        return self._files.setdefault(file, (version, Ranges()))[1]

    def _insert(self, file: Hashable, version: Hashable, start: int, data: bytes) -> None:
        room = self._room() - len(data)
        was_full = self.nbytes > room
        if room >= 0:
            while self.nbytes > room:
                self._drop(next(iter(self._order)))
            self._ranges(file, version).put(start, data)
            self._add((file, start), len(data))
            if was_full and next(self._inserted) % ADMITTED_ONE_IN:
                self._order.move_to_end((file, start), last=False)
        elif not self._ranges(file, version).pieces:
            del self._files[file]

    def _forget(self, key: tuple[Hashable, int]) -> bytes:
        file, start = key
        ranges = self._files[file][1]
        data = ranges.pop(start)
        if not ranges.pieces:
            del self._files[file]
        return data
