"""The ladder against a plain dict, and what only a ladder does."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange.landing import Landing
from dask_gpurt.exchange.shard import Attempt, Peer, Section, Shard
from dask_gpurt.memory.store import TieredBuffer, serving
from dask_gpurt.memory.tiers import Limits, Tier
from dask_gpurt.observe import Metrics
from tests.helpers.ladders import KIB, array, new_ladder, put


@pytest.fixture
def ladder(tmp_path: Any) -> Iterator[TieredBuffer]:
    made = new_ladder(str(tmp_path), Limits(100 * KIB, 40 * KIB, 40 * KIB, None))
    yield made
    made.close()


class AgainstDict(RuleBasedStateMachine):
    """What is put is what is read, wherever it lay meanwhile, and no tier exceeds its limit."""

    keys = st.sampled_from("abcdefgh")

    @initialize(device=st.integers(0, 60), pinned=st.integers(0, 40), host=st.integers(0, 40))
    def start(self, device: int, pinned: int, host: int) -> None:
        self.stack = ExitStack()
        directory = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.limits = Limits(device * KIB, pinned * KIB, host * KIB, None)
        self.ladder = new_ladder(directory, self.limits)
        self.stack.callback(self.ladder.close)
        self.model: dict[str, np.ndarray] = {}
        self.held: list[Any] = []

    @rule(key=keys, fill=st.integers(1, 250), kib=st.integers(1, 20))
    def put(self, key: str, fill: int, kib: int) -> None:
        put(self.ladder, key, array(fill, kib))
        self.model[key] = array(fill, kib)

    @rule(key=keys)
    def get(self, key: str) -> None:
        if key in self.model:
            assert np.array_equal(self.ladder[key], self.model[key])
        else:
            with pytest.raises(KeyError):
                self.ladder[key]

    @rule(key=keys)
    def serve(self, key: str) -> None:
        tier = self.ladder.tier(key) if key in self.model else None
        copies = self.ladder.copies([key])
        assert list(copies) == [key for key in [key] if key in self.model]
        for found in copies.values():
            assert np.array_equal(found, self.model[key])
            assert self.ladder.tier(key) is tier

    @rule(key=keys)
    def delete(self, key: str) -> None:
        assert (key in self.ladder) == (key in self.model)
        if self.model.pop(key, None) is not None:
            del self.ladder[key]

    @rule(keys=st.lists(keys, max_size=3, unique=True))
    def hold(self, keys: list[str]) -> None:
        self.held.append(self.ladder.hold(keys))
        assert not self.ladder.not_live(keys)

    @rule()
    def release(self) -> None:
        if self.held:
            self.ladder.release(self.held.pop())

    @rule(nbytes=st.integers(0, 100 * KIB))
    def spill(self, nbytes: int) -> None:
        self.ladder.spill(nbytes)

    @invariant()
    def same_keys(self) -> None:
        if hasattr(self, "model"):
            assert set(self.ladder) == set(self.model)
            assert len(self.ladder) == len(self.model)

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        live = [value for key, value in self.model.items() if not self.ladder.not_live([key])]
        assert self.ladder.live_bytes(Tier.DEVICE) == sum(value.nbytes for value in live)
        assert self.ladder.ledger.cell(Tier.DEVICE, "partitions") == sum(value.nbytes for value in live)
        pinned = self.ladder.ledger.cell(Tier.PINNED, "partitions")
        assert pinned <= self.limits.pinned
        assert self.ladder.ledger.cell(Tier.HOST, "partitions") <= self.limits.host

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()


AgainstDict.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_against_a_dict = AgainstDict.TestCase


def test_what_nobody_needs_goes_down_first(tmp_path: Any) -> None:
    ladder = new_ladder(str(tmp_path), Limits(30 * KIB, 0, 0, None), needed={"now": (0,), "later": (7,)})
    for fill, key in enumerate(["later", "nobody", "now"]):
        put(ladder, key, array(fill))
    put(ladder, "new", array(9))
    assert {key: ladder.tier(key) for key in ladder} == {
        "later": Tier.DEVICE,
        "nobody": Tier.DISK,
        "now": Tier.DEVICE,
        "new": Tier.DEVICE,
    }
    put(ladder, "newer", array(10))
    assert ladder.tier("later") is Tier.DEVICE  # `new` is needed by nobody
    assert ladder.tier("new") is Tier.DISK
    ladder.close()


def test_tiers_fill_from_the_top(ladder: TieredBuffer) -> None:
    for fill in range(20):
        put(ladder, f"x{fill}", array(fill))
    found = [ladder.tier(f"x{fill}") for fill in range(20)]
    assert found.count(Tier.DEVICE) == 10
    assert found.count(Tier.PINNED) == 3  # three blocks of 4 KiB each
    assert found.count(Tier.HOST) == 4
    assert found.count(Tier.DISK) == 3


def test_views_share_what_they_see(ladder: TieredBuffer) -> None:
    whole = array(1)
    ladder["whole"] = whole
    ladder["half"] = whole[: whole.size // 2]
    assert ladder.live_bytes(Tier.DEVICE) == whole.nbytes
    del ladder["whole"]
    assert ladder.live_bytes(Tier.DEVICE) == whole.nbytes


def test_what_becomes_live_is_counted_even_if_it_goes_again(ladder: TieredBuffer) -> None:
    assert ladder.bytes_admitted(Tier.DEVICE) == 0
    put(ladder, "a", array(1))
    ladder["view"] = ladder["a"][:10]
    assert ladder.bytes_admitted(Tier.DEVICE) == 10 * KIB
    ladder.spill(1 << 30)
    ladder.release(ladder.hold(["a"]))
    assert ladder.bytes_admitted(Tier.DEVICE) == 20 * KIB


def test_what_has_left_the_live_tiers_is_counted(ladder: TieredBuffer) -> None:
    """By this an allocation that has failed knows that it is worth another try."""
    put(ladder, "a", array(1))
    put(ladder, "b", array(2))
    assert ladder.removals == 0
    ladder.spill(1)
    assert ladder.removals == 1
    for key in "ab":
        del ladder[key]
    assert ladder.removals == 2
    ladder.spill(1)
    assert ladder.removals == 2


def test_a_held_key_is_not_spilled(ladder: TieredBuffer) -> None:
    put(ladder, "held", array(1))
    held = ladder.hold(["held"])
    ladder.spill(1 << 30)
    assert ladder.tier("held") is Tier.DEVICE
    ladder.release(held)
    ladder.spill(1 << 30)
    assert ladder.tier("held") is Tier.PINNED


def test_what_can_not_be_taken_apart_stays(ladder: TieredBuffer) -> None:
    ladder["lock"] = lock = threading.Lock()
    put(ladder, "array", array(1))
    ladder.spill(1 << 30)
    assert ladder["lock"] is lock
    assert ladder.tier("array") is Tier.PINNED
    assert "memory.unpicklable" in ladder._metrics.snapshot()["fallbacks"]


def test_full_everywhere_loses_nothing(tmp_path: Any) -> None:
    ladder = new_ladder(str(tmp_path), Limits(20 * KIB, 0, 0, 15 * KIB))
    for fill in range(5):
        put(ladder, f"x{fill}", array(fill))
    assert all(np.array_equal(ladder[f"x{fill}"], array(fill)) for fill in range(5))
    assert "memory.tiers-full" in ladder._metrics.snapshot()["fallbacks"]
    ladder.close()


def test_a_shard_that_the_device_has_no_room_for_lands_below(ladder: TieredBuffer) -> None:
    """Though the ladder had: the allocator knows better."""
    metrics, given = Metrics(), array(1)
    landing = Landing(ladder, "host", metrics)
    section = Section((0,), (0, 1), 0, given.nbytes, b"")
    shard = Shard(0, Peer("tcp://a:1", "life"), "host", 0, 0, Attempt(0, 0), 0, (section,))

    def bring(sources: Any) -> Any:
        raise MemoryError("std::bad_alloc")

    landing.put("x", shard, [given], HostDevice(1 << 30), bring)
    assert ladder.tier("x") is Tier.PINNED
    with landing.reading([("x", 0)], "a task") as found:
        assert np.array_equal(np.frombuffer(found["x", 0][0], np.uint8), given)
    assert metrics.snapshot()["fallbacks"]["exchange.spilled-on-arrival"]["count"] == 1


def test_serving_overrides_what_lies_there(ladder: TieredBuffer) -> None:
    put(ladder, "x", array(1))
    token = serving.set({"x": "copy"})
    assert ladder["x"] == "copy"
    serving.reset(token)
    assert np.array_equal(ladder["x"], array(1))


def test_many_threads(tmp_path: Any) -> None:
    """Readers, spillers and writers at once: nobody sees anything but what was put."""
    ladder = new_ladder(str(tmp_path), Limits(50 * KIB, 30 * KIB, 30 * KIB, None))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(150):
            mine, any_key = f"{seed}-{random.integers(4)}", f"{random.integers(4)}-{random.integers(4)}"
            match random.integers(5):
                case 0:
                    put(ladder, mine, array(hash(mine)))
                case 1:
                    held = ladder.hold([any_key])
                    wrong.extend(
                        e
                        for e in held
                        if e.value is not None and not np.array_equal(e.value, array(hash(any_key)))
                    )
                    ladder.release(held)
                case 2:
                    found = ladder.copies([any_key]).items()
                    wrong.extend(key for key, value in found if not np.array_equal(value, array(hash(key))))
                case 3:
                    ladder.spill(20 * KIB)
                case 4:
                    ladder.pop(mine, None)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    ladder.close()
