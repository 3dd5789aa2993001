"""Report everything that waits on a worker."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.common.waiting import waiting
from dask_gpurt.config import Size
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.observe import Metrics

RUN = ("a shuffle", 1)


def test_published_shards_count_for_each_owner_that_may_read_them() -> None:
    pools = Pools(Size(2**20), 2**30, Metrics())
    try:
        outbox = pools.outbox("host")
        blocks = [outbox.allocate(2**10) for _ in range(2)]
        shards = [outbox.publish(RUN, 0, "one", [block]) for block in blocks]
        outbox.publish_again(shards[:1], 1, "two")
        told = waiting(SimpleNamespace(exchange=SimpleNamespace(pools=pools)))
        assert "0 producers wait for room, 2048 B of 1048576 used" in told["room"]
        assert "released by {'one': 2, 'two': 1}, of {'a shuffle[1]': 2}" in told["room"]
    finally:
        pools.close()
