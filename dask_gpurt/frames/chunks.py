"""Split, pack and assemble chunks of arrays, box by box.

A piece consists of the boxes for one owner. Boxes of plain arrays are stored one after the other in its
block, as raw elements, each written and read with one copy. Boxes of other arrays (masked, sparse, of Python
objects) are pickled, and concatenated by Dask.

Pieces, and the offsets of sections, count boxes instead of elements, since even an empty box tells the owner
the shape and dtype of an output.
"""

from __future__ import annotations

import itertools
import math
import pickle
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dask_gpurt.dask_hooks.shuffle import concatenate
from dask_gpurt.device import Device
from dask_gpurt.device.pool import ALIGNMENT, Buffer
from dask_gpurt.frames.backend import BlockAllocator, Packed, Part, Piece, giving_back
from dask_gpurt.frames.boxes import Box, Index
from dask_gpurt.frames.pickled import dumps

#: Elements of a tile along the axis that is contiguous in the source, and along the one that is contiguous in
#: the copy. With 32, cache lines of the source stay cached until all of their elements are copied.
TILE = (1024, 32)
#: The least length of an axis for tiled copies to pay off.
MIN_TILED = 16
Array = Any
#: The most bytes of a box or of a fragment of a pickle. Larger ones are divided, so that pieces can be halved
#: for a pool with little room.
MAX_BOX_BYTES = 2**24


