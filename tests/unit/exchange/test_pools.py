"""Create the pools of a worker while other processes take the memory."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpurt.config import ConfigError
from dask_gpurt.device import NoMemoryForPool, Pool
from dask_gpurt.device.pool import PoolLimits
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
