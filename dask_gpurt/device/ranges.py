"""Represent sets of integers as ranges: the free parts of a pool, and its parts with backing memory."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedDict

#: The first integer, and the last one plus 1.
Range = tuple[int, int]


class Ranges:
    """Hold disjoint ranges, with neighbours merged. Pure; not thread-safe."""

    def __init__(self) -> None:
        self._stops = SortedDict()
        #: The number of integers in all ranges.
        self.total = 0

    def __iter__(self) -> Iterator[Range]:
        return iter(list(self._stops.items()))

    def add(self, start: int, stop: int) -> None:
        """Add a range, which may overlap with the set."""
        if start >= stop:
            return
        touching = list(self._touching(start, stop))
        start = min([start, *(first for first, _ in touching)])
        stop = max([stop, *(last for _, last in touching)])
        self._replace(touching, [(start, stop)])

    def remove(self, start: int, stop: int) -> None:
        """Remove a range, which need not be in the set entirely."""
        if start >= stop:
            return
        found = [
            (first, last) for first, last in self._touching(start, stop) if last > start and first < stop
        ]
        left = [(first, start) for first, _ in found if first < start]
        right = [(stop, last) for _, last in found if last > stop]
        self._replace(found, [*left, *right])

    def first(self, length: int) -> int | None:
        """Return the start of the first range of at least ``length`` integers; None if there is none."""
        return next((start for start, stop in self._stops.items() if stop - start >= length), None)

    def within(self, start: int, stop: int) -> list[Range]:
        """Return the parts of a range that are in the set."""
        cut = [(max(first, start), min(last, stop)) for first, last in self._touching(start, stop)]
        return [(first, last) for first, last in cut if first < last]

    def gaps(self, start: int, stop: int) -> list[Range]:
        """Return the parts of a range that are not in the set."""
        found = self.within(start, stop)
        edges = [start, *(edge for part in found for edge in part), stop]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(first, last) for first, last in pairs if first < last]

    def _touching(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the ranges that overlap with or adjoin a range."""
        at = max(0, self._stops.bisect_right(start) - 1)
        for first in self._stops.islice(at):
            if first > stop:
                return
            if self._stops[first] >= start:
                yield first, self._stops[first]

    def _replace(self, old: list[Range], new: list[Range]) -> None:
        for first, last in old:
            del self._stops[first]
            self.total -= last - first
        for first, last in new:
            self._stops[first] = last
            self.total += last - first
