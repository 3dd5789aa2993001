"""Spill data when Dask's monitor finds the process too large, and where a GPU shares the host's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import pytest
from distributed.spill import ManualEvictProto

import dask_gpurt
from dask_gpurt.device import discover
from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange import pools
from dask_gpurt.memory.ledger import Tier
from dask_gpurt.observe import Fallback
from tests.helpers.fake_nvml import FakeGpu, FakeNvml
from tests.helpers.far_device import Integrated
from tests.helpers.in_process import gen_client_cluster, on_cluster, until

BYTES = 2**20
#: The limit is below this process's current size. Tasks must not be paused because of it.
MEMORY = {
    "distributed.worker.memory.spill": 0.9,
    "distributed.worker.memory.target": 0.8,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.monitor-interval": "20ms",
}


@pytest.mark.parametrize("spill", [0.9, False])
def test_the_monitor_of_dask_has_data_spilled(spill: float | bool) -> None:
    limit = psutil.Process().memory_info().rss

    @gen_client_cluster(
        nthreads=[("127.0.0.1", 1)],
        config={**MEMORY, "distributed.worker.memory.spill": spill},
        worker_kwargs={"memory_limit": limit},
    )
    async def run(client: Any, scheduler: Any, a: Any) -> None:
        await dask_gpurt.enable(client)
        data: ManualEvictProto = a.data
        assert data.fast
        kept = await client.scatter({"data": bytes(BYTES)})
        key = kept["data"].key
        if spill:
            await until(lambda: a.data.not_live([key]) == [key])
        else:
            await a.memory_manager.memory_monitor(a)
            assert a.data.not_live([key]) == []
        assert a.data[key] == bytes(BYTES)
        await dask_gpurt.disable(client)

    run()


def test_the_allocator_is_guarded_again_until_the_runtime_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library may replace it, as an engine of cudf-polars does when it starts."""
    called = []

    class Recording:
        def renew(self) -> None:
            called.append("renew")

        def remove(self) -> None:
            called.append("remove")

    monkeypatch.setattr(HostDevice, "guard", lambda self, short: Recording(), raising=False)
    for counted in ("peak", "allocated"):
        monkeypatch.setattr(HostDevice, counted, lambda self: 0, raising=False)

    @on_cluster(workers=1)
    async def run(client: Any, scheduler: Any, a: Any) -> None:
        await until(lambda: called.count("renew") >= 2)
        await dask_gpurt.disable(client)
        assert called[-1] == "remove"
        assert called.count("remove") == 1
        await dask_gpurt.enable(client)

    run()


# ---- a fake GPU that shares the host's memory: no byte counts twice ----------------------------------

#: Size of the shared memory, and of an array of which eight exceed the device tier.
SHARED, ARRAY = 64 << 20, 8 << 20


@pytest.fixture
def _integrated(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"host": HostDevice(SHARED), "accelerator": Integrated(SHARED)}
    monkeypatch.setattr(pools, "discover", lambda memory_limit: devices)


@pytest.mark.usefixtures("_integrated")
# The RSS of this process is above the limit, which must not affect the tiers.
@gen_client_cluster(
    nthreads=[("127.0.0.1", 1)],
    worker_kwargs={"memory_limit": SHARED},
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
        assert sum(ledger.capacity[tier] for tier in Tier if tier is not Tier.DISK) <= SHARED
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


@pytest.mark.usefixtures("_integrated")
@gen_client_cluster(
    nthreads=[("127.0.0.1", 1)],
    worker_kwargs={"memory_limit": SHARED},
    config={"distributed.worker.memory.pause": False, "distributed.worker.memory.spill": False},
)
async def test_the_runtime_is_on_where_nvml_fails(client: Any, scheduler: Any, worker: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discover, "gpu_library", lambda: LostGpu([FakeGpu(0)]))
        await dask_gpurt.enable(client)
    try:
        plugin = worker.plugins["gpurt"]
        assert plugin.tiers.memory_limit == SHARED
        assert Fallback.MEMORY_GPU_NODES_UNKNOWN.id in plugin.metrics.fallbacks()
    finally:
        await dask_gpurt.disable(client)
