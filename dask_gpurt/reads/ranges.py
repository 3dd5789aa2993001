"""Keep byte ranges of files in memory that nothing else needs. Pure.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple

from dask_gpurt.reads.eviction import ADMITTED_ONE_IN, EvictingCache


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
