"""Report transfers of workers to the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dask_gpurt.exchange.paths import Traffic
from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.dashboard.sampler import MAX_ENDS
from tests.helpers.in_process import on_cluster, until


@on_cluster(workers=2)
async def test_dependencies_that_dask_fetches_are_reported(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    seen: list[tuple[str, Any]] = []
    scheduler.extensions["gpurt"].traffic_listeners.append(
        lambda worker, totals: seen.append((worker, totals))
    )
    block = client.submit(np.ones, 30_000_000 // 8, workers=[a.address])
    await client.submit(np.sum, block, workers=[b.address])
    await until(lambda: bool(seen))
    (worker, ((peer, path, nbytes, seconds),)) = seen[0]
    assert (worker, peer, path) == (b.address, a.address, "comms")
    assert nbytes >= 30_000_000
    assert seconds > 0


@pytest.mark.parametrize(("workers", "end"), [(MAX_ENDS, "tcp://b:1"), (MAX_ENDS + 1, "host b")])
def test_of_many_workers_the_hosts_are_shown(workers: int, end: str) -> None:
    known = {f"tcp://w:{number}": SimpleNamespace(host="w") for number in range(workers - 1)}
    known["tcp://b:1"] = SimpleNamespace(host="b")
    runtime: Any = SimpleNamespace(scheduler=SimpleNamespace(workers=known))
    collector = Collector(runtime)
    collector.take_traffic("tcp://b:1", [("tcp://gone:1", "comms", 7, 0.1)])
    assert list(collector.sampler.traffic.flows) == [("tcp://gone:1", end)]


def test_a_copy_that_fails_is_not_counted() -> None:
    def fails(_: Any) -> list[Any]:
        raise MemoryError

    traffic = Traffic()
    with pytest.raises(MemoryError):
        traffic.timed("peer", "cuda-ipc", fails, 1)([])
    assert traffic.timed("peer", "cuda-ipc", list, 7)([1]) == [1]
    (seen,) = traffic.take()
    assert seen[:3] == ("peer", "cuda-ipc", 7)