class Target(NamedTuple):
    """Locate a box in its new chunk.

    ``place``: its index among the boxes of the chunk, along each axis.
    ``start``, ``stop``: its first element, and the end, exclusive.
    """

    place: Index
    start: Index
    stop: Index

    @property
    def shape(self) -> Index:
        """Return its number of elements along each axis."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    def slices(self, origin: Index) -> tuple[slice, ...]:
        """Return its slices in an array that starts at element ``origin`` of the new chunk."""
        return tuple(
            slice(start - first, stop - first)
            for start, stop, first in zip(self.start, self.stop, origin, strict=True)
        )


# ---- packed data -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainLayout:
    """Describe the boxes of plain arrays in a buffer: the content of a header.

    ``library``: the library of the :class:`ChunkTable` that reads them.
    ``targets``: the target of each box.
    """

    library: str
    dtype: np.dtype[Any]
    targets: tuple[Target, ...]

    def starts(self) -> list[int]:
        """Return the offset of each box in a buffer, followed by the end of the last one."""
        sizes = (math.prod(target.shape) * self.dtype.itemsize for target in self.targets)
        return list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


@dataclass(frozen=True)
class PickledLayout:
    """Describe fragments of pickled boxes in a buffer: the content of a header.

    ``library``: see :class:`PlainLayout`.
    ``stretches``: for each fragment, the place of its box in the new chunk, and the number of bytes.
    """

    library: str
    stretches: tuple[tuple[Index, int], ...]

    def starts(self) -> list[int]:
        """Return the offset of each fragment in a buffer, followed by the end of the last one."""
        return list(itertools.accumulate((size for _, size in self.stretches), initial=0))


@dataclass(frozen=True)
class PlainBoxes:
    """Hold boxes of a chunk of plain elements."""

    chunk: Array
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class PickledBoxes:
    """Hold fragments of pickled boxes, each with the place of its box in the new chunk."""

    stretches: tuple[tuple[Index, memoryview], ...]


# ---- tables ----------------------------------------------------------------------------------------


class ChunkTable(ABC):
    """Pack the arrays of one library on a device; see :class:`~dask_gpurt.frames.backend.Packer`."""

    #: The name of the library.
    name: str

    def __init__(self, device: Device):
        self.device = device

    @abstractmethod
    def is_plain(self, chunk: Array) -> bool:
        """Return whether the elements of a chunk can be copied as raw bytes."""

    @abstractmethod
    def write(self, buffer: Buffer, starts: Sequence[int], boxes: Sequence[Array]) -> None:
        """Copy arrays to a buffer, in C order; complete after the next :meth:`settle`."""

    @abstractmethod
    def settle(self) -> None:
        """Block until everything that this thread has packed can be read by peers."""

    @abstractmethod
    def view(self, buffer: Buffer, start: int, shape: Index, dtype: np.dtype[Any]) -> Array:
        """Return a view of elements in a buffer."""

    @abstractmethod
    def empty(self, shape: Index, dtype: np.dtype[Any]) -> Array:
        """Return a new, uninitialised array."""

    @abstractmethod
    def fence(self) -> Callable[[], None] | None:
        """Return the fence of all reads of the outputs assembled so far; None if they are complete."""

    def split(
        self,
        chunk: Array,
        boxes: Iterable[Box],
        groups: Sequence[Sequence[int]],
        *,
        most: int = MAX_BOX_BYTES,
    ) -> list[Piece | None]:
        """Split a chunk into a piece for each group of new chunks, None for groups without boxes.

        ``boxes``: all boxes of the chunk.
        ``groups``: the new chunks of each owner, by number. Boxes of chunks in no group are dropped.
        ``most``: the most bytes of a box or of a fragment of a pickle.
        """
        rows = self._plain if self.is_plain(chunk) else self._pickled
        of_output = defaultdict[int, list[Box]](list)
        for box in boxes:
            of_output[box.output].append(box)
        return [
            rows(chunk, {output: of_output[output] for output in outputs if output in of_output}, most)
            for outputs in groups
        ]

    def _plain(self, chunk: Array, boxes: Mapping[int, Sequence[Box]], most: int) -> Piece | None:
        found = [
            [part for box in of_output for part in box.divided(chunk.dtype.itemsize, most)]
            for of_output in boxes.values()
        ]
        return _piece(boxes, found, lambda joined: PlainBoxes(chunk, joined))

    def _pickled(self, chunk: Array, boxes: Mapping[int, Sequence[Box]], most: int) -> Piece | None:
        found = [
            [
                (box.place, stretch)
                for box in of_output
                for stretch in _stretches(dumps(chunk[box.within]), most)
            ]
            for of_output in boxes.values()
        ]
        return _piece(boxes, found, PickledBoxes)

    def cut(self, rows: PlainBoxes | PickledBoxes, start: int, stop: int) -> PlainBoxes | PickledBoxes:
        """Return a range of the boxes of a piece."""
        if isinstance(rows, PlainBoxes):
            return replace(rows, boxes=rows.boxes[start:stop])
        return PickledBoxes(rows.stretches[start:stop])

    def pack(self, piece: Piece, allocator: BlockAllocator) -> Packed:
        """Write a piece to one block; see :meth:`~dask_gpurt.frames.backend.Packer.pack`."""
        rows: PlainBoxes | PickledBoxes = piece.rows
        if isinstance(rows, PickledBoxes):
            return self._pack_pickled(rows, allocator)
        targets = tuple(
            Target(box.place, box.start, tuple(map(sum, zip(box.start, box.shape, strict=True))))
            for box in rows.boxes
        )
        layout = PlainLayout(self.name, rows.chunk.dtype, targets)
        starts = layout.starts()
        block = allocator.allocate(max(1, starts[-1]))
        with giving_back(block, allocator):
            self.write(block.buffer, starts, [rows.chunk[box.within] for box in rows.boxes])
            return Packed(block, pickle.dumps(layout))

    def _pack_pickled(self, rows: PickledBoxes, allocator: BlockAllocator) -> Packed:
        layout = PickledLayout(self.name, tuple((place, len(each)) for place, each in rows.stretches))
        starts = layout.starts()
        block = allocator.allocate(starts[-1])
        with giving_back(block, allocator):
            for start, (_, stretch) in zip(starts, rows.stretches, strict=False):
                block.buffer[start : start + len(stretch)] = np.frombuffer(stretch, np.uint8)
            return Packed(block, pickle.dumps(layout))

    def assemble(self, parts: Sequence[Part]) -> Array:
        """Assemble a new chunk, which shares no memory with the buffers of its parts.

        The buffers may be read until the next :meth:`fence` has passed.
        """
        boxes: list[tuple[Target, Array]] = []
        pickles = defaultdict[Index, list[Any]](list)
        for part in parts:
            layout, starts = opened(part)
            for at in range(*part.offsets[part.index : part.index + 2]):
                if isinstance(layout, PlainLayout):
                    target = layout.targets[at]
                    boxes.append((target, self.view(part.buffer, starts[at], target.shape, layout.dtype)))
                else:
                    pickles[layout.stretches[at][0]].append(part.buffer[starts[at] : starts[at + 1]])
        if not pickles:
            return self._filled(boxes)
        by_place = {place: pickle.loads(b"".join(stretches)) for place, stretches in pickles.items()}
        for place, mine in itertools.groupby(sorted(boxes, key=_place), key=_place):
            by_place[place] = self._filled(list(mine))
        return concatenate(_nested(by_place))

    def _filled(self, boxes: Sequence[tuple[Target, Array]]) -> Array:
        """Assemble an array from boxes."""
        origin = tuple(map(min, zip(*(target.start for target, _ in boxes), strict=True)))
        end = tuple(map(max, zip(*(target.stop for target, _ in boxes), strict=True)))
        _, first = min(boxes, key=_place)
        shape = tuple(stop - start for start, stop in zip(origin, end, strict=True))
        filled = self.empty(shape, first.dtype)
        for target, box in boxes:
            filled[target.slices(origin)] = box
        return filled


# ---- arrays in host memory -------------------------------------------------------------------------


class NumpyChunks(ChunkTable):
    """Pack numpy arrays, and arrays of libraries that have no table of their own."""

    name = "numpy"

    def is_plain(self, chunk: Any) -> bool:
        """Return whether a chunk is a plain numpy array without Python objects."""
        return (
            type(chunk) in (np.ndarray, np.memmap) and not chunk.dtype.hasobject and chunk.dtype.itemsize > 0
        )

    def write(self, buffer: np.ndarray, starts: Sequence[int], boxes: Sequence[np.ndarray]) -> None:
        for start, box in zip(starts, boxes, strict=False):
            copy(self.view(buffer, start, box.shape, box.dtype), box)

    def settle(self) -> None:
        pass

    def view(self, buffer: np.ndarray, start: int, shape: Index, dtype: np.dtype[Any]) -> np.ndarray:
        return np.ndarray(shape, dtype, buffer, start)

    def empty(self, shape: Index, dtype: np.dtype[Any]) -> np.ndarray:
        return np.empty(shape, dtype)

    def fence(self) -> None:
        return None


def copy(into: np.ndarray, array: np.ndarray) -> None:
    """Copy an array to one of the same shape whose last axis is contiguous.

    If another axis is contiguous in the source, as after a transpose, copy in tiles. numpy iterates along one
    of the two axes, and so uses only one element of each cache line along the other: 0.9 GB/s of float64 on a
    core, where tiles reach 2.5.
    """
    axis = min(range(array.ndim), key=lambda axis: abs(array.strides[axis]), default=0)
    last = array.ndim - 1
    if array.ndim < 2 or axis == last or min(array.shape[axis], array.shape[last]) < MIN_TILED:
        into[...] = array
        return
    ranges = [range(length) for length in array.shape]
    ranges[axis], ranges[last] = (
        range(0, array.shape[at], step) for at, step in zip((axis, last), TILE, strict=True)
    )
    for corner in itertools.product(*ranges):
        tile: list[Any] = list(corner)
        for at, step in zip((axis, last), TILE, strict=True):
            tile[at] = slice(corner[at], corner[at] + step)
        into[tuple(tile)] = array[tuple(tile)]


# ---- parts of a chunk ------------------------------------------------------------------------------


def opened(part: Part) -> tuple[PlainLayout | PickledLayout, list[int]]:
    """Return the layout of a part's buffer and the offsets of its contents, cached in the memo."""
    if "opened" not in part.memo:
        layout = pickle.loads(part.header)
        part.memo["opened"] = layout, layout.starts()
    found: tuple[PlainLayout | PickledLayout, list[int]] = part.memo["opened"]
    return found


def _piece(
    outputs: Iterable[int], found: Sequence[Sequence[Any]], rows: Callable[[tuple[Any, ...]], Any]
) -> Piece | None:
    """Return a piece with the boxes or fragments of each output; None if there are no outputs."""
    if not found:
        return None
    joined = tuple(itertools.chain.from_iterable(found))
    return Piece(rows(joined), tuple(outputs), tuple(itertools.accumulate(map(len, found), initial=0)))


def _stretches(pickled: bytes, most: int) -> Iterator[memoryview]:
    """Yield fragments of a pickle of at most ``most`` bytes."""
    view = memoryview(pickled)
    for start in range(0, len(view), most):
        yield view[start : start + most]


def _place(box: tuple[Target, Array]) -> Index:
    return box[0].place


def _nested(by_place: Mapping[Index, Array], prefix: Index = ()) -> Any:
    """Arrange arrays in nested lists, by their place along each axis."""
    if prefix in by_place:
        return by_place[prefix]
    at = len(prefix)
    number = 1 + max(place[at] for place in by_place if place[:at] == prefix)
    return [_nested(by_place, (*prefix, each)) for each in range(number)]
