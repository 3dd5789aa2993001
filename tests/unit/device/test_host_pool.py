"""Account for pools in shared memory: whose pages they are, and what the system allocates."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.config import ConfigError, Size
from dask_gpurt.device import Block, PoolFull, host
from dask_gpurt.device.host import HostDevice, HostPool
from dask_gpurt.device.pool import AUTO_POOL_OF_SHM, NoBacking
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.observe import Metrics
from tests.helpers.shared_memory import PAGE, Shm, filled, held, resident

MIB = 2**20


# ---- peers' pools --------------------------------------------------------------------


def test_pages_that_were_read_do_not_count_once_they_are_dropped() -> None:
    pool = HostPool(8 * MIB)
    filled(pool, 8 * MIB)
    device = HostDevice(2**30)
    mapping = device.map(pool.ticket())
    view = mapping.view(0, 8 * MIB)
    assert view.sum() == 8 * MIB
    assert resident(mapping) == 8 * MIB
    mapping.drop_pages(MIB, MIB)
    assert 6 * MIB < resident(mapping) <= 7 * MIB
    device.drop_pages()
    assert resident(mapping) == 0
    assert view.sum() == 8 * MIB  # readers still see the same bytes
    assert resident(pool) == 8 * MIB  # and they count towards the process that owns the pool
    mapping.drop_pages(8 * MIB - 100, 100)
    assert resident(mapping) < 8 * MIB
    del view
    mapping.close()
    mapping.drop_pages(0, MIB)  # by a reader that outlives its peer
    pool.close()


# ---- own pools -----------------------------------------------------------------------


def test_a_pool_that_is_partly_used_gives_back_what_is_free() -> None:
    pool = HostPool(16 * MIB)
    blocks = [filled(pool, MIB, number) for number in range(16)]
    for block in blocks[:10] + blocks[12:15]:
        pool.free(block)
    assert held(pool) == pool.backed == resident(pool) == 16 * MIB
    pool.trim()
    assert held(pool) == pool.backed == resident(pool) == 3 * MIB
    assert [block.buffer.min() for block in blocks[10:12] + blocks[15:]] == [10, 11, 15]
    filled(pool, 10 * MIB, 7)
    assert held(pool) == pool.backed == 13 * MIB
    pool.close()


@given(st.lists(st.tuples(st.sampled_from(["cut", "free", "trim"]), st.integers(1, 5 * PAGE))))
def test_blocks_keep_their_bytes_and_have_memory_behind_them(steps: list[tuple[str, int]]) -> None:
    pool, blocks = HostPool(16 * PAGE), list[Block]()
    for number, (step, size) in enumerate(steps):
        if step == "cut":
            try:
                blocks.append(filled(pool, size, number % 256))
            except PoolFull:
                continue
            assert not pool._backed.gaps(blocks[-1].offset, blocks[-1].offset + size)
        elif step == "free" and blocks:
            pool.free(blocks.pop(size % len(blocks)))
        else:
            before = [block.buffer.copy() for block in blocks]
            pool.trim()
            for block, was in zip(blocks, before, strict=True):
                np.testing.assert_array_equal(block.buffer, was)
        assert held(pool) == pool.backed
    for block in blocks:
        pool.free(block)
    pool.trim()
    assert held(pool) == 0
    pool.close()


def test_a_pool_is_trimmed_while_threads_cut_and_free_its_blocks() -> None:
    pool, errors = HostPool(4 * MIB), list[BaseException]()
    over = threading.Event()

    def use(value: int) -> None:
        try:
            for _ in range(200):
                block = filled(pool, 300_000, value)
                assert block.buffer.min() == block.buffer.max() == value
                pool.free(block)
        except BaseException as error:
            errors.append(error)

    def trim() -> None:
        while not over.is_set():
            pool.trim()

    threads = [threading.Thread(target=use, args=(value,)) for value in range(1, 5)]
    trimming = threading.Thread(target=trim)
    for thread in (*threads, trimming):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    trimming.join()
    assert not errors
    pool.trim()
    assert held(pool) == pool.backed == 0
    pool.close()


def test_an_idle_pool_is_trimmed_and_one_in_use_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Pools(Size(8 * MIB), 2**30, Metrics())
    pool: Any = mine.outbox("host").pool
    kept, gone = filled(pool, MIB), filled(pool, MIB)
    pool.free(gone)
    mine.trim_idle()
    assert held(pool) == 2 * MIB  # a block was cut in it
    mine.trim_idle()
    assert held(pool) == MIB
    gone = filled(pool, MIB)
    mine.trim_idle()
    assert held(pool) == 2 * MIB
    pool.free(gone)
    pool.free(kept)
    mine.trim_idle()
    assert held(pool) == 0
    mine.close()


# ---- the host ------------------------------------------------------------------------


def test_a_pool_with_no_block_waits_for_memory_that_another_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    shm = Shm(monkeypatch, 4 * MIB)
    one, other = shm.pools = [HostPool(4 * MIB), HostPool(4 * MIB)]
    block = filled(one, 3 * MIB)
    with pytest.raises(NoBacking):
        other.allocate(2 * MIB)
    assert other.short == 2 * MIB
    assert other.used == 0
    one.free(block)
    with pytest.raises(NoBacking):
        other.allocate(2 * MIB)
    one.trim()
    filled(other, 2 * MIB)
    assert other.short == 0
    one.close()
    other.close()


def test_a_pool_that_is_short_takes_what_its_own_free_blocks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    shm = Shm(monkeypatch, 4 * MIB)
    (pool,) = shm.pools = [HostPool(8 * MIB)]
    small = [filled(pool, MIB) for _ in range(4)]
    pool.free(small[0])
    pool.free(small[2])
    filled(pool, 2 * MIB)  # fits only after the others
    assert shm.used == 4 * MIB
    pool.close()


def test_a_block_that_never_fits_into_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(4 * MIB)
    Shm(monkeypatch, 0)
    monkeypatch.setattr(host, "shm_memory", lambda: (0, MIB))
    with pytest.raises(MemoryError, match="/dev/shm has no room for 2097152 bytes"):
        pool.allocate(2 * MIB)
    assert pool.used == 0
    pool.close()


def test_a_pool_is_made_while_shared_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a worker that joins while others shuffle."""
    fallocate = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        if "memfd" not in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        fallocate(fd, offset, nbytes)

    monkeypatch.setattr(host.os, "posix_fallocate", full)
    pool = HostPool(MIB)
    mapping = HostDevice(2**30).map(pool.ticket())
    filled(pool, MIB, 3)
    assert mapping.view(0, MIB).min() == 3
    mapping.close()
    pool.close()


def capacity(size: Size | None) -> int:
    mine = Pools(size, 2**30, Metrics())
    mine.main = "host"  # on a worker with a GPU the setting applies to the GPU
    try:
        return mine.outbox("host").pool.capacity
    finally:
        mine.close()


def test_a_worker_that_joins_late_has_a_pool_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for free in (2**30, 1000):
        monkeypatch.setattr(host, "shm_memory", lambda free=free: (free, 2**30))
        found.append([capacity(None), capacity(Size(8 * MIB))])
    assert found[0] == found[1] == [2**28, 8 * MIB]
    monkeypatch.setattr(host, "shm_memory", lambda: (0, 4 * MIB))
    assert capacity(None) == int(AUTO_POOL_OF_SHM * 4 * MIB) // PAGE * PAGE
    with pytest.raises(ConfigError, match="has 0 B free of"):
        capacity(Size(8 * MIB))
