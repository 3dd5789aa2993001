"""Report links to the scheduler on clusters whose workers join and leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Worker

import dask_gpurt
from dask_gpurt.exchange.paths import Traffic
from dask_gpurt.observe import Metrics
from dask_gpurt.scheduler.reports import SchedulerTopology
from dask_gpurt.topology import SHIPPED, Link, Place, hosts
from dask_gpurt.topology.hosts import Host
from dask_gpurt.worker.reports import TopologyReporter
from tests.helpers.in_process import all_placed, on_cluster, placed_apart, topology, until

# ---- places --------------------------------------------------------------------------


@on_cluster(workers=3)
async def test_workers_say_where_they_are_and_what_the_host_has(
    client: Any, scheduler: Any, a: Any, b: Any, c: Any
) -> None:
    await all_placed(scheduler)
    here = topology(scheduler).place(a.address)
    assert here is not None
    assert here.host == hosts.here()
    assert topology(scheduler).link(a.address, b.address) == Link.SHARED_MEMORY


@on_cluster(workers=2)
async def test_workers_come_and_go(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    await all_placed(scheduler)
    async with Worker(scheduler.address, nthreads=1) as late:
        await all_placed(scheduler)
        place = topology(scheduler).place(a.address)
        assert place is not None
        assert late.address in topology(scheduler).on_host(place.host)
    await until(lambda: late.address not in scheduler.workers)
    assert topology(scheduler).place(late.address) is None
    for worker in (a, b):
        await worker.close()
    await until(lambda: not scheduler.workers)
    assert list(topology(scheduler).hosts) == []


def test_where_nvml_fails_there_is_still_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr("dask_gpurt.worker.reports.discover", fails)

    @on_cluster()
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        await all_placed(scheduler)
        assert topology(scheduler).link(a.address, b.address) == Link.SHARED_MEMORY
        report = await dask_gpurt.report(client)
        fallbacks = report["workers"][a.address]["fallbacks"]
        assert "GPU is lost" in fallbacks["topology.links-unknown"]["reason"]

    run()


@on_cluster(workers=2, processes=True)
async def test_restart_keeps_what_was_learned(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    await all_placed(scheduler)
    before = set(scheduler.workers)
    topology(scheduler).observe("tcp://one", "tcp://other", 10**9, 10.0)
    learned = topology(scheduler).learned()
    assert learned[Link.TCP] != SHIPPED[Link.TCP]
    await client.restart()
    await until(lambda: len(scheduler.workers) == 2 and not before & set(scheduler.workers))
    await all_placed(scheduler)
    assert topology(scheduler).learned() == learned
    assert all(topology(scheduler).place(worker) is None for worker in before)
    assert topology(scheduler).link(*scheduler.workers) == Link.SHARED_MEMORY


def test_a_gpu_that_nvml_does_not_know_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpurt.worker.reports.discover", Host)
    metrics = Metrics()
    worker = SimpleNamespace(address="tcp://here:1")
    assert TopologyReporter(worker, Traffic(), True, metrics)._detect_place().device is None
    assert "topology.gpu-unknown" in metrics.snapshot()["fallbacks"]


# ---- transfers -----------------------------------------------------------------------


@on_cluster(workers=3)
async def test_dependencies_that_dask_fetches_teach_the_link(
    client: Any, scheduler: Any, a: Any, b: Any, c: Any
) -> None:
    await placed_apart(scheduler, a, b, c)
    before = topology(scheduler).learned()
    block = client.submit(np.ones, 30_000_000 // 8, workers=[a.address])
    await client.submit(np.sum, block, workers=[c.address])
    await until(lambda: topology(scheduler).learned()[Link.TCP] != before[Link.TCP])
    # Between the GPUs of a and b comms use another path than the link between them.
    await client.submit(np.max, block, workers=[b.address])
    # Fetches of b from c are reported later, or at the same time.
    tcp = topology(scheduler).learned()[Link.TCP]
    other = client.submit(np.zeros, 30_000_000 // 8, workers=[c.address])
    await client.submit(np.min, other, workers=[b.address])
    await until(lambda: topology(scheduler).learned()[Link.TCP] != tcp)
    assert topology(scheduler).learned()[Link.NVLINK] == before[Link.NVLINK]


def test_only_bytes_that_crossed_the_link_count() -> None:
    class Scheduler:
        workers: dict[str, Any] = {}

    picture = SchedulerTopology(Scheduler())
    picture.traffic("x", [("y", "comms", 10**9, 100.0, 1)])  # their places are unknown
    for worker in "xy":
        picture.topology.add(worker, Place(f"host of {worker}"))
    picture.traffic("x", [("y", "shared-memory", 10**9, 100.0, 1), ("y", "unheard-of", 10**9, 100.0, 1)])
    assert picture.topology.learned() == dict(SHIPPED)
    picture.traffic("x", [("y", "comms", 10**9, 100.0, 1)])
    assert picture.topology.learned()[Link.TCP].bandwidth < 0.1 * SHIPPED[Link.TCP].bandwidth


@on_cluster(workers=2)
async def test_workers_say_that_their_comms_are_tcp(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    await all_placed(scheduler)
    assert topology(scheduler).link(a.address, b.address) == Link.SHARED_MEMORY
    assert topology(scheduler).link(a.address, b.address, by_comms=True) == Link.LOOPBACK


def test_a_copy_that_fails_is_not_counted() -> None:
    def fails(_: Any) -> list[Any]:
        raise MemoryError

    traffic = Traffic()
    with pytest.raises(MemoryError):
        traffic.timed("peer", "cuda-ipc", fails, 1)([])
    assert traffic.timed("peer", "cuda-ipc", list, 7)([1]) == [1]
    (seen,) = traffic.take()
    assert (seen.nbytes, seen.transfers) == (7, 1)
