"""Test what a tiered buffer does that a dict does not; its state machine compares it with one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange.incoming import Landing
from dask_gpurt.exchange.shard import Attempt, Peer, Section, Shard
from dask_gpurt.memory.ledger import Limits, Tier
from dask_gpurt.memory.store import TieredBuffer, serving
from dask_gpurt.observe import Metrics
from tests.helpers.tiered_buffers import KIB, array, new_tiered_buffer, put


@pytest.fixture
def tiered_buffer(tmp_path: Any) -> Iterator[TieredBuffer]:
    made = new_tiered_buffer(str(tmp_path), Limits(100 * KIB, 40 * KIB, 40 * KIB, None))
    yield made
    made.close()


def test_keys_that_are_not_needed_are_evicted_first(tmp_path: Any) -> None:
    tiered_buffer = new_tiered_buffer(
        str(tmp_path), Limits(30 * KIB, 0, 0, None), needed={"now": (0,), "later": (7,)}
    )
    for fill, key in enumerate(["later", "unneeded", "now"]):
        put(tiered_buffer, key, array(fill))
    put(tiered_buffer, "new", array(9))
    assert {key: tiered_buffer.tier(key) for key in tiered_buffer} == {
        "later": Tier.DEVICE,
        "unneeded": Tier.DISK,
        "now": Tier.DEVICE,
        "new": Tier.DEVICE,
    }
    put(tiered_buffer, "newer", array(10))
    assert tiered_buffer.tier("later") is Tier.DEVICE  # `new` is not needed
    assert tiered_buffer.tier("new") is Tier.DISK
    tiered_buffer.close()


def test_tiers_fill_from_the_top(tiered_buffer: TieredBuffer) -> None:
    for fill in range(20):
        put(tiered_buffer, f"x{fill}", array(fill))
    found = [tiered_buffer.tier(f"x{fill}") for fill in range(20)]
    assert found.count(Tier.DEVICE) == 10
    assert found.count(Tier.PINNED) == 3  # three blocks of 4 KiB each
    assert found.count(Tier.HOST) == 4
    assert found.count(Tier.DISK) == 3


def test_admitted_bytes_count_even_if_evicted_since(tiered_buffer: TieredBuffer) -> None:
    assert tiered_buffer.bytes_admitted(Tier.DEVICE) == 0
    put(tiered_buffer, "a", array(1))
    tiered_buffer["view"] = tiered_buffer["a"][:10]
    assert tiered_buffer.bytes_admitted(Tier.DEVICE) == 10 * KIB
    tiered_buffer.spill(1 << 30)
    tiered_buffer.release(tiered_buffer.hold(["a"]))
    assert tiered_buffer.bytes_admitted(Tier.DEVICE) == 20 * KIB


def test_removals_from_the_live_tiers_are_counted(tiered_buffer: TieredBuffer) -> None:
    """A failed allocation uses it to decide whether to retry."""
    put(tiered_buffer, "a", array(1))
    put(tiered_buffer, "b", array(2))
    assert tiered_buffer.removals == 0
    tiered_buffer.spill(1)
    assert tiered_buffer.removals == 1
    for key in "ab":
        del tiered_buffer[key]
    assert tiered_buffer.removals == 2
    tiered_buffer.spill(1)
    assert tiered_buffer.removals == 2


def test_an_object_that_cannot_be_serialized_stays(tiered_buffer: TieredBuffer) -> None:
    tiered_buffer["lock"] = lock = threading.Lock()
    put(tiered_buffer, "array", array(1))
    tiered_buffer.spill(1 << 30)
    assert tiered_buffer["lock"] is lock
    assert tiered_buffer.tier("array") is Tier.PINNED
    assert "memory.unpicklable" in tiered_buffer._metrics.snapshot()["fallbacks"]


def test_full_everywhere_loses_nothing(tmp_path: Any) -> None:
    tiered_buffer = new_tiered_buffer(str(tmp_path), Limits(20 * KIB, 0, 0, 15 * KIB))
    for fill in range(5):
        put(tiered_buffer, f"x{fill}", array(fill))
    assert all(np.array_equal(tiered_buffer[f"x{fill}"], array(fill)) for fill in range(5))
    assert "memory.tiers-full" in tiered_buffer._metrics.snapshot()["fallbacks"]
    tiered_buffer.close()


def test_a_shard_that_the_device_has_no_room_for_lands_below(tiered_buffer: TieredBuffer) -> None:
    """The tiered buffer had room, but the allocator did not."""
    metrics, given = Metrics(), array(1)
    landing = Landing(tiered_buffer, "host", metrics)
    section = Section((0,), (0, 1), 0, given.nbytes, b"")
    shard = Shard(0, Peer("tcp://a:1", "life"), "host", 0, 0, Attempt(0, 0), 0, (section,))

    def bring(sources: Any) -> Any:
        raise MemoryError("std::bad_alloc")

    landing.put("x", shard, [given], HostDevice(1 << 30), bring)
    assert tiered_buffer.tier("x") is Tier.PINNED
    with landing.reading([("x", 0)], "a task") as found:
        assert np.array_equal(np.frombuffer(found["x", 0][0], np.uint8), given)
    assert metrics.snapshot()["fallbacks"]["exchange.spilled-on-arrival"]["count"] == 1


def test_shards_stay_live_if_they_leave_half_of_the_tier_and_evict_nothing(
    tiered_buffer: TieredBuffer,
) -> None:
    landing, most = Landing(tiered_buffer, "host", Metrics()), tiered_buffer.limits.device
    assert landing.keeps(most // 2, most // 2, "host")
    assert not landing.keeps(most // 2 + 1, 0, "host")
    put(tiered_buffer, "x", np.zeros(most - 10 * KIB, np.uint8))
    assert landing.keeps(20 * KIB, 10 * KIB, "host")
    assert not landing.keeps(20 * KIB, 20 * KIB, "host")
    assert landing.keeps(20 * KIB, 0, "host"), "those that have landed are in the tier"


def test_serving_overrides_what_lies_there(tiered_buffer: TieredBuffer) -> None:
    put(tiered_buffer, "x", array(1))
    token = serving.set({"x": "copy"})
    assert tiered_buffer["x"] == "copy"
    serving.reset(token)
    assert np.array_equal(tiered_buffer["x"], array(1))


def test_many_threads(tmp_path: Any) -> None:
    """Concurrent readers, spillers and writers see only values that were put."""
    tiered_buffer = new_tiered_buffer(str(tmp_path), Limits(50 * KIB, 30 * KIB, 30 * KIB, None))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(150):
            mine, any_key = f"{seed}-{random.integers(4)}", f"{random.integers(4)}-{random.integers(4)}"
            match random.integers(5):
                case 0:
                    put(tiered_buffer, mine, array(hash(mine)))
                case 1:
                    held = tiered_buffer.hold([any_key])
                    wrong.extend(
                        e
                        for e in held
                        if e.value is not None and not np.array_equal(e.value, array(hash(any_key)))
                    )
                    tiered_buffer.release(held)
                case 2:
                    found = tiered_buffer.copies([any_key]).items()
                    wrong.extend(key for key, value in found if not np.array_equal(value, array(hash(key))))
                case 3:
                    tiered_buffer.spill(20 * KIB)
                case 4:
                    tiered_buffer.pop(mine, None)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    tiered_buffer.close()
