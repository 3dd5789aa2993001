"""Detect memory that changes hands before all operations on it have been waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_gpurt
from dask_gpurt.device.host import HostDevice
from tests.helpers.clusters import (
    Library,
    assert_same_partitions,
    cluster,
    counters,
    partitions,
    told_too_early,
)
from tests.helpers.instruments import COMPUTE, HandoverChecker, overlap

MEMORY = np.zeros(64, np.uint8)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def checker(told: list[str]) -> HandoverChecker:
    return HandoverChecker(told.append)


def elsewhere(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function on another thread, which has streams of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function(*args, **options)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_memory_is_given_back_before_a_copy_has_been_waited_for(
    checker: HandoverChecker, told: list[str], what: str
) -> None:
    options: dict[str, Any] = {what: [MEMORY[8:16]]}
    over = checker.begin("a copy", **options)
    checker.hand_over("a block is given back", [MEMORY[16:32], MEMORY[:8]])
    assert told == []
    checker.hand_over("a block is given back", [MEMORY[15:17]])
    assert told == ["a block is given back before a copy has been waited for, which accesses the same memory"]
    over()
    checker.hand_over("a block is given back", [MEMORY])
    assert len(told) == 1


def test_a_published_block_is_read_but_not_written(checker: HandoverChecker, told: list[str]) -> None:
    checker.begin("a reader", reads=[MEMORY])
    checker.hand_over("a shard is published", [MEMORY], readable=True)
    assert told == []
    checker.begin("a writer", writes=[MEMORY[:1]])
    checker.hand_over("a shard is published", [MEMORY], readable=True)
    assert len(told) == 1
    assert "a writer" in told[0]


def test_streams_keep_their_own_order(checker: HandoverChecker, told: list[str]) -> None:
    checker.begin("the first", writes=[MEMORY])
    checker.begin("the second", writes=[MEMORY])
    assert told == []
    elsewhere(checker.begin, "another thread", reads=[MEMORY])
    assert len(told) == 2
    checker.begin("compute", reads=[MEMORY], stream=COMPUTE)
    elsewhere(checker.begin, "compute", writes=[MEMORY], stream=COMPUTE)
    assert len(told) == 2 + 2 + 3  # of which one reads


def test_the_last_fence_of_a_thread_is_behind_all_before(checker: HandoverChecker, told: list[str]) -> None:
    checker.begin("the first", writes=[MEMORY])
    elsewhere(checker.begin, "of another thread", writes=[MEMORY[:1]])
    told.clear()
    checker.begin("the second", reads=[MEMORY[60:]])()
    checker.hand_over("memory is given back", [MEMORY])
    assert len(told) == 1
    assert "another thread" in told[0]


cuts = st.lists(st.integers(0, 64), min_size=2, max_size=8, unique=True).map(sorted)
some_spans = cuts.map(lambda ends: list(zip(ends[::2], ends[1::2], strict=False)))


@given(some_spans, some_spans)
def test_spans_overlap_where_they_have_a_byte_in_common(
    some: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    mine, theirs = ({byte for span in spans for byte in range(*span)} for spans in (some, others))
    assert overlap(some, others) == bool(mine & theirs)


class Later(HostDevice):
    """Fake a device whose copies complete only when their fences are waited for."""

    def scatter(self, *args: Any, **options: Any) -> Any:
        super().scatter(*args, **options)
        return lambda: None

    def gather(self, pieces: list[Any]) -> tuple[Any, Any]:
        return super().gather(pieces)[0], lambda: None


def test_copies_of_a_device_and_blocks_of_its_pools_are_looked_at(
    checker: HandoverChecker, told: list[str]
) -> None:
    device = Later(1 << 30)
    checker.watch_device(device)
    pool = device.create_pool(1 << 16)
    for early in (False, True):
        block = pool.allocate(1000)
        fence = device.scatter([block.buffer], [[np.empty(600, np.uint8), np.empty(400, np.uint8)]])
        if not early:
            fence()
        pool.free(block)
        assert len(told) == early
        fence()
    pinned = pool.allocate(1000)
    buffer, fence = device.gather([pinned.buffer])
    assert buffer.nbytes == 1000
    pool.free(pinned)
    assert len(told) == 2
    fence()
    assert pool.used == 0
    pool.close()


def test_a_copy_that_fails_is_over(checker: HandoverChecker, told: list[str]) -> None:
    device = HostDevice(1 << 30)
    checker.watch_device(device)
    with pytest.raises(ValueError, match="broadcast"):
        device.scatter([MEMORY], [[np.empty(65, np.uint8)]])
    checker.hand_over("memory is given back", [MEMORY])
    assert told == []


# ---- clusters ------------------------------------------------------------------------


def frames() -> list[pd.DataFrame]:
    random = np.random.default_rng(0)
    return [
        pd.DataFrame(
            {"key": random.integers(0, 999, 20_000), "text": random.integers(0, 9, 20_000).astype(str)}
        )
        for _ in range(8)
    ]


@pytest.mark.slow
def test_nothing_is_too_early_in_shuffles_that_spill(library: Library) -> None:
    small = {"memory__device": 2**20, "memory__pinned": 2**20, "exchange__pool": 2**20}
    with cluster(library.name, handovers=True, **small) as client:
        collection = library.collection(frames())
        ours = partitions(collection.shuffle("key"))
        with dask.config.set({"dataframe.shuffle.method": "tasks", "gpurt.takeover": False}):
            theirs = partitions(collection.shuffle("key"))
        assert_same_partitions(ours, theirs, in_order=False)
        assert told_too_early(client) == []
        assert counters(client)["overlap.handovers"] > 0


def forget_to_settle() -> None:
    """Make producers publish blocks that may not have been written yet."""
    from tests.helpers import instruments

    watch_table = instruments.watch_table

    def forgetful(table: Any, checker: HandoverChecker) -> Any:
        settle = table.settle
        watch_table(table, checker).settle = settle
        return table

    instruments.watch_table = forgetful


@pytest.mark.slow
def test_the_doctor_tells_what_is_too_early(library: Library) -> None:
    with cluster(library.name, handovers=True) as client:
        client.run(forget_to_settle)
        partitions(library.collection(frames()).shuffle("key"))
        assert len(told_too_early(client)) == 2
        for found in told_too_early(client):
            assert "before packing has been waited for" in str(found)
        dask_gpurt.disable(client)  # the counts are meant to be non-zero, so skip the check at the end
