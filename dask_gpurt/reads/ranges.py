"""Keep byte ranges of files in memory that nothing else needs. Pure.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple

#: While the cache is full, one new range in so many is kept as one that was used; the others go first. So a
#: table that is larger than the cache, and read again and again, does not evict itself.
ADMITTED_ONE_IN = 8


class Part(NamedTuple):
    """Describe a part of a wanted range.

    Attributes
    ----------
    start, stop
        Its first byte in the file, and the one after its last.
    data
        Its bytes; None if they are not there.
    piece
        The first byte of the piece that has them.
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


class RangeCache:
    """Hold ranges of many files, each of one version, and drop those not used for longest. Thread-safe.

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
        self._files: dict[Hashable, tuple[Hashable, Ranges]] = {}
        #: The bytes of each piece, by file and first byte; the one to drop next comes first.
        self._order: OrderedDict[tuple[Hashable, int], int] = OrderedDict()
        self._inserted = itertools.count(1)
        self._lock = threading.Lock()
        self.nbytes = 0

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

    def fit(self) -> None:
        """Drop what there is no room for any more."""
        if self.nbytes and (beyond := self.nbytes - self._room()) > 0:
            self.release(beyond)

    def release(self, nbytes: int) -> None:
        """Drop at least so many bytes, if there are as many."""
        with self._lock:
            goal = self.nbytes - nbytes
            while self._order and self.nbytes > goal:
                self._drop(next(iter(self._order)))
            self._changed(self.nbytes)

    def close(self) -> None:
        """Drop everything, and keep nothing from now on."""
        self._room = int
        self.release(self.nbytes)

    def _ranges(self, file: Hashable, version: Hashable) -> Ranges:
        return self._files.setdefault(file, (version, Ranges()))[1]

    def _insert(self, file: Hashable, version: Hashable, start: int, data: bytes) -> None:
        room = self._room() - len(data)
        was_full = self.nbytes > room
        if room >= 0:
            while self.nbytes > room:
                self._drop(next(iter(self._order)))
            self._ranges(file, version).put(start, data)
            self._order[file, start] = len(data)
            self.nbytes += len(data)
            if was_full and next(self._inserted) % ADMITTED_ONE_IN:
                self._order.move_to_end((file, start), last=False)
        elif not self._ranges(file, version).pieces:
            del self._files[file]

    def _drop(self, piece: tuple[Hashable, int]) -> None:
        file, start = piece
        self.nbytes -= self._order.pop(piece)
        ranges = self._files[file][1]
        ranges.pop(start)
        if not ranges.pieces:
            del self._files[file]
