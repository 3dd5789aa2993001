"""Have the shards of a worker that is about to leave copied by their owners."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dask_gpurt.exchange.incoming import ShardState
from tests.helpers.exchanges import A, B, Cluster, held_back, intercept, never_answering, on_exchanges, quiet


async def transferred(cluster: Cluster) -> Any:
    """Return the run of a worker that has transferred an input, and is about to leave."""
    cluster.begin()
    await cluster.transfer("a shuffle", 0, cluster.a)
    return cluster.a.run_of("a shuffle")


@on_exchanges()
async def test_a_worker_is_evacuated_and_leaves(cluster: Cluster) -> None:
    """Its outputs have moved, of which it has yet to hear; it is needed for nothing any more."""
    results = await cluster.transfer_all()
    a, b = cluster.workers
    run: Any = a.run_of("a shuffle")
    active = cluster.scheduler.active["a shuffle"]
    cluster.scheduler.balance("a shuffle", active.owners, B)
    assert await run.evacuate(active.owners.epoch) == 0
    assert {shard.state for shard in b.exchange._incoming[a.exchange.me]} == {ShardState.LANDED}
    a.die()
    a.close()
    cluster.scheduler.leaves(A, results_survive=True)
    await cluster.hear()
    await cluster.barrier("a shuffle", results)
    assert await cluster.outputs() == cluster.expected()
    assert b.counted("shuffle.inputs.missing") == 0
    await cluster.end()


@on_exchanges()
async def test_a_worker_is_evacuated_as_soon_as_the_last_release_arrives(cluster: Cluster) -> None:
    arrives = held_back(cluster, "gpurt_release")
    run = await transferred(cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_gpurt.exchange.requests.ROOM_RETRY_INTERVAL_S", 3600.0)
        patch.setattr("dask_gpurt.shuffle.run.EVACUATION_STEP_S", 3600.0)
        evacuating = asyncio.ensure_future(run.evacuate(0))
        while not cluster.b.exchange.requests._released:
            await asyncio.sleep(0.001)
        await quiet()
        assert not evacuating.done()
        arrives.set()
        assert await evacuating == 0


@on_exchanges()
async def test_a_worker_is_evacuated_whose_offers_have_not_arrived(cluster: Cluster) -> None:
    """Their owner copies them once they have, although they are offered after it was asked."""
    arrives = held_back(cluster, "shuffle_receive")
    run = await transferred(cluster)
    evacuating = asyncio.ensure_future(run.evacuate(0))
    await quiet()
    assert not evacuating.done()
    arrives.set()
    assert await evacuating == 0


@on_exchanges()
async def test_a_worker_is_evacuated_whose_inputs_have_no_rows_for_an_owner(cluster: Cluster) -> None:
    """There is no shard to copy, but the owner has to learn so before the worker leaves."""
    arrives, commits = asyncio.Event(), list[bytes]()

    async def hold_back(handle: Any, address: str, op: str, content: dict[str, Any]) -> Any:
        if op == "shuffle_receive":
            await arrives.wait()
            commits.append(content["data"])
        return await handle(address, op, content)

    intercept(cluster, hold_back)
    owners = cluster.begin().owners
    cluster.rows = lambda source: [row for row in range(40) if owners[row % cluster.OUTPUTS] == A]  # type: ignore
    await cluster.transfer("a shuffle", 0, cluster.a)
    run: Any = cluster.a.run_of("a shuffle")
    evacuating = asyncio.ensure_future(run.evacuate(0))
    await quiet()
    assert not evacuating.done()
    arrives.set()
    assert await evacuating == 0
    assert [b"Commit" in data for data in commits] == [True]


@on_exchanges()
async def test_a_run_fails_while_its_worker_is_evacuated(cluster: Cluster) -> None:
    """Its shards are withdrawn, not copied: the worker is still needed."""
    run = await transferred(cluster)
    called = never_answering(cluster, "gpurt_drain", B)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_gpurt.shuffle.run.EVACUATION_STEP_S", 0.01)
        evacuating = asyncio.ensure_future(run.evacuate(0))
        await called.wait()
        run.fail(MemoryError("no memory"))
        assert await evacuating is None


@on_exchanges()
async def test_owners_do_not_copy_the_shards_of_a_worker_that_is_evacuated(cluster: Cluster) -> None:
    run = await transferred(cluster)
    called = never_answering(cluster, "gpurt_drain", B)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_gpurt.shuffle.run.EVACUATION_STEP_S", 0.01)
        assert await run.evacuate(0) == 1
    assert called.is_set()
