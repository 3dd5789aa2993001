"""Allocate blocks of pinned memory: registered once, never handed out twice, in the fewest possible runs."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.memory.host import BlockPool, PinnedTier
from dask_gpurt.memory.tiers import NoRoom, Tier
from tests.helpers.small_tiers import BLOCK, frames, pinned


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 6 * BLOCK), st.integers(-8, -1)), max_size=40))
def test_blocks_never_overlap(steps: list[int]) -> None:
    """Positive numbers allocate that size, negative numbers free one of the allocated blocks."""
    pool = BlockPool(16 * BLOCK + 17, block=BLOCK)
    assert pool.capacity == 16 * BLOCK
    held: list[tuple[list[np.ndarray], int]] = []
    for number, step in enumerate(steps):
        if step < 0:
            if held:
                pieces, mark = held.pop(step % len(held))
                assert all((piece == mark).all() for piece in pieces)
                pool.free(pieces)
        else:
            blocks = -(-step // BLOCK)
            try:
                pieces = pool.allocate(step)
            except NoRoom as error:
                assert (error.tier, error.nbytes) == (Tier.PINNED, step)
                assert blocks * BLOCK > pool.capacity - pool.used
                continue
            assert sum(piece.size for piece in pieces) == step
            assert all(piece.size % BLOCK == 0 for piece in pieces[:-1])
            for piece in pieces:
                piece[:] = number
            held.append((pieces, number))
        assert pool.used == sum(-(-sum(p.size for p in pieces) // BLOCK) * BLOCK for pieces, _ in held)
    for pieces, mark in held:
        assert all((piece == mark).all() for piece in pieces)
        pool.free(pieces)
    assert pool.used == 0
    assert len(pool.allocate(pool.capacity)) <= 1  # all neighbours were merged


def test_a_run_that_is_long_enough_comes_before_shorter_ones() -> None:
    pool = BlockPool(8 * BLOCK, block=BLOCK)
    blocks = [pool.allocate(BLOCK) for _ in range(8)]
    for index in (0, 2, 4, 5, 6):
        pool.free(blocks[index])
    [piece] = pool.allocate(3 * BLOCK - 1)
    assert piece.ctypes.data == blocks[4][0].ctypes.data
    assert [piece.size for piece in pool.allocate(BLOCK + 1)] == [BLOCK, 1]


def test_a_block_that_was_not_allocated_cannot_be_freed() -> None:
    pool = BlockPool(4 * BLOCK, block=BLOCK)
    pieces = pool.allocate(BLOCK)
    pool.free(pieces)
    with pytest.raises(KeyError):
        pool.free(pieces)
    with pytest.raises(ValueError, match="multiple of 256"):
        BlockPool(4096, block=100)


def test_memory_is_registered_once_and_aligned() -> None:
    seen: list[Any] = []

    def register(memory: np.ndarray) -> Callable[[], None]:
        seen.append((memory.size, memory.ctypes.data % 4096))
        return lambda: seen.append("undone")

    pool = BlockPool(4 * BLOCK, block=BLOCK, register=register)
    assert pool.ready.wait(10)
    pieces = pool.allocate(700)
    pieces[0][:] = 7
    pool.close()
    pool.close()
    assert seen == [(4 * BLOCK, 0), "undone"]
    with pytest.raises(NoRoom):
        pool.allocate(1)
    assert (pieces[0] == 7).all()
    pool.free(pieces)
    with pytest.raises(NoRoom):
        pool.allocate(1)


def test_memory_that_is_registered_stays_with_its_process() -> None:
    """After a fork, it would be undefined which copy of a page the device writes to."""
    pool = BlockPool(4 * BLOCK, block=BLOCK, register=lambda memory: lambda: None)
    assert pool.ready.wait(10)
    (piece,) = pool.allocate(BLOCK)
    piece[:] = 7
    child = os.fork()
    if not child:
        faulthandler.disable()
        piece[0] = 8  # not mapped: the child crashes
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
    assert (piece == 7).all()
    pool.close()


def test_an_empty_pool_has_no_room() -> None:
    tier = PinnedTier(BlockPool(0, register=lambda memory: pytest.fail("nothing to register")))
    for sizes in ((), (0,), (1,)):
        with pytest.raises(NoRoom):
            tier["a"] = frames(*sizes)
    tier.close()


def test_small_buffers_share_blocks() -> None:
    tier = pinned()
    tier["a"] = frames(*[100] * 4)
    assert tier.used == 2 * BLOCK
    starts = [buffer[0].ctypes.data % 256 for buffer in tier["a"].buffers]
    assert starts == [0, 0, 0, 0]
