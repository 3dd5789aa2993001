"""Allocate blocks of pinned memory: registered as needed, never handed out twice, in few runs."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.host import BlockPool
from dask_gpurt.memory.ledger import NoRoom, Tier
from tests.helpers.examples import examples
from tests.helpers.small_tiers import BLOCK


def test_a_run_that_is_long_enough_comes_before_shorter_ones() -> None:
    pool = BlockPool(8 * BLOCK, block=BLOCK)
    blocks = [pool.allocate(BLOCK) for _ in range(8)]
    for index in (0, 2, 4, 5, 6):
        pool.free(blocks[index])
    [piece] = pool.allocate(3 * BLOCK - 1)
    assert piece.ctypes.data == blocks[4][0].ctypes.data
    assert [piece.size for piece in pool.allocate(BLOCK + 1)] == [BLOCK, 1]


def test_memory_is_registered_once_and_aligned() -> None:
    seen: list[Any] = []

    def register(memory: np.ndarray) -> Callable[[], None]:
        seen.append((memory.size, memory.ctypes.data % 4096))
        return lambda: seen.append("undone")

    pool = BlockPool(4 * BLOCK, block=BLOCK, register=register)
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


# ---- memory is registered as it is needed ----------------------------------------------------


class Registrations:
    """Record which memory is registered; the one with number ``fails`` raises."""

    def __init__(self, fails: int | None = None, gate: threading.Event | None = None):
        self.fails, self.gate = fails, gate
        self.areas: list[tuple[int, int]] = []
        self.undone: list[int] = []

    def __call__(self, memory: np.ndarray) -> Callable[[], None]:
        if self.gate is not None:
            assert self.gate.wait(30)
        if len(self.areas) == self.fails:
            raise OSError("no memory may be locked")
        start = int(memory.ctypes.data)
        self.areas.append((start, start + memory.size))
        return lambda: self.undone.append(start)

    def sizes(self) -> list[int]:
        return [(end - start) // BLOCK for start, end in self.areas]

    def hold(self, piece: np.ndarray) -> bool:
        """Return whether a piece lies within one registered area."""
        start = int(piece.ctypes.data)
        return any(first <= start and start + piece.size <= last for first, last in self.areas)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpurt.memory.host.FIRST_SLAB_BYTES", 2 * BLOCK)


@pytest.mark.usefixtures("small_slabs")
@examples(40)
@given(st.lists(st.one_of(st.integers(0, 9 * BLOCK), st.integers(-8, -1)), max_size=40))
def test_pieces_lie_in_registered_memory_and_never_overlap(steps: list[int]) -> None:
    """Positive numbers allocate that size, negative numbers free one of the allocated blocks."""
    registered = Registrations()
    pool = BlockPool(20 * BLOCK + 17, block=BLOCK, register=registered)
    assert pool.capacity == 20 * BLOCK
    held: list[tuple[list[np.ndarray], int]] = []
    for number, step in enumerate(steps):
        if step < 0:
            if held:
                pieces, mark = held.pop(step % len(held))
                assert all((piece == mark).all() for piece in pieces)
                pool.free(pieces)
        elif -(-step // BLOCK) * BLOCK > pool.capacity - pool.used:
            with pytest.raises(NoRoom) as refused:
                pool.allocate(step)
            assert (refused.value.tier, refused.value.nbytes) == (Tier.PINNED, step)
        else:
            pieces = pool.allocate(step)
            assert sum(piece.size for piece in pieces) == step
            assert all(piece.size % BLOCK == 0 for piece in pieces[:-1])
            assert all(map(registered.hold, pieces))
            for piece in pieces:
                piece[:] = number
            held.append((pieces, number))
        assert pool.used == sum(-(-sum(p.size for p in pieces) // BLOCK) * BLOCK for pieces, _ in held)
    for pieces, mark in held:
        assert all((piece == mark).all() for piece in pieces)
        pool.free(pieces)
    assert pool.used == 0
    pool.close()


@pytest.mark.usefixtures("small_slabs")
def test_a_slab_cannot_be_registered() -> None:
    """The slabs that there are stay in use, and no other one is tried."""
    registered, told = Registrations(fails=1), list[Exception]()
    pool = BlockPool(8 * BLOCK, block=BLOCK, register=registered, failed=told.append)
    pieces = pool.allocate(2 * BLOCK)
    for _ in range(2):
        with pytest.raises(NoRoom, match="could not be pinned: no memory may be locked"):
            pool.allocate(BLOCK)
    pool.free(pieces)
    assert pool.allocate(BLOCK)
    assert registered.sizes() == [2]
    assert [str(error) for error in told] == ["no memory may be locked"]
    pool.close()


@pytest.mark.usefixtures("small_slabs")
def test_threads_that_need_room_at_once_share_a_new_slab() -> None:
    registered = Registrations(gate=(gate := threading.Event()))
    pool = BlockPool(16 * BLOCK, block=BLOCK, register=registered)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(pool.allocate, BLOCK) for _ in range(4)]
        gate.set()
        pieces = [each.result(30) for each in waiting]
    assert registered.sizes() == [2, 2]
    assert len({int(piece.ctypes.data) for (piece,) in pieces}) == 4
    pool.close()


@pytest.mark.usefixtures("small_slabs")
def test_who_can_do_without_does_not_wait_for_a_new_slab() -> None:
    registered = Registrations(gate=(gate := threading.Event()))
    pool = BlockPool(16 * BLOCK, block=BLOCK, register=registered)
    assert not pool.is_ready(3 * BLOCK)  # while the first slab is registered
    gate.set()
    assert len(pool.allocate(2 * BLOCK)) == 1
    gate.clear()
    assert not pool.is_ready(3 * BLOCK)
    assert not pool.is_ready(3 * BLOCK)
    gate.set()
    pool.allocate(3 * BLOCK)  # of slabs that the thread has made
    assert registered.sizes() == [2, 2, 4]
    assert pool.is_ready(3 * BLOCK)
    assert pool.is_ready(99 * BLOCK)  # which is refused at once
    pool.close()


@pytest.mark.usefixtures("small_slabs")
def test_a_pool_that_was_closed_makes_no_slab() -> None:
    registered, told = Registrations(), list[Exception]()
    pool = BlockPool(16 * BLOCK, block=BLOCK, register=registered, failed=told.append)
    pool.allocate(2 * BLOCK)
    pool.close()
    assert not pool._grow(3 * BLOCK)  # by a thread that has waited for the close
    assert (registered.sizes(), told) == ([2], [])


@pytest.mark.usefixtures("small_slabs")
def test_a_pool_is_closed_while_its_first_slab_is_registered() -> None:
    registered = Registrations(gate=(gate := threading.Event()))
    pool = BlockPool(16 * BLOCK, block=BLOCK, register=registered)
    closing = threading.Thread(target=pool.close)
    closing.start()
    gate.set()
    closing.join(30)
    assert not closing.is_alive()
    assert len(registered.undone) == len(registered.areas)
    with pytest.raises(NoRoom):
        pool.allocate(1)
