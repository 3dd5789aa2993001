"""Run a worker with a fake GPU that shares the host's memory: no byte counts twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dask_gpurt
from dask_gpurt.device import discover
from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange import pools
from dask_gpurt.memory.ledger import Tier
from dask_gpurt.observe import Fallback
from tests.helpers.fake_nvml import FakeGpu, FakeNvml
from tests.helpers.far_device import Integrated
from tests.helpers.in_process import gen_client_cluster

#: Size of the shared memory, and of an array of which eight exceed the device tier.
MEMORY, ARRAY = 64 << 20, 8 << 20


@pytest.fixture(autouse=True)
def _integrated(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"host": HostDevice(MEMORY), "accelerator": Integrated(MEMORY)}
    monkeypatch.setattr(pools, "discover", lambda memory_limit: devices)


# The RSS of this process is above the limit, which must not affect the tiers.
@gen_client_cluster(
    nthreads=[("127.0.0.1", 1)],
    worker_kwargs={"memory_limit": MEMORY},
    config={"distributed.worker.memory.pause": False, "distributed.worker.memory.spill": False},
)
async def test_an_integrated_gpu(client: Any, scheduler: Any, worker: Any) -> None:
    await dask_gpurt.enable(client)
    try:
        arrays = client.map(lambda number: np.full(ARRAY, number, np.uint8), range(8))
        words = client.submit(lambda: "on the host")
        await client.gather([client.submit(np.sum, array) for array in arrays] + [words])
        ledger = worker.plugins["gpurt"].tiers.ledger
        used = {tier: ledger.used(tier) for tier in Tier}
        assert sum(ledger.capacity[tier] for tier in Tier if tier is not Tier.DISK) <= MEMORY
        assert sum(used.values()) < 8.5 * ARRAY
        # Excess data go straight to disk: a copy in the same memory would free nothing.
        assert used[Tier.DISK] >= 8 * ARRAY - ledger.capacity[Tier.DEVICE]
        assert used[Tier.PINNED] == 0
        assert 0 < used[Tier.HOST] < ARRAY
    finally:
        await dask_gpurt.disable(client)


class LostGpu(FakeNvml):
    """Fail for a GPU of the host, which need not be that of the worker."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        raise self.NVMLError("GPU is lost")


@gen_client_cluster(
    nthreads=[("127.0.0.1", 1)],
    worker_kwargs={"memory_limit": MEMORY},
    config={"distributed.worker.memory.pause": False, "distributed.worker.memory.spill": False},
)
async def test_the_runtime_is_on_where_nvml_fails(client: Any, scheduler: Any, worker: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discover, "gpu_library", lambda: LostGpu([FakeGpu(0)]))
        await dask_gpurt.enable(client)
    try:
        plugin = worker.plugins["gpurt"]
        assert plugin.tiers.memory_limit == MEMORY
        assert Fallback.MEMORY_GPU_NODES_UNKNOWN.id in plugin.metrics.fallbacks()
    finally:
        await dask_gpurt.disable(client)
