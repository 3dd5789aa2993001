"""Do again only what was lost: count the tasks that are sent again, and the outputs that move.

Scheduler, workers and client share a process, and a gate stops a step of a run until the event has happened.
"""

from __future__ import annotations

import pytest
from distributed import Worker, futures_of, wait
from distributed.shuffle._core import id_from_key

from dask_gpurt.scheduler import recovery
from tests.helpers.gated_runs import (
    ONE_EACH,
    Gated,
    Watched,
    assert_right,
    missing,
    on_gated_cluster,
    owners_on,
    shuffled,
    until,
)

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
