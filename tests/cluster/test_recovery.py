"""Do again only what was lost: count the tasks that are sent again, and the outputs that move.

Scheduler, workers and client share a process, and a gate stops a step of a run until the event has happened.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from dask import config
from distributed import Client, LocalCluster, Worker, futures_of, wait
from distributed.core import Status
from distributed.shuffle._core import id_from_key

import dask_gpurt
from dask_gpurt.client.session import register_method
from dask_gpurt.exchange.comms import Puller
from dask_gpurt.scheduler import recovery
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
    missing,
    nothing_is_left,
    on_gated_cluster,
    open_gates,
    owners_on,
    shuffled,
    until,
)
from tests.helpers.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("patient")

# ---- a worker is lost ----------------------------------------------------------------


@pytest.mark.parametrize("phase", ["transfer", "seal", "unpack"])
@on_gated_cluster(workers=3, **ONE_EACH)
async def test_only_what_a_killed_worker_had_is_done_again(run: Gated, phase: str) -> None:
    """Its inputs are transferred again, once; its outputs move; all others keep their owner and share."""
    await run.stop(phase)
    stays, watched = run.at_gate, run.watched
    killed, other = run.others
    await run.kill(killed)
    if phase != "unpack":  # the output that is being assembled ends first
        await until(lambda: owners_on(stays, watched.id).epoch)
    await run.ends_right()
    again = watched.transferred_by(killed.address)
    assert again, "otherwise this would show nothing"
    assert watched.transferred_since() == again
    assert {watched.sent[key] for key in again} == {1}
    assert watched.moved() == watched.owned(killed.address)
    if phase == "unpack":
        assert watched.assembled_since() == watched.owned(killed.address)
    assert not missing(stays, other), "the scheduler knows what is lost"
    run.assert_repaired_once()
    await killed.finished()


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_a_worker_is_killed_after_the_end(run: Gated) -> None:
    """Only its outputs are assembled again, out of what is retained and of its inputs."""
    kept = run.client.persist(shuffled())
    await wait(kept)
    watched = Watched(run.scheduler)
    killed, *stay = run.crew
    await run.kill(killed)
    assert_right(await run.client.compute(kept))
    assert watched.moved() == watched.assembled_since() == watched.owned(killed.address)
    assert watched.transferred_since() == watched.transferred_by(killed.address)
    assert not missing(*stay)
    run.assert_repaired_once()
    del kept


@on_gated_cluster(workers=3)
async def test_an_output_of_a_killed_worker_has_another_replica(run: Gated) -> None:
    """It is not assembled again before that replica is lost too; then its new owner does so."""
    kept = run.client.persist(shuffled())
    await wait(kept)
    watched = Watched(run.scheduler)
    killed, heir = sorted(run.crew, key=lambda worker: -len(watched.owned(worker.address)))[:2]
    idle, needed = watched.owned(killed.address)
    (future,) = (each for each in futures_of(kept) if each.key == watched.outputs[idle])
    await run.client.replicate([future], n=2, workers=[killed.address, heir.address])
    await run.kill(killed)
    assert_right(await run.client.compute(kept))
    assert watched.assembled_since() == {needed}
    assert killed.address not in watched.owners.values()
    run.scheduler.extensions["gpurt"].lost(heir.address, [future.key])
    assert_right(await run.client.compute(kept))
    assert watched.moved() == watched.assembled_since() == {idle, needed}
    assert not run.counted("shuffle.runs.restarted")
    del kept, future


@on_gated_cluster()
async def test_outputs_that_have_been_read_are_needed_again_together(run: Gated) -> None:
    """One repair receives them again, though each task reports only its own output."""
    run.monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 0)
    results = shuffled().map_partitions(lambda part: part.assign(more=1)).optimize()
    graph, keys = dict(results.__dask_graph__()), results.__dask_keys__()
    barrier = next(filter(id_from_key, graph))
    first, *_ = (key for key, task in graph.items() if barrier in task.dependencies)
    kept = run.client.get(graph, [*keys, first], sync=False)  # the run goes on because of the first output
    await wait(kept)
    watched, tasks = Watched(run.scheduler), run.scheduler.tasks
    holder = next(
        w.address for w in run.crew if first not in map(watched.outputs.get, watched.owned(w.address))
    )
    read = watched.owned(holder)
    assert len(read) == 2
    lost = [task.key for at in read for task in tasks[watched.outputs[at]].dependents]
    run.scheduler.extensions["gpurt"].lost(holder, lost)
    await until(lambda: watched.assembled_since())
    await wait(kept)
    await until(lambda: all(tasks[key].state == "memory" for key in lost))
    assert watched.moved() == watched.assembled_since() == read
    assert not watched.transferred_since()
    run.assert_repaired_once()
    del kept


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_both_sides_of_a_join_lose_a_worker(run: Gated) -> None:
    """Their outputs move together, since one task reads both on one worker."""
    left, right = await run.stop_join("transfer")
    killed, _ = run.others
    await run.kill(killed)
    await run.join_ends_right()
    assert dict(left.owners) == dict(right.owners)
    assert left.moved() == right.moved() == left.owned(killed.address)
    assert not run.counted("shuffle.runs.restarted")


# ---- a worker joins ------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["transfer", "seal"])
@on_gated_cluster(**ONE_EACH)
async def test_a_worker_joins_and_assembles_outputs(run: Gated, phase: str) -> None:
    """It is given its part of the outputs; nothing is transferred again, and the others stay."""
    await run.stop(phase)
    watched = run.watched
    async with Worker(run.scheduler.address, nthreads=1) as joined:
        await until(lambda: joined.address in watched.owners.values())
        given = {output for output, owner in watched.owners.items() if owner == joined.address}
        assert len(given) == len(watched.owners) // 3
        await run.ends_right()
        made = {output for output, key in watched.outputs.items() if watched.made[key] == joined.address}
        assert made == given == watched.moved()
        assert not watched.transferred_since()
        assert not run.counted("shuffle.runs.recovered"), "nothing was lost"
        assert not run.counted("shuffle.runs.restarted")


@on_gated_cluster(workers=1)
async def test_a_worker_joins_when_outputs_are_assembled(run: Gated) -> None:
    """It is given none: moving them would repeat the barrier."""
    await run.stop("unpack")
    async with Worker(run.scheduler.address, nthreads=1) as joined:
        await until(lambda: joined.address in run.scheduler.extensions["gpurt"].workers.ready)
        await run.ends_right()
        assert not run.watched.moved()
        assert not run.watched.sent[run.watched.barrier]


# ---- a worker does not answer --------------------------------------------------------


@pytest.mark.parametrize("answers", ["last", "first"])
@on_gated_cluster(**ONE_EACH)
async def test_an_owner_is_unreachable_and_assembles_an_output_nevertheless(run: Gated, answers: str) -> None:
    """Its unfinished outputs move, and nothing else. Both answers arrive, in either order."""
    await run.stop("unpack")
    watched, silent, (other,) = run.watched, run.at_gate.address, run.others
    run.scheduler.set_restrictions({watched.barrier: {other.address}})
    run.report(unreachable=silent)
    assert watched.moved() == watched.owned(silent)
    assert silent not in watched.owners.values()
    if answers == "last":
        await run.result_at_gate()
    await run.ends_right()
    assert watched.assembled_since() == watched.owned(silent)
    assert not watched.transferred_since()
    run.assert_repaired_once()


@on_gated_cluster(**ONE_EACH)
async def test_an_output_is_being_assembled_while_another_one_is_repaired(run: Gated) -> None:
    """Dask cancels its task, sends it again, and refuses the first result: its shards must still be there."""
    run.monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 0)
    await run.stop("unpack")
    (other,), (task,), watched = run.others, run.at_gate.state.executing, run.watched
    before, lost = task.run_id, min(watched.owned(other.address))
    run.scheduler.set_restrictions({watched.barrier: {other.address}})  # the other has no free thread
    run.scheduler.extensions["gpurt"].lost(watched.owners[lost], [watched.outputs[lost]])
    run.report(outputs=[lost])
    await until(lambda: task.run_id != before)
    await run.ends_right()
    assert watched.moved() == {lost}
    assert not watched.transferred_since()
    run.assert_repaired_once()


# ---- workers retire, and clusters grow and shrink: what was handed on stays done ------------------


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
