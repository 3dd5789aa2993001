"""Send each element of a rechunk once, to where Dask would put it, however chunks are cut and split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from dask_gpurt.dask_hooks.shuffle import old_to_new
from dask_gpurt.device import Block, PoolFull
from dask_gpurt.device.host import HostDevice
from dask_gpurt.frames import Part, Piece, chunk_table
from dask_gpurt.frames import chunks as frames_chunks
from dask_gpurt.frames.boxes import Chunks, Grid, Plan


@st.composite
def chunkings(draw: st.DrawFn, most: int = 9) -> tuple[Chunks, Chunks]:
    """Draw two chunkings of an array with up to three axes, including empty chunks."""
    axes = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, most))
        edges = st.lists(st.integers(0, length), max_size=4).map(sorted)
        axes.append([np.diff([0, *draw(edges), length]).tolist() for _ in range(2)])
    old, new = zip(*axes, strict=True)
    return tuple(map(tuple, old)), tuple(map(tuple, new))


def plan_of(old: Chunks, new: Chunks) -> Plan:
    return Plan(Grid.of(old), Grid.of(new), old_to_new(old, new))


def shape_of(chunks: Chunks, index: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(axis[at]) for axis, at in zip(chunks, index, strict=True))


def slices_of(chunks: Chunks, index: Sequence[int]) -> tuple[slice, ...]:
    """Return the position of a chunk in its array."""
    starts = [int(sum(axis[:at])) for axis, at in zip(chunks, index, strict=True)]
    return tuple(
        slice(start, start + length) for start, length in zip(starts, shape_of(chunks, index), strict=True)
    )


def test_elements_that_no_new_chunk_has_are_left_out() -> None:
    """Where no new chunk of a part has elements, Dask still assigns it an old chunk that has some."""
    plan = plan_of(((3,), (1,)), ((1, 2), (0,)))
    boxes = list(plan.boxes(0, (3, 1)))
    assert [(box.output, box.shape) for box in boxes] == [(0, (1, 0)), (1, (2, 0))]


@given(chunkings(), st.integers(1, 40))
def test_each_element_is_in_one_box(chunkings: tuple[Chunks, Chunks], most: int) -> None:
    old, new = chunkings
    plan = plan_of(old, new)
    shape = tuple(int(sum(axis)) for axis in old)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    moved = [np.full(shape_of(new, index), -1) for index in map(plan.new.index, range(len(plan.new)))]
    for source in range(len(plan.old)):
        index = plan.old.index(source)
        chunk = numbers[slices_of(old, index)]
        for whole in plan.boxes(source, chunk.shape):
            for box in whole.divided(numbers.itemsize, most):
                assert (box.output, box.place) == (whole.output, whole.place)
                assert math.prod(box.shape) * numbers.itemsize <= max(most, numbers.itemsize)
                ends = map(sum, zip(box.start, box.shape, strict=True))
                target = tuple(slice(a, b) for a, b in zip(box.start, ends, strict=True))
                assert (moved[box.output][target] == -1).all()
                moved[box.output][target] = chunk[box.within]
    for number, found in enumerate(moved):
        np.testing.assert_array_equal(found, numbers[slices_of(new, plan.new.index(number))])


# ---- packed ----------------------------------------------------------------------------------------


class Room:
    """Fake a pool that has room for blocks of at most ``most`` bytes."""

    def __init__(self, most: int):
        self.most = most

    def allocate(self, nbytes: int) -> Block:
        if nbytes > self.most:
            raise PoolFull(nbytes)
        return Block(0, nbytes, np.empty(nbytes, np.uint8))

    def give_back(self, block: Block) -> None: ...


def packed(table: Any, piece: Piece, room: Room) -> list[tuple[Piece, Any]]:
    """Pack a piece, in halves where it does not fit, as senders do."""
    try:
        return [(piece, table.pack(piece, room))]
    except PoolFull:
        assert len(piece) > 1
        return [found for half in piece.halves(table.cut) if len(half) for found in packed(table, half, room)]


def rechunked(array: Any, old: Chunks, new: Chunks, owners: int, room: Room, most: int) -> list[Any]:
    """Return the new chunks of an array, built from packed pieces for several owners."""
    table = chunk_table("numpy", lambda _: HostDevice(2**20))
    plan = plan_of(old, new)
    groups = [tuple(range(at, len(plan.new), owners)) for at in range(owners)]
    parts: list[list[Part]] = [[] for _ in range(len(plan.new))]
    for source in range(len(plan.old)):
        chunk = array[slices_of(old, plan.old.index(source))]
        for piece in table.split(chunk, plan.boxes(source, chunk.shape), groups, most=most):
            for part, one in [] if piece is None else packed(table, piece, room):
                memo: dict[str, Any] = {}
                for at, output in enumerate(part.partitions):
                    if part.offsets[at + 1] > part.offsets[at]:
                        parts[output].append(Part(one.header, one.block.buffer, part.offsets, at, memo))
    return [table.assemble(each) for each in parts]


DTYPES = [
    "int8",
    "float64",
    "complex128",
    "bool",
    "M8[ns]",
    "S3",
    "U2",
    ">i4",
    "O",
    [("a", "i2"), ("b", "f8")],
]


@given(chunkings(), st.data(), st.integers(1, 3), st.booleans())
def test_chunks_are_the_same_bits(
    chunkings: tuple[Chunks, Chunks], data: st.DataObject, owners: int, divided: bool
) -> None:
    old, new = chunkings
    shape = tuple(int(sum(axis)) for axis in old)
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    if dtype.hasobject:
        values = [(n, str(n)) for n in range(math.prod(shape))]
        array = np.empty(len(values), "O")
        array[:] = values
        array = array.reshape(shape)
    else:
        array = data.draw(numpy_strategies.arrays(dtype, shape))
    if data.draw(st.booleans()):
        array = np.asfortranarray(array)
    found = rechunked(array, old, new, owners, Room(300 if divided else 2**20), 64 if divided else 2**20)
    for number, chunk in enumerate(found):
        expected = array[slices_of(new, Grid.of(new).index(number))]
        assert (chunk.shape, chunk.dtype) == (expected.shape, expected.dtype)
        assert chunk.tobytes() == expected.tobytes() or chunk.tolist() == expected.tolist()
        assert chunk.flags.c_contiguous
        assert chunk.flags.owndata


@given(st.permutations(range(3)), st.data())
def test_tiles_make_up_an_array(axes: list[int], data: st.DataObject) -> None:
    """Whichever axis is contiguous, forwards or backwards."""
    shape = data.draw(st.tuples(*[st.integers(0, 40)] * 3))
    array = np.arange(math.prod(shape)).reshape(shape).transpose(axes)
    array = array[tuple(slice(None, None, data.draw(st.sampled_from([1, -1, 2]))) for _ in shape)]
    into = np.full(array.shape, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames_chunks, "TILE", data.draw(st.sampled_from([(7, 3), (1024, 32)])))
        frames_chunks.copy(into, array)
    np.testing.assert_array_equal(into, array)


def test_chunks_of_other_types_become_what_dask_makes_of_them() -> None:
    """Some chunks of an array are masked, some plain: Dask's concatenation decides the result's type."""
    masked = np.ma.masked_equal(np.arange(12).reshape(4, 3), 5)
    table = chunk_table("numpy", lambda _: HostDevice(2**20))
    plan = plan_of(((2, 2), (3,)), ((4,), (2, 1)))
    parts: list[list[Part]] = [[], []]
    for source, chunk in enumerate([masked[:2], masked[2:].data]):
        (piece,) = table.split(chunk, plan.boxes(source, chunk.shape), [(0, 1)])
        assert piece is not None
        ((_, one),) = packed(table, piece, Room(2**20))
        for output in (0, 1):
            parts[output].append(Part(one.header, one.block.buffer, piece.offsets, output, {}))
    left, right = map(table.assemble, parts)
    np.testing.assert_array_equal(left.mask, masked[:, :2].mask)
    np.testing.assert_array_equal(left.data, masked[:, :2].data)
    np.testing.assert_array_equal(right.mask, np.ma.getmaskarray(masked)[:, 2:])


def test_a_block_that_could_not_be_filled_is_given_back() -> None:
    class Failing(frames_chunks.NumpyChunks):
        def write(self, *_: Any) -> None:
            raise MemoryError

    device = HostDevice(2**20)
    pool = device.create_pool(2**16)
    room: Any = SimpleNamespace(allocate=pool.allocate, give_back=pool.free)
    table, plan = Failing(device), plan_of(((4,), (4,)), ((4,), (2, 2)))
    (piece,) = table.split(np.ones((4, 4)), plan.boxes(0, (4, 4)), [(0, 1)])
    assert piece is not None
    with pytest.raises(MemoryError):
        table.pack(piece, room)
    assert pool.used == 0
    pool.close()
