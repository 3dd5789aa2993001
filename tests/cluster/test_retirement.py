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
    FRAME,
    Watched,
    address_of,
    assert_right,
    counted,
    gate,
    nothing_is_left,
    on_gated_cluster,
    open_gates,
    shuffled,
    until,
)
from tests.helpers.recovering import (
    IN_PROCESS,
    ONE_EACH,
    assert_repaired_once,
    both_sides_in,
    joined,
    others,
    stopped_in,
)
from tests.helpers.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("patient")

# ---- a worker retires ----------------------------------------------------------------


def assert_evacuated(scheduler: Any, watched: Watched, worker: Any) -> None:
    """Assert that a worker that has retired left nothing to do again."""
    assert worker.address not in scheduler.workers
    assert watched.transferred_by(worker.address), "otherwise this would show nothing"
    assert not watched.transferred_since()
    assert watched.moved() <= watched.owned(worker.address)
    assert not counted(scheduler, "shuffle.runs.recovered"), "nothing was lost"
    assert not counted(scheduler, "shuffle.runs.restarted")


@pytest.mark.parametrize("phase", ["transfer", "seal", "unpack"])
@on_gated_cluster(workers=3, **ONE_EACH, **{"gpurt.exchange.paths": ["shared-memory"]})
async def test_a_producer_retires(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The owners copy its shards before it leaves: nothing is transferred or assembled again."""
    stopped = gate(monkeypatch, phase)
    result = client.compute(shuffled())
    watched = await stopped_in(phase, stopped, scheduler)
    retires, _ = others(crew, stopped)
    await client.retire_workers([retires.address])
    stopped.open.set()
    assert_right(await result)
    assert_evacuated(scheduler, watched, retires)
    assert watched.moved() == watched.owned(retires.address)
    assert retires.address not in watched.owners.values()
    if phase == "unpack":
        assert not watched.assembled_since()
    await retires.finished()
    del result


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_an_owner_retires_that_is_assembling_an_output(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unfinished outputs move to others; its inputs are not transferred again."""
    stopped = gate(monkeypatch, "unpack")
    result = client.compute(shuffled())
    watched = await stopped_in("unpack", stopped, scheduler)
    (retires,) = (worker for worker in crew if worker.address == stopped.where[0])
    await client.retire_workers([retires.address])
    assert_right(await result)
    assert_evacuated(scheduler, watched, retires)
    assert watched.moved() == watched.assembled_since() == watched.owned(retires.address)
    stopped.open.set()
    await retires.finished()
    del result


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_a_worker_retires_while_all_assemble_outputs(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    monkeypatch.setattr(Receiver, "assemble", stops)
    monkeypatch.setattr(Recovery, "is_repair_pending", goes_on_then)
    monkeypatch.setattr(Retirement, "_ask", notes)
    kept = client.persist(shuffled())
    await until(lambda: len(begun) == len(crew))
    watched = Watched(scheduler)
    retires = max(crew, key=lambda worker: len(watched.owned(worker.address)))
    await client.retire_workers([retires.address])
    assert_right(await client.compute(kept))
    assert_evacuated(scheduler, watched, retires)
    assert not any(too_early)
    await retires.finished()
    del kept


@on_gated_cluster(workers=3)
async def test_both_sides_of_a_join_lose_a_worker_that_retires(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = gate(monkeypatch, "seal")
    result = joined(client)
    left, right = await both_sides_in(stopped, scheduler)
    await until(
        lambda: all(scheduler.tasks[key].state == "memory" for key in left.transfers | right.transfers)
    )
    left.begin()
    right.begin()
    retires, _ = others(crew, stopped)
    await client.retire_workers([retires.address])
    stopped.open.set()
    assert len(await result) == len(FRAME.merge(FRAME, on="key"))
    for side in left, right:
        assert_evacuated(scheduler, side, retires)
    assert dict(left.owners) == dict(right.owners)
    await retires.finished()
    del result


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_owners_do_not_copy_what_a_worker_that_retires_has(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves as soon as no progress is made, and its inputs are transferred again."""
    stopped = gate(monkeypatch, "seal")
    monkeypatch.setattr(Puller, "pull_soon", lambda self, incoming: False)
    monkeypatch.setattr(shuffle_run, "EVACUATION_STEP_S", 0.05)
    result = client.compute(shuffled())
    watched = await stopped_in("seal", stopped, scheduler)
    retires, _ = others(crew, stopped)
    await client.retire_workers([retires.address])
    assert retires.address not in scheduler.workers
    stopped.open.set()
    assert_right(await result)
    assert watched.transferred_since() == watched.transferred_by(retires.address)
    assert_repaired_once(scheduler)
    await retires.finished()
    del result


@on_gated_cluster(workers=1)
async def test_the_only_worker_is_to_retire(
    client: Any, scheduler: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask keeps it, since nothing could take its data, and it keeps its outputs."""
    stopped = gate(monkeypatch, "seal")
    result = client.compute(shuffled())
    watched = await stopped_in("seal", stopped, scheduler)
    assert not await client.retire_workers([worker.address])
    stopped.open.set()
    assert_right(await result)
    assert not watched.moved()
    assert not watched.transferred_since()
    del result


@on_gated_cluster()
async def test_a_run_begins_while_a_worker_retires(client: Any, scheduler: Any, *crew: Any) -> None:
    """It gets no outputs, which would have to move at once."""
    state = scheduler.workers[crew[0].address]
    scheduler.handle_worker_status_change(Status.closing_gracefully, state, "a-worker-retires")
    kept = client.persist(shuffled())
    await wait(kept)
    assert set(Watched(scheduler).owners.values()) == {crew[1].address}
    scheduler.handle_worker_status_change(Status.running, state, "it stays")
    del kept


@pytest.mark.parametrize("how", ["scale", "adapt"])
def test_a_cluster_grows_and_shrinks_in_the_middle(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Workers that join assemble outputs; some leave before the end, and others after it."""
    stopped = gate(monkeypatch, "seal")

    def resize(cluster: Any, workers: int) -> None:
        if how == "scale":
            cluster.scale(workers)
        else:
            cluster.adapt(minimum=workers, maximum=workers, interval="20ms", wait_count=1)

    async def test(client: Any, cluster: Any) -> None:
        scheduler = cluster.scheduler
        await dask_gpurt.enable(client)
        kept = client.persist(shuffled())
        watched = await stopped_in("seal", stopped, scheduler)
        first = set(scheduler.workers)
        resize(cluster, 4)
        await until(lambda: len(set(watched.owners.values()) - first) == 2)
        resize(cluster, 3)
        if how == "scale":  # adaptive scaling keeps the workers that take part
            await until(lambda: len(scheduler.workers) == 3)
            await until(lambda: set(watched.owners.values()) <= set(scheduler.workers))
        stopped.open.set()
        await wait(kept)
        resize(cluster, 1)
        await until(lambda: len(scheduler.workers) == 1)
        assert_right(await client.compute(kept))
        assert not counted(scheduler, "shuffle.runs.restarted")
        del kept
        await nothing_is_left(scheduler, *cluster.workers.values())

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
