"""Merge copies, and check which bytes they touch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.device.copies import MAX_BLOCKS, Copy, fillings, grid_of, runs
from dask_gpurt.device.pool import ALIGNMENT


def aligned(size: int) -> np.ndarray:
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def ends(sizes: list[int], skips: list[int]) -> list[int]:
    """Return the addresses of consecutive aligned buffers with gaps of some blocks."""
    at, found = 0, []
    for size, skip in zip(sizes, skips, strict=True):
        at += skip * ALIGNMENT
        found.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return [*found, at]


SIZES = st.lists(st.integers(1, 900), min_size=1, max_size=12)


@given(sizes=SIZES, data=st.data())
def test_every_byte_arrives_and_only_padding_goes_along(sizes: list[int], data: st.DataObject) -> None:
    skips = st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes))
    from_, to = ends(sizes, data.draw(skips)), ends(sizes, data.draw(skips))
    source, target = aligned(from_[-1] or 1), aligned(to[-1] or 1)
    source[:] = np.random.default_rng(0).integers(1, 255, source.size)
    sources = [source[at : at + n] for at, n in zip(from_, sizes, strict=False)]
    pieces = [target[at : at + n] for at, n in zip(to, sizes, strict=False)]
    cut = data.draw(st.integers(0, 900))
    into = [[piece[:cut], piece[cut:]] if 0 < cut < piece.size else [piece] for piece in pieces]
    copies = runs(sources, into)
    for copy in copies:
        ctypes.memmove(copy.to, copy.at, copy.nbytes)
    assert all(np.array_equal(one, other) for one, other in zip(sources, pieces, strict=True))
    theirs = np.ones(target.size, bool)
    for at, n in zip(to, sizes, strict=False):
        theirs[at : at + -(-n // ALIGNMENT) * ALIGNMENT] = False
    assert not target[theirs].any(), "what lies between, except padding, is not part of any"


def test_neighbours_on_both_sides_are_one_copy() -> None:
    source, target = aligned(1024), aligned(1024)
    sources = [source[at : at + 200] for at in (0, 256, 512)]
    (copy,) = runs(sources, [[target[at : at + 200]] for at in (0, 256, 512)])
    assert copy == (target.ctypes.data, source.ctypes.data, 712)


def test_arrays_of_their_own_are_copied_alone_wherever_they_lie() -> None:
    source = aligned(1024)
    sources = [source[at : at + 200] for at in (0, 256)]
    into = [[np.empty(200, np.uint8)], [np.empty(200, np.uint8)]]
    assert [copy.nbytes for copy in runs(sources, into)] == [200, 200]


class Allocated:
    """Fake a buffer of a device with only an address and an allocation."""

    def __init__(self, ptr: int, nbytes: int, owner: object = None):
        self.nbytes, self.owner = nbytes, owner
        self.__cuda_array_interface__ = {"data": (ptr, False)}


def test_no_copy_crosses_from_one_allocation_to_another_wherever_they_lie() -> None:
    target = aligned(1024)
    into = [[target[:256]], [target[256:512]]]
    owner, other = object(), object()
    for owners, copies in (((owner, owner), 1), ((owner, other), 2), ((None, None), 2)):
        sources = [Allocated(4096 + 256 * i, 256, whose) for i, whose in enumerate(owners)]
        assert len(runs(sources, into)) == copies


# ---- by CUDA, many ranges in one call, between all kinds of memory -----------------------------------

KIB = 1024
PLACES = ("device", "pinned", "pageable")


def test_pieces_fill_a_buffer_in_order() -> None:
    class Buffer:
        def __init__(self, ptr: int):
            self.ptr = ptr

    one, two, three = (np.zeros(n, np.uint8) for n in (10, 20, 30))
    found = fillings([Buffer(1000), Buffer(5000)], [[one, two], [three]])
    assert found == [
        Copy(1000, one.ctypes.data, 10),
        Copy(1010, two.ctypes.data, 20),
        Copy(5000, three.ctypes.data, 30),
    ]


@given(st.lists(st.integers(1, 2**38), min_size=1, max_size=1360), st.sampled_from([1, 128, 1024]))
def test_no_launch_has_too_many_blocks(sizes: list[int], threads: int) -> None:
    blocks, of = grid_of([Copy(0, 0, size) for size in sizes], threads)
    assert of == len(sizes)
    assert 1 <= blocks <= MAX_BLOCKS / len(sizes)


def test_a_large_copy_among_small_ones_gets_most_of_the_gpu() -> None:
    assert grid_of([Copy(0, 0, 2**30)] + [Copy(0, 0, 8)] * 9, 256)[0] > 2000
    assert grid_of([Copy(0, 0, 2**23)] * 128, 256) == (16, 128)
    assert grid_of([Copy(0, 0, 8)] * 128, 256) == (1, 128)


class Memory:
    """Hold bytes in one kind of memory."""

    def __init__(self, place: str, contents: np.ndarray):
        import cupy

        self.place = place
        if place == "device":
            self.array: Any = cupy.asarray(contents)
            self.ptr = self.array.data.ptr
        else:
            self.array = contents.copy()
            self.ptr = self.array.ctypes.data
        if place == "pinned":
            cupy.cuda.runtime.hostRegister(self.ptr, self.array.nbytes, 0)

    def bytes(self) -> np.ndarray:
        import cupy

        return cupy.asnumpy(self.array) if self.place == "device" else self.array

    def close(self) -> None:
        import cupy

        if self.place == "pinned":
            cupy.cuda.runtime.hostUnregister(self.ptr)


@pytest.mark.gpu
@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_bytes_arrive_wherever_they_lie(source: str, target: str, count: int) -> None:
    import cupy

    from dask_gpurt.device.cuda_memory import copy_async

    random = np.random.default_rng(count)
    size, stream = 4096 * KIB, cupy.cuda.Stream(non_blocking=True)
    here = Memory(source, random.integers(0, 256, size).astype(np.uint8))
    there = Memory(target, np.zeros(size, np.uint8))
    expected = np.zeros(size, np.uint8)
    copies = []
    for slot in random.permutation(count):
        at, to = int(random.integers(0, size - 8 * KIB)), int(slot) * 8 * KIB
        nbytes = int(random.integers(0, 8 * KIB)) if slot % 5 else 0
        copies.append(Copy(there.ptr + to, here.ptr + at, nbytes))
        expected[to : to + nbytes] = here.bytes()[at : at + nbytes]
    cupy.cuda.runtime.deviceSynchronize()
    copy_async(copies, stream.ptr)
    stream.synchronize()
    assert np.array_equal(there.bytes(), expected)
    here.close()
    there.close()


@pytest.mark.gpu
@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("count", [0, 1, 2, 168, 169, 1361])
def test_a_kernel_copies_ranges_of_any_alignment(count: int, alignment: int) -> None:
    import cupy

    from dask_gpurt.device.cuda_memory import copy_on_device

    random = np.random.default_rng(count)
    slot = 8 * KIB
    size, stream = max(count, 1) * slot, cupy.cuda.Stream(non_blocking=True)
    given = random.integers(0, 256, size).astype(np.uint8)
    expected = np.zeros(size, np.uint8)
    here, there = cupy.asarray(given), cupy.asarray(expected)
    copies = []
    for number in range(count):
        at, to = (int(random.integers(0, slot // 2)) // alignment * alignment for _ in range(2))
        at, to = at + number * slot // 2, to + number * slot
        nbytes = int(random.integers(0, slot // 2)) if number % 5 else number % 40
        copies.append(Copy(there.data.ptr + to, here.data.ptr + at, nbytes))
        expected[to : to + nbytes] = given[at : at + nbytes]
    cupy.cuda.runtime.deviceSynchronize()
    copy_on_device(copies, stream)
    stream.synchronize()
    assert np.array_equal(cupy.asnumpy(there), expected)


@pytest.mark.gpu
def test_a_call_that_cuda_refuses_raises_an_error() -> None:
    import cupy

    from dask_gpurt.device.cuda_memory import copy_async

    here, there = cupy.arange(2), cupy.arange(2)
    default = cupy.cuda.Stream.null
    with pytest.raises(RuntimeError, match="2 copies in one call: cudaErrorInvalidValue"):
        copy_async([Copy(there.data.ptr + at, here.data.ptr + at, 8) for at in (0, 8)], default.ptr)


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES)
def test_memory_that_cuda_does_not_know_is_pageable(place: str) -> None:
    from dask_gpurt.device.cuda_memory import is_pageable

    memory = Memory(place, np.zeros(KIB, np.uint8))
    assert is_pageable(memory.ptr) == (place == "pageable")
    memory.close()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [(), (0,), (2, 3)])
@pytest.mark.parametrize("sizes", [[1], [1024, 1023, 9 * 1024, 3], [64 * 1024] * 4])
def test_large_buffers_go_to_host_memory_and_back(sizes: list[int], pinned: tuple[int, ...]) -> None:
    """Pinned and pageable pieces, in KiB, some of which go through bounce buffers."""
    import cupy

    from dask_gpurt.device.cuda import CudaDevice

    device = CudaDevice()
    places = ["pinned" if at in pinned else "pageable" for at in range(len(sizes))]
    for turn in range(3):
        pieces = [
            Memory(place, np.zeros(size * KIB + turn, np.uint8))
            for place, size in zip(places, sizes, strict=True)
        ]
        # The copies wait for these kernels, which are still at work.
        made = [cupy.random.randint(0, 256, piece.array.nbytes, cupy.uint8) for piece in pieces]
        buffers = device.empty([piece.array.nbytes for piece in pieces])
        for buffer, array in zip(buffers, made, strict=True):
            cupy.asarray(buffer)[:] = array
        device.scatter(buffers, [[piece.array] for piece in pieces])()
        assert all(np.array_equal(p.array, cupy.asnumpy(a)) for p, a in zip(pieces, made, strict=True))
        back, fence = device.gather_all([[piece.array] for piece in pieces])
        fence()
        assert all(bool((cupy.asarray(b) == a).all()) for b, a in zip(back, made, strict=True))
        for piece in pieces:
            piece.close()
    device.close()


@pytest.mark.gpu
def test_a_pool_that_exceeds_the_memory_is_refused() -> None:
    from dask_gpurt.device import NoMemoryForPool
    from dask_gpurt.device.cuda import CudaDevice

    device = CudaDevice()
    with pytest.raises(NoMemoryForPool) as caught:
        device.create_pool(2 * device.memory()[1])
    assert caught.value.nbytes == 2 * device.memory()[1]
    device.create_pool(KIB).close()
