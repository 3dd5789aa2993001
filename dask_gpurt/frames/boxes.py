"""Map the elements of old chunks of an array to new chunks. Pure.

Along each axis, the boundaries of old and new chunks divide an array into intervals. The product of one
interval per axis is a *box*: the elements that one old chunk and one new chunk have in common.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

T = TypeVar("T")

#: The index of a chunk, or of an element, along each axis.
Index = tuple[int, ...]
#: The sizes of the chunks along each axis; NaN if unknown.
Chunks = tuple[tuple[float, ...], ...]
#: Dask's plan: for each axis and each new chunk, the old chunks that it consists of, with a slice of each.
OldToNew = Sequence[Sequence[Sequence[tuple[int, slice]]]]


class Interval(NamedTuple):
    """Describe the elements along one axis that an old and a new chunk have in common.

    ``chunk``: the number of the new chunk.
    ``place``: its index among the intervals of the new chunk.
    ``start``: its first element in the new chunk.
    ``within``: its slice of the old chunk. The end is None if the size is unknown: then it is the whole
    chunk.
    """

    chunk: int
    place: int
    start: int
    within: slice


@dataclass(frozen=True)
class Box:
    """Describe the elements that an old and a new chunk have in common, or a part of them.

    ``output``: the number of the new chunk.
    ``place``: its index among the boxes of the new chunk, along each axis.
    ``start``: its first element in the new chunk.
    ``within``: its slices of the old chunk.
    """

    output: int
    place: Index
    start: Index
    within: tuple[slice, ...]

    @property
    def shape(self) -> Index:
        """Return its number of elements along each axis."""
        return tuple(interval.stop - interval.start for interval in self.within)

    def divided(self, itemsize: int, most: int) -> Iterator[Box]:
        """Divide the box along the outer axes into boxes of at most ``most`` bytes.

        Single elements are not divided, however large they are.
        """
        shape = self.shape
        nbytes = math.prod(shape) * itemsize
        axis = next((axis for axis, number in enumerate(shape) if number > 1), None)
        if nbytes <= most or axis is None:
            yield self
            return
        number = max(1, shape[axis] * most // nbytes)
        first = self.within[axis].start
        for begin in range(0, shape[axis], number):
            end = min(begin + number, shape[axis])
            within = _with(self.within, axis, slice(first + begin, first + end))
            start = _with(self.start, axis, self.start[axis] + begin)
            yield from replace(self, within=within, start=start).divided(itemsize, most)


def _with(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


@dataclass(frozen=True)
class Grid:
    """Number the chunks of an array in C order.

    ``shape``: the number of chunks along each axis.
    """

    shape: Index

    @classmethod
    def of(cls, chunks: Chunks) -> Grid:
        """Return the grid of chunks with these sizes."""
        return cls(tuple(len(axis) for axis in chunks))

    def __len__(self) -> int:
        return math.prod(self.shape)

    def number(self, index: Index) -> int:
        """Return the number of the chunk at an index."""
        number = 0
        for at, length in zip(index, self.shape, strict=True):
            number = number * length + at
        return number

    def index(self, number: int) -> Index:
        """Return the index of the chunk with a number."""
        index: list[int] = []
        for length in reversed(self.shape):
            number, at = divmod(number, length)
            index.append(at)
        return tuple(reversed(index))


class Plan:
    """Plan the boxes of each old chunk.

    ``old``: the grid of old chunks.
    ``new``: the grid of new chunks.
    ``old_to_new``: Dask's plan. Entries beyond the number of new chunks are ignored: if all chunks of a part
    of an array are empty, Dask adds an old chunk with elements to the part, and an entry for an additional
    new chunk.
    """

    def __init__(self, old: Grid, new: Grid, old_to_new: OldToNew):
        self.old = old
        self.new = new
        #: The intervals of each old chunk, by axis.
        self._intervals: list[list[list[Interval]]] = []
        for chunks, before, after in zip(old_to_new, old.shape, new.shape, strict=True):
            self._intervals.append(_by_old_chunk(chunks[:after], before))

    def boxes(self, source: int, shape: Index) -> Iterator[Box]:
        """Yield the boxes of an old chunk.

        ``source``: the number of the chunk.
        ``shape``: its number of elements along each axis.
        """
        axes = zip(self._intervals, self.old.index(source), strict=True)
        for intervals in itertools.product(*(axis[at] for axis, at in axes)):
            within = tuple(
                slice(*interval.within.indices(length)[:2])
                for interval, length in zip(intervals, shape, strict=True)
            )
            yield Box(
                self.new.number(tuple(interval.chunk for interval in intervals)),
                tuple(interval.place for interval in intervals),
                tuple(interval.start for interval in intervals),
                within,
            )


def _by_old_chunk(chunks: Sequence[Sequence[tuple[int, slice]]], number: int) -> list[list[Interval]]:
    """Return the intervals of each old chunk along one axis."""
    found: list[list[Interval]] = [[] for _ in range(number)]
    for chunk, pieces in enumerate(chunks):
        start = 0
        for place, (old, within) in enumerate(pieces):
            found[old].append(Interval(chunk, place, start, within))
            if within.stop is not None:  # otherwise it is the only one
                start += within.stop - within.start
    return found
