"""Create pools while other processes take the memory; keep blocks while they may be read, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dask_gpurt.config import ConfigError, Size
from dask_gpurt.device import NoMemoryForPool, Pool
from dask_gpurt.device.host import HostPool
from dask_gpurt.device.pool import PoolLimits
from dask_gpurt.exchange.outgoing import Outbox, PoolHooks
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.observe import Metrics

MIB = 2**20


class Crowded:
    """Lose half of the free memory of a device to others, each time that a pool is created."""

    def __init__(self, device: Any, times: int, monkeypatch: pytest.MonkeyPatch):
        self.free, self._times = 64 * MIB, times
        self.asked: list[int] = []
        self._create = device.create_pool
        monkeypatch.setattr(device, "pool_limits", self.limits)
        monkeypatch.setattr(device, "create_pool", self.create_pool)

    def limits(self) -> PoolLimits:
        return PoolLimits(self.free, self.free * 0.75, self.free, self.free, 64 * MIB, "the device")

    def create_pool(self, nbytes: int) -> Pool:
        self.asked.append(nbytes)
        if len(self.asked) <= self._times:
            self.free //= 2
        if nbytes > self.free:
            raise NoMemoryForPool(nbytes)
        pool: Pool = self._create(nbytes)
        return pool


def test_the_size_is_determined_again_if_others_take_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(None, 2**30, Metrics())
    crowded = Crowded(pools.device("host"), 2, monkeypatch)
    assert pools.outbox("host").pool.capacity >= 12 * MIB
    assert crowded.asked == [48 * MIB, 24 * MIB, 12 * MIB]
    pools.close()


def test_an_error_says_what_to_do_if_others_go_on_taking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(None, 2**30, Metrics())
    crowded = Crowded(pools.device("host"), 100, monkeypatch)
    with pytest.raises(
        ConfigError, match=r"no memory for a pool of 6.00 MiB.* set 'gpurt.exchange.pool' to less"
    ):
        pools.outbox("host")
    assert len(crowded.asked) == 4
    pools.close()


# ---- published blocks are kept as long as they may be read again, and no longer ----------------------

KIB = 2**10
RUN = ("a shuffle", 1)
OWNER, OTHER = "tcp://owner", "tcp://other"


class FixedPool(HostPool):
    """Allocate blocks from memory that cannot be returned to the system, such as a GPU's."""

    shrinks = False

    def trim(self) -> None:
        raise AssertionError("it has nothing to trim")


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools(Size(MIB), 2**30, Metrics())
    yield pools
    pools.close()


def outbox_of(pool: HostPool) -> Outbox:
    return Outbox(pool, PoolHooks(retains=lambda run: True), Metrics())


def read(outbox: Outbox) -> int:
    """Publish a shard, and have its owner read it; return its id."""
    shard = outbox.publish(RUN, 0, OWNER, [outbox.allocate(4 * KIB)])
    outbox.release([(shard, 0)])
    return shard


@pytest.mark.parametrize(("kind", "retained"), [(FixedPool, True), (HostPool, False)])
@pytest.mark.parametrize("event", ["the host is short of memory", "nothing happens for a while"])
def test_read_shards_are_freed_only_if_that_returns_memory(
    pools: Pools, kind: type[HostPool], retained: bool, event: str
) -> None:
    outbox = outbox_of(kind(MIB))
    shard = read(outbox)
    pools._outboxes["other"] = outbox
    if event == "the host is short of memory":
        pools.trim_host()
    else:
        pools.trim_idle()
        pools.trim_idle()
    assert outbox.has_all(RUN) == retained
    assert outbox.publish_again([shard], 1, OTHER) == retained


def test_read_shards_of_a_fixed_pool_are_freed_for_others() -> None:
    outbox = outbox_of(FixedPool(8 * KIB))
    read(outbox)
    outbox.allocate(8 * KIB)
    assert not outbox.has_all(RUN)


def test_a_producer_that_waits_gets_the_room_of_a_block_that_was_lent() -> None:
    asked: list[set[str]] = []
    outbox = Outbox(FixedPool(8 * KIB), PoolHooks(ask_for_room=asked.append), Metrics())
    lent = outbox.allocate(8 * KIB)
    seen = outbox.room.wakes
    outbox.take_back(lent)
    # It has freed a block since the producer's attempt, so that the producer does not wait.
    outbox.wait_for_room(8 * KIB, seen, lambda: None)
    assert asked == []
    outbox.allocate(8 * KIB)


def test_what_a_share_may_read_goes_with_it() -> None:
    outbox = outbox_of(HostPool(MIB))
    outbox.publish(RUN, 7, OWNER, [outbox.allocate(4 * KIB)])
    assert outbox.readings() == [(RUN, 0, 7, OWNER)]
    outbox.drop_shares(RUN, {7})
    assert outbox.readings() == []
    assert outbox.retained == outbox.pool.used == 4 * KIB
