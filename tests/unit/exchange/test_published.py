"""Keep published blocks as long as they may be read again, and no longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dask_gpurt.config import Size
from dask_gpurt.device.host import HostPool
from dask_gpurt.exchange.outgoing import Outbox, PoolHooks
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.observe import Metrics

KIB, MIB = 2**10, 2**20
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
