"""Compare the lower tiers with a dict: they hold the same items until they are full."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dask_gpurt.memory.disk import DiskTier
from dask_gpurt.memory.host import HostTier
from dask_gpurt.memory.ledger import NoRoom
from dask_gpurt.memory.serialize import Frames
from tests.helpers.examples import examples
from tests.helpers.small_tiers import BLOCK, CAPACITY, content, frames, pinned

DISK_CAPACITY = 4 * 4096
KEYS = st.sampled_from(["a", "b/../c", "('x-1', 0)", "ü", "e"])
SIZES = st.lists(st.integers(0, 1500), max_size=4)


def test_a_host_tier_of_no_bytes_takes_nothing() -> None:
    for sizes in ((), (0,), (1,)):
        with pytest.raises(NoRoom):
            HostTier(0)["empty"] = frames(*sizes)


class Mappings(RuleBasedStateMachine):
    """Compare one tier with a dict: same operations, same content, limits respected."""

    @initialize(kind=st.sampled_from(["pinned", "host", "disk"]))
    def start(self, kind: str) -> None:
        self.model: dict[str, tuple[bytes, list[bytes]]] = {}
        make: dict[str, Callable[[], Any]] = {
            "pinned": pinned,
            "host": lambda: HostTier(CAPACITY),
            "disk": lambda: DiskTier(os.environ.get("TMPDIR", "/tmp"), DISK_CAPACITY),
        }
        self.kind, self.tier = kind, make[kind]()

    def cost(self, frames: tuple[bytes, list[bytes]]) -> int:
        header, buffers = frames
        if self.kind == "host":
            return sum(map(len, buffers))
        if self.kind == "disk":
            return -(-(len(header) + sum(map(len, buffers))) // 4096) * 4096
        end = 0
        for buffer in buffers:
            end = -(-end // 256) * 256 + len(buffer)
        return -(-end // BLOCK) * BLOCK

    @property
    def capacity(self) -> int:
        return DISK_CAPACITY if self.kind == "disk" else CAPACITY

    @property
    def expected(self) -> int:
        return sum(map(self.cost, self.model.values()))

    @rule(key=KEYS, sizes=SIZES, seed=st.integers(0, 99))
    def put(self, key: str, sizes: list[int], seed: int) -> None:
        if key in self.model:
            return  # keys of a tier are used once
        given = frames(*sizes, seed=seed)
        fits = self.expected + self.cost(content(given)) <= self.capacity
        try:
            self.tier[key] = given
        except NoRoom as error:
            assert not fits
            assert error.tier == self.kind
        else:
            assert fits
            self.model[key] = content(given)

    @precondition(lambda self: self.kind != "disk")
    @rule(key=KEYS, sizes=SIZES, seed=st.integers(0, 99))
    def adopt(self, key: str, sizes: list[int], seed: int) -> None:
        if key in self.model:
            return
        given = content(frames(*sizes, seed=seed))
        try:
            room = self.tier.adopt(key, given[0], sizes)
        except NoRoom:
            assert self.expected + self.cost(given) > self.capacity
            return
        for buffer, data in zip(room.buffers, given[1], strict=True):
            for piece in buffer:
                piece[:] = np.frombuffer(data[: piece.size], np.uint8)
                data = data[piece.size :]
            assert not data
        self.model[key] = given

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        if key in self.model:
            del self.tier[key], self.model[key]
        else:
            with pytest.raises(KeyError):
                del self.tier[key]

    @invariant()
    def same(self) -> None:
        assert {key: content(self.tier[key]) for key in self.model} == self.model
        assert self.tier.used == self.expected <= self.tier.capacity

    def teardown(self) -> None:
        if getattr(self, "kind", "host") != "host":
            self.tier.close()


Mappings.TestCase.settings = examples(40, steps=20)
TestMappings = Mappings.TestCase


def test_a_failed_copy_takes_no_memory() -> None:
    broken = Frames(b"", ([np.zeros(10, np.uint8), np.zeros((2, 5), np.uint8)],))
    for tier in (pinned(), HostTier(CAPACITY)):
        with pytest.raises(Exception, match="broadcast"):
            tier["a"] = broken
        assert tier.used == 0
        with pytest.raises(KeyError):
            tier["a"]


@pytest.mark.parametrize("kind", ["pinned", "host", "disk"])
def test_a_key_goes_after_its_tier_was_closed(kind: str, tmp_path: Path) -> None:
    tier: Any = {
        "pinned": pinned,
        "host": lambda: HostTier(CAPACITY),
        "disk": lambda: DiskTier(str(tmp_path)),
    }[kind]()
    tier["a"], tier["b"] = frames(500), frames(600)
    tier.close()
    assert not tier.used
    del tier["a"], tier["b"]
    if kind == "disk":
        tier.settle()
    assert not tier.used
    assert not list(tmp_path.iterdir())


def test_threads_share_a_tier(tmp_path: Path) -> None:
    tiers: list[Any] = [pinned(), HostTier(CAPACITY), DiskTier(str(tmp_path), CAPACITY)]
    wrong: list[Any] = []

    def work(tier: Any, name: int) -> None:
        for step in range(60):
            given = frames(400, 100 * (step % 9), seed=name * 1000 + step)
            key = f"{name}-{step}"
            try:
                tier[key] = given
            except NoRoom:
                continue
            if content(tier[key]) != content(given):
                wrong.append((tier, name, step))
            del tier[key]

    threads = [threading.Thread(target=work, args=(tier, name)) for tier in tiers for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for tier in tiers:
        assert tier.used == 0
