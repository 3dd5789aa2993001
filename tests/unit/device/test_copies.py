"""Merge copies, and check which bytes they touch."""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.device.copies import runs
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
