"""Do again only what was lost: count the tasks that are sent again, and the outputs that move.

Scheduler, workers and client share a process, and a gate stops a step of a run until the event has happened.
"""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Worker, futures_of, wait
from distributed.shuffle._core import barrier_key, id_from_key

from dask_gpurt.scheduler import recovery
from dask_gpurt.shuffle.spec import ShuffleSpec
from tests.helpers.gated_runs import (
    FRAME,
    Watched,
    assert_right,
    counted,
    gate,
    on_gated_cluster,
    shuffled,
    until,
)
from tests.helpers.recovering import (
    ONE_EACH,
    assert_repaired_once,
    both_sides_in,
    joined,
    kill,
    missing,
    others,
    owners_on,
    report,
    stopped_in,
)

pytestmark = pytest.mark.usefixtures("patient")

# ---- a worker is lost ----------------------------------------------------------------


@pytest.mark.parametrize("phase", ["transfer", "seal", "unpack"])
@on_gated_cluster(workers=3, **ONE_EACH)
async def test_only_what_a_killed_worker_had_is_done_again(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Its inputs are transferred again, once; its outputs move; all others keep their owner and share."""
    stopped = gate(monkeypatch, phase)
    result = client.compute(shuffled())
    watched = await stopped_in(phase, stopped, scheduler)
    (stays,) = (worker for worker in crew if worker.address == stopped.where[0])
    killed, other = others(crew, stopped)
    await kill(scheduler, killed)
    if phase != "unpack":  # the output that is being assembled ends first
        await until(lambda: owners_on(stays, watched.id).epoch)
    stopped.open.set()
    assert_right(await result)
    again = watched.transferred_by(killed.address)
    assert again, "otherwise this would show nothing"
    assert watched.transferred_since() == again
    assert {watched.sent[key] for key in again} == {1}
    assert watched.moved() == watched.owned(killed.address)
    if phase == "unpack":
        assert watched.assembled_since() == watched.owned(killed.address)
    assert not missing(stays, other), "the scheduler knows what is lost"
    assert_repaired_once(scheduler)
    await killed.finished()
    del result


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_a_worker_that_owns_no_output_is_killed(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inputs are transferred again, and no output moves."""
    monkeypatch.setattr(ShuffleSpec, "pick_worker", lambda self, partition, workers: sorted(workers)[0])
    stopped = gate(monkeypatch, "seal")
    result = client.compute(shuffled())
    watched = await stopped_in("seal", stopped, scheduler)
    killed = next(w for w in others(crew, stopped) if w.address not in watched.owners.values())
    await kill(scheduler, killed)
    stopped.open.set()
    assert_right(await result)
    assert not watched.moved()
    assert watched.transferred_since() == watched.transferred_by(killed.address) != set()
    assert_repaired_once(scheduler)
    await killed.finished()
    del result


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_a_worker_is_killed_after_the_end(client: Any, scheduler: Any, *crew: Any) -> None:
    """Only its outputs are assembled again, out of what is retained and of its inputs."""
    kept = client.persist(shuffled())
    await wait(kept)
    watched = Watched(scheduler)
    killed, *stay = crew
    await kill(scheduler, killed)
    assert_right(await client.compute(kept))
    assert watched.moved() == watched.assembled_since() == watched.owned(killed.address)
    assert watched.transferred_since() == watched.transferred_by(killed.address)
    assert not missing(*stay)
    assert_repaired_once(scheduler)
    del kept


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_outputs_are_dealt_evenly_to_those_that_stay(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four outputs, two workers own two each in the end, whoever had one or two before."""
    stopped = gate(monkeypatch, "transfer")
    result = client.compute(shuffled())
    watched = await stopped_in("transfer", stopped, scheduler)
    killed, _ = others(crew, stopped)
    await kill(scheduler, killed)
    owned = list(watched.owners.values())
    assert sorted(map(owned.count, set(owned))) == [2, 2]
    stopped.open.set()
    assert_right(await result)
    del result


@on_gated_cluster(workers=3)
async def test_an_output_of_a_killed_worker_has_another_replica(
    client: Any, scheduler: Any, *crew: Any
) -> None:
    """It is not assembled again before that replica is lost too; then its new owner does so."""
    kept = client.persist(shuffled())
    await wait(kept)
    watched = Watched(scheduler)
    killed, heir = sorted(crew, key=lambda worker: -len(watched.owned(worker.address)))[:2]
    idle, needed = watched.owned(killed.address)
    (future,) = (each for each in futures_of(kept) if each.key == watched.outputs[idle])
    await client.replicate([future], n=2, workers=[killed.address, heir.address])
    await kill(scheduler, killed)
    assert_right(await client.compute(kept))
    assert watched.assembled_since() == {needed}
    assert killed.address not in watched.owners.values()
    scheduler.extensions["gpurt"].lost(heir.address, [future.key])
    assert_right(await client.compute(kept))
    assert watched.moved() == watched.assembled_since() == {idle, needed}
    assert not counted(scheduler, "shuffle.runs.restarted")
    del kept, future


@on_gated_cluster()
async def test_outputs_that_have_been_read_are_needed_again_together(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One repair receives them again, though each task reports only its own output."""
    monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 0)
    results = shuffled().map_partitions(lambda part: part.assign(more=1)).optimize()
    graph, keys = dict(results.__dask_graph__()), results.__dask_keys__()
    barrier = next(filter(id_from_key, graph))
    first, *_ = (key for key, task in graph.items() if barrier in task.dependencies)
    kept = client.get(graph, [*keys, first], sync=False)  # the run goes on because of the first output
    await wait(kept)
    watched = Watched(scheduler)
    holder = next(w.address for w in crew if first not in map(watched.outputs.get, watched.owned(w.address)))
    read = watched.owned(holder)
    assert len(read) == 2
    lost = [task.key for at in read for task in scheduler.tasks[watched.outputs[at]].dependents]
    scheduler.extensions["gpurt"].lost(holder, lost)
    await until(lambda: watched.assembled_since())
    await wait(kept)
    await until(lambda: all(scheduler.tasks[key].state == "memory" for key in lost))
    assert watched.moved() == watched.assembled_since() == read
    assert not watched.transferred_since()
    assert_repaired_once(scheduler)
    del kept


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_both_sides_of_a_join_lose_a_worker(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their outputs move together, since one task reads both on one worker."""
    stopped = gate(monkeypatch, "transfer")
    result = joined(client)
    left, right = await both_sides_in(stopped, scheduler)
    killed, _ = others(crew, stopped)
    await kill(scheduler, killed)
    stopped.open.set()
    assert len(await result) == len(FRAME.merge(FRAME, on="key"))
    assert dict(left.owners) == dict(right.owners)
    assert left.moved() == right.moved() == left.owned(killed.address)
    assert not counted(scheduler, "shuffle.runs.restarted")
    del result


# ---- a worker joins ------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["transfer", "seal"])
@on_gated_cluster(**ONE_EACH)
async def test_a_worker_joins_and_assembles_outputs(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """It is given its part of the outputs; nothing is transferred again, and the others stay."""
    stopped = gate(monkeypatch, phase)
    result = client.compute(shuffled())
    watched = await stopped_in(phase, stopped, scheduler)
    async with Worker(scheduler.address, nthreads=1) as joined:
        await until(lambda: joined.address in watched.owners.values())
        given = {output for output, owner in watched.owners.items() if owner == joined.address}
        assert len(given) == len(watched.owners) // 3
        stopped.open.set()
        assert_right(await result)
        made = {output for output, key in watched.outputs.items() if watched.made[key] == joined.address}
        assert made == given == watched.moved()
        assert not watched.transferred_since()
        assert not counted(scheduler, "shuffle.runs.recovered"), "nothing was lost"
        assert not counted(scheduler, "shuffle.runs.restarted")
        del result


@on_gated_cluster(workers=1)
async def test_a_worker_joins_when_outputs_are_assembled(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given none: moving them would repeat the barrier."""
    stopped = gate(monkeypatch, "unpack")
    result = client.compute(shuffled())
    watched = await stopped_in("unpack", stopped, scheduler)
    async with Worker(scheduler.address, nthreads=1) as joined:
        await until(lambda: joined.address in scheduler.extensions["gpurt"].workers.ready)
        stopped.open.set()
        assert_right(await result)
        assert not watched.moved()
        assert not watched.sent[watched.barrier]
        del result


# ---- a worker does not answer --------------------------------------------------------


@pytest.mark.parametrize("answers", ["last", "first"])
@on_gated_cluster(**ONE_EACH)
async def test_an_owner_is_unreachable_and_assembles_an_output_nevertheless(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch, answers: str
) -> None:
    """Its unfinished outputs move, and nothing else. Both answers arrive, in either order."""
    stopped = gate(monkeypatch, "unpack")
    result = client.compute(shuffled())
    watched = await stopped_in("unpack", stopped, scheduler)
    (silent,), (other,) = stopped.where[:1], others(crew, stopped)
    scheduler.set_restrictions({watched.barrier: {other.address}})
    report(scheduler, watched, unreachable=silent)
    assert watched.moved() == watched.owned(silent)
    assert silent not in watched.owners.values()
    if answers == "last":
        assert_right(await result)
    stopped.open.set()
    assert_right(await result)
    assert watched.assembled_since() == watched.owned(silent)
    assert not watched.transferred_since()
    assert_repaired_once(scheduler)
    del result


@on_gated_cluster(**ONE_EACH)
async def test_an_output_is_being_assembled_while_another_one_is_repaired(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask cancels its task, sends it again, and refuses the first result: its shards must still be there."""
    monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 0)
    stopped = gate(monkeypatch, "unpack")
    result = client.compute(shuffled())
    watched = await stopped_in("unpack", stopped, scheduler)
    (busy,) = (worker for worker in crew if worker.address == stopped.where[0])
    (other,), (task,) = others(crew, stopped), busy.state.executing
    before, lost = task.run_id, min(watched.owned(other.address))
    scheduler.set_restrictions({watched.barrier: {other.address}})  # the other has no free thread
    scheduler.extensions["gpurt"].lost(watched.owners[lost], [watched.outputs[lost]])
    report(scheduler, watched, outputs=[lost])
    await until(lambda: task.run_id != before)
    stopped.open.set()
    assert_right(await result)
    assert watched.moved() == {lost}
    assert not watched.transferred_since()
    assert_repaired_once(scheduler)
    del result


@on_gated_cluster(**ONE_EACH)
async def test_the_end_of_an_output_is_on_its_way_while_another_one_is_repaired(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler refuses it, and sends the task again: its shards must still be there."""
    monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 0)
    stopped = gate(monkeypatch, "unpack")
    result = client.compute(shuffled())
    watched = await stopped_in("unpack", stopped, scheduler)
    (busy,) = (worker for worker in crew if worker.address == stopped.where[0])
    (other,), (task,) = others(crew, stopped), busy.state.executing
    lost, held = min(watched.owned(other.address)), list[dict[str, Any]]()
    finished = scheduler.stream_handlers["task-finished"]
    scheduler.stream_handlers["task-finished"] = lambda **message: held.append(message)
    stopped.open.set()
    await until(lambda: task.key in [message["key"] for message in held])
    scheduler.extensions["gpurt"].lost(other.address, [watched.outputs[lost]])
    report(scheduler, watched, outputs=[lost])
    scheduler.stream_handlers["task-finished"] = finished
    for message in held:
        finished(**message)
    assert_right(await result)
    assert watched.moved() == {lost}
    assert watched.sent[task.key] == 1
    assert not watched.transferred_since()
    assert_repaired_once(scheduler)
    del result


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_an_owner_is_unreachable_before_the_barrier(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs move; its inputs are not transferred again, since it has not left."""
    stopped = gate(monkeypatch, "seal")
    result = client.compute(shuffled())
    watched = await stopped_in("seal", stopped, scheduler)
    silent, _ = others(crew, stopped)
    report(scheduler, watched, unreachable=silent.address)
    assert watched.moved() == watched.owned(silent.address)
    stopped.open.set()
    assert_right(await result)
    assert not watched.transferred_since()
    assert_repaired_once(scheduler)
    del result


@on_gated_cluster(workers=3, **ONE_EACH)
async def test_reports_of_losses_that_are_repaired_or_of_runs_that_are_over(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers report a loss independently of each other, so most reports come late."""
    stopped = gate(monkeypatch, "seal")
    result = client.compute(shuffled())
    watched = await stopped_in("seal", stopped, scheduler)
    silent, other = others(crew, stopped)
    report(scheduler, watched, unreachable=silent.address)
    moved = watched.shares()
    report(scheduler, watched, epoch=0, unreachable=other.address)
    report(scheduler, watched, epoch=0, inputs=list(watched.transfers))
    watched.run_id -= 1
    report(scheduler, watched, inputs=list(watched.transfers))
    assert watched.shares() == moved
    assert not watched.transferred_since()
    stopped.open.set()
    assert_right(await result)
    assert_repaired_once(scheduler)
    report(scheduler, watched, inputs=list(watched.transfers))
    assert barrier_key(watched.id) not in scheduler.tasks or not watched.transferred_since()
    del result
