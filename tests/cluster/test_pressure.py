"""Spill data in a worker's tiers when Dask's memory monitor finds the process too large."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from distributed.spill import ManualEvictProto

import dask_gpurt
from dask_gpurt.device.host import HostDevice
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
