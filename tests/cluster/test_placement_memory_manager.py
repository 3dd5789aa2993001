"""Run Dask's active memory manager with our choices on clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dask_gpurt.memory.ledger import Ledger
from dask_gpurt.memory.tiers import Tier
from tests.helpers.in_process import FILE, all_placed, on_cluster, until

RUNNING: dict[str, Any] = {
    "gpurt.placement.enabled": True,
    "gpurt.placement.always": True,
    "distributed.scheduler.active-memory-manager.start": True,
    "distributed.scheduler.active-memory-manager.interval": "100s",
}


def believed(scheduler: Any, worker: str, *, live: int, disk: int = 0) -> None:
    """Make a scheduler believe permanently that a worker has this much free memory."""
    scheduler.extensions["gpurt"].cluster_memory.forget(worker)
    message = Ledger({**dict.fromkeys(Tier, 0), Tier.DEVICE: live, Tier.DISK: disk}).snapshot()
    scheduler.extensions["gpurt"].memory_changed(worker, **{**message, "began": 1 << 62})


def fallbacks(scheduler: Any) -> dict[str, Any]:
    found: dict[str, Any] = scheduler.extensions["gpurt"].metrics.snapshot()["fallbacks"]
    return {name: known for name, known in found.items() if name.startswith("placement")}


def holders(scheduler: Any, key: str) -> set[str]:
    return {ws.address for ws in scheduler.tasks[key].who_has}


def test_a_worker_that_retires_hands_its_data_to_who_has_room_nearby(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    # The first two workers are on one host, the third is elsewhere.
    file.write_text(FILE.replace("speeds:", "speeds:\n  loopback: {bandwidth: 30 GB/s, latency: 10 us}"))

    @on_cluster(workers=3, processes=True, file=file, **RUNNING)
    async def run(client: Any, scheduler: Any, *nannies: Any) -> None:
        await all_placed(scheduler)
        near, leaves, far = (nanny.worker_address for nanny in nannies)
        data = await client.scatter({f"x{i}": bytes(1000) for i in range(6)}, workers=[leaves])
        more = await client.scatter({"y": bytes(10**6)}, workers=[near])  # Dask picks the least loaded
        believed(scheduler, near, live=4000)
        believed(scheduler, far, live=10**9)
        assert leaves in await client.retire_workers([leaves])
        where = [holders(scheduler, key) for key in data]
        assert where.count({near}) == 4
        assert where.count({far}) == 2
        assert await client.gather([*data.values(), *more.values()]) == [bytes(1000)] * 6 + [bytes(10**6)]
        assert not fallbacks(scheduler)

    run()


def test_a_worker_stays_whose_data_fit_nowhere_else() -> None:
    @on_cluster(workers=2, processes=True, **RUNNING)
    async def run(client: Any, scheduler: Any, *nannies: Any) -> None:
        leaves, other = (nanny.worker_address for nanny in nannies)
        future = await client.scatter(bytes(10**6), workers=[leaves])
        believed(scheduler, other, live=0)
        assert not await client.retire_workers([leaves])
        assert holders(scheduler, future.key) == {leaves}
        believed(scheduler, other, live=0, disk=10**9)
        assert leaves in await client.retire_workers([leaves])
        assert holders(scheduler, future.key) == {other}
        assert not fallbacks(scheduler)

    run()


def test_a_superfluous_replica_leaves_the_full_worker() -> None:
    @on_cluster(workers=2, **RUNNING)
    async def run(client: Any, scheduler: Any, a: Any, b: Any) -> None:
        for full, roomy in ((a, b), (b, a)):
            future = await client.scatter(bytes(10**6), broadcast=True, hash=False)
            await client.scatter(bytes(10**7), workers=[roomy.address])  # Dask drops from the fullest
            believed(scheduler, full.address, live=0, disk=10**9)
            believed(scheduler, roomy.address, live=10**9)
            await client.amm.run_once()
            await until(lambda key=future.key, full=full: key not in full.data)
            assert future.key in roomy.data
        assert not fallbacks(scheduler)

    run()
