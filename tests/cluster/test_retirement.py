"""Retire workers, and grow and shrink clusters, in the middle of a shuffle: what was handed on stays done.

Scheduler, workers and client share a process, and a gate stops a step of a run until the event has happened.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from dask import config
from distributed import Client, LocalCluster, wait
from distributed.core import Status

import dask_gpurt
from dask_gpurt.client.session import register_method
from dask_gpurt.exchange.comms import Puller
from dask_gpurt.scheduler.recovery import Recovery
from dask_gpurt.scheduler.unresponsive import Retirement
from dask_gpurt.shuffle import run as shuffle_run
from dask_gpurt.shuffle.receiver import Receiver
from tests.helpers.gated_runs import (
    ONE_EACH,
    Gated,
    Watched,
    address_of,
    assert_right,
    nothing_is_left,
    on_gated_cluster,
    open_gates,
    shuffled,
    until,
)
from tests.helpers.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("patient")

# ---- a worker retires ----------------------------------------------------------------


def assert_evacuated(run: Gated, watched: Watched, worker: Any) -> None:
    """Assert that a worker that has retired left nothing to do again."""
    assert worker.address not in run.scheduler.workers
    assert watched.transferred_by(worker.address), "otherwise this would show nothing"
    assert not watched.transferred_since()
    assert watched.moved() <= watched.owned(worker.address)
    assert not run.counted("shuffle.runs.recovered"), "nothing was lost"
    assert not run.counted("shuffle.runs.restarted")


@pytest.mark.parametrize("phase", ["transfer", "seal", "unpack"])
@on_gated_cluster(workers=3, **ONE_EACH, **{"gpurt.exchange.paths": ["shared-memory"]})
async def test_a_producer_retires(run: Gated, phase: str) -> None:
    """The owners copy its shards before it leaves: nothing is transferred or assembled again."""
    await run.stop(phase)
    retires, _ = run.others
    await run.client.retire_workers([retires.address])
    await run.ends_right()
    assert_evacuated(run, run.watched, retires)
    assert run.watched.moved() == run.watched.owned(retires.address)
    assert retires.address not in run.watched.owners.values()
    if phase == "unpack":
        assert not run.watched.assembled_since()
    await retires.finished()


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_an_owner_retires_that_is_assembling_an_output(run: Gated) -> None:
    """Its unfinished outputs move to others; its inputs are not transferred again."""
    await run.stop("unpack")
    retires, watched = run.at_gate, run.watched
    await run.client.retire_workers([retires.address])
    await run.result_at_gate()
    assert_evacuated(run, watched, retires)
    assert watched.moved() == watched.assembled_since() == watched.owned(retires.address)
    await run.ends_right()
    await retires.finished()


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_a_worker_retires_while_all_assemble_outputs(run: Gated) -> None:
    """Its outputs move only when those of the others are there, and until then it is not evacuated."""
    assemble, is_repair_pending, ask = Receiver.assemble, Recovery.is_repair_pending, Retirement._ask
    begun, go_on, too_early = set[str](), threading.Event(), list[bool]()

    def stops(self: Receiver, *args: Any) -> Any:
        begun.add(address_of(self))
        assert go_on.wait(LIMIT_S)
        return assemble(self, *args)

    def goes_on_then(self: Recovery, shuffles: Any) -> bool:
        if found := is_repair_pending(self, shuffles):
            go_on.set()
        return found

    async def notes(self: Retirement, *args: Any) -> Any:
        too_early.append(not go_on.is_set())
        go_on.set()
        return await ask(self, *args)

    run.monkeypatch.setattr(Receiver, "assemble", stops)
    run.monkeypatch.setattr(Recovery, "is_repair_pending", goes_on_then)
    run.monkeypatch.setattr(Retirement, "_ask", notes)
    kept = run.client.persist(shuffled())
    await until(lambda: len(begun) == len(run.crew))
    watched = Watched(run.scheduler)
    retires = max(run.crew, key=lambda worker: len(watched.owned(worker.address)))
    await run.client.retire_workers([retires.address])
    assert_right(await run.client.compute(kept))
    assert_evacuated(run, watched, retires)
    assert not any(too_early)
    await retires.finished()
    del kept


@on_gated_cluster(workers=3)
async def test_both_sides_of_a_join_lose_a_worker_that_retires(run: Gated) -> None:
    left, right = await run.stop_join("seal")
    transfers = [run.scheduler.tasks[key] for key in left.transfers | right.transfers]
    await until(lambda: all(task.state == "memory" for task in transfers))
    left.begin()
    right.begin()
    retires, _ = run.others
    await run.client.retire_workers([retires.address])
    await run.join_ends_right()
    for side in left, right:
        assert_evacuated(run, side, retires)
    assert dict(left.owners) == dict(right.owners)
    await retires.finished()


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_owners_do_not_copy_what_a_worker_that_retires_has(run: Gated) -> None:
    """It leaves as soon as no progress is made, and its inputs are transferred again."""
    run.monkeypatch.setattr(Puller, "pull_soon", lambda self, incoming: False)
    run.monkeypatch.setattr(shuffle_run, "EVACUATION_STEP_S", 0.05)
    await run.stop("seal")
    retires, _ = run.others
    await run.client.retire_workers([retires.address])
    assert retires.address not in run.scheduler.workers
    await run.ends_right()
    assert run.watched.transferred_since() == run.watched.transferred_by(retires.address)
    run.assert_repaired_once()
    await retires.finished()


@on_gated_cluster(workers=1)
async def test_the_only_worker_is_to_retire(run: Gated) -> None:
    """Dask keeps it, since nothing could take its data, and it keeps its outputs."""
    await run.stop("seal")
    assert not await run.client.retire_workers([run.at_gate.address])
    await run.ends_right()
    assert not run.watched.moved()
    assert not run.watched.transferred_since()


@on_gated_cluster()
async def test_a_run_begins_while_a_worker_retires(run: Gated) -> None:
    """It gets no outputs, which would have to move at once."""
    retires, stays = run.crew
    state = run.scheduler.workers[retires.address]
    run.scheduler.handle_worker_status_change(Status.closing_gracefully, state, "a-worker-retires")
    kept = run.client.persist(shuffled())
    await wait(kept)
    assert set(Watched(run.scheduler).owners.values()) == {stays.address}
    run.scheduler.handle_worker_status_change(Status.running, state, "it stays")
    del kept


IN_PROCESS: dict[str, Any] = {
    "asynchronous": True,
    "dashboard_address": ":0",
    "processes": False,
    "threads_per_worker": 1,
}


@pytest.mark.parametrize("how", ["scale", "adapt"])
def test_a_cluster_grows_and_shrinks_in_the_middle(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Workers that join assemble outputs; some leave before the end, and others after it."""

    def resize(cluster: Any, workers: int) -> None:
        if how == "scale":
            cluster.scale(workers)
        else:
            cluster.adapt(minimum=workers, maximum=workers, interval="20ms", wait_count=1)

    async def test(client: Any, cluster: Any) -> None:
        await dask_gpurt.enable(client)
        run = Gated(client, cluster.scheduler, (), monkeypatch)
        await run.stop("seal", client.persist)
        workers, owners = run.scheduler.workers, run.watched.owners
        first = set(workers)
        resize(cluster, 4)
        await until(lambda: len(set(owners.values()) - first) == 2)
        resize(cluster, 3)
        if how == "scale":  # adaptive scaling keeps the workers that take part
            await until(lambda: len(workers) == 3 and set(owners.values()) <= set(workers))
        kept = run.released()
        await wait(kept)
        resize(cluster, 1)
        await until(lambda: len(workers) == 1)
        assert_right(await client.compute(kept))
        assert not run.counted("shuffle.runs.restarted")
        del kept
        await nothing_is_left(run.scheduler, *cluster.workers.values())

    async def body() -> None:
        async with (
            LocalCluster(**IN_PROCESS, n_workers=2) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            try:
                await asyncio.wait_for(test(client, cluster), LIMIT_S)
            finally:
                open_gates()

    register_method()
    with config.set(ONE_EACH):
        asyncio.run(body())
