"""Let shuffles go, and want them again: more events of Dask's own p2p tests (docs/design/p2p-events.md).

Scheduler, workers and client share a process. A gate stops a step of a run until the event has happened.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Worker, futures_of, wait

from dask_gpurt.shuffle.run import ShuffleRun
from tests.helpers.gated_runs import (
    PARTS,
    ROWS,
    STEPS,
    assert_right,
    gate,
    on_gated_cluster,
    shuffled,
    until,
)


@pytest.mark.parametrize(
    ("phase", "again"),
    [
        *((phase, "at once") for phase in STEPS),
        *((phase, again) for phase in ("transfer", "barrier", "unpack") for again in ("", "later")),
    ],
)
@on_gated_cluster()
async def test_a_shuffle_is_let_go(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch, phase: str, again: str
) -> None:
    """In each phase: stale messages meet a new run of the same shuffle."""
    stopped = gate(monkeypatch, phase)
    out = client.persist(shuffled())
    await until(stopped.reached.is_set)
    del out
    if again == "later":
        await until(lambda: not scheduler.tasks)
    result = client.compute(shuffled()) if again else None
    await asyncio.sleep(0)
    stopped.open.set()
    if result is not None:
        assert_right(await result)
    del result


@on_gated_cluster()
async def test_some_outputs_are_wanted_more_and_some_no_more(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shuffled()
    some = client.persist(whole.partitions[: PARTS // 2])
    await until(lambda: any(ts.state == "memory" for ts in scheduler.tasks.values()))
    every = client.persist(whole)
    assert_right(await client.compute(every))
    del some
    rest = client.persist(every.partitions[PARTS // 2 :])
    del every
    assert 0 < len(await client.compute(rest)) < ROWS
    del rest
    await until(lambda: not scheduler.tasks)
    few = await client.compute(whole.partitions[:1])  # culled to one
    assert (few["key"] == few["row"] % 17).all()


@on_gated_cluster(**{"gpurt.shuffle.retries": 1})
async def test_one_result_is_lost_again_and_again_and_the_others_are_kept(
    client: Any, scheduler: Any, *crew: Any
) -> None:
    """Each run receives the only output that is needed, and ends. Such runs do not count as failed."""
    extension, runtime = scheduler.extensions["shuffle"], scheduler.extensions["gpurt"]
    kept = client.persist(shuffled().map_partitions(lambda part: part.assign(more=1)))
    first = min(future.key for future in futures_of(kept))
    for _ in range(3):
        await wait(kept)
        await until(lambda: not extension.active_shuffles)
        assert not [name for name in scheduler.clients if name.startswith("gpurt")]
        runtime.lost(next(iter(scheduler.tasks[first].who_has)).address, [first])
        await until(lambda: extension.active_shuffles)
        (active,) = extension.active_shuffles.values()
        outputs = [share.outputs for share in active.run_spec.worker_for.shares.values()]
        assert outputs == [(0,)]
    assert_right(await client.compute(kept))
    del kept


@on_gated_cluster(workers=1)
async def test_a_run_is_failed_before_its_worker_hears_that_it_has_begun(
    client: Any, scheduler: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = gate(monkeypatch, "barrier")
    out = client.persist(shuffled())
    await until(stopped.reached.is_set)
    manager = worker.plugins["shuffle"].shuffle_runs
    ((shuffle, active),) = manager._active_runs.items()
    manager.fail(shuffle, active.run_id, "a test")
    for stale in (manager.get_with_run_id(shuffle, active.run_id), manager.get_or_create(shuffle, "key")):
        with pytest.raises(RuntimeError, match="stale shuffle run"):
            await stale
    assert shuffle not in manager._active_runs
    del out
    stopped.open.set()


@on_gated_cluster()
async def test_the_scheduler_forgets_all_tasks(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the scheduler restarts, which closes workers without a nanny."""
    stopped = gate(monkeypatch, "barrier")
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    restarting = asyncio.create_task(client.restart(wait_for_workers=False))
    await until(lambda: not scheduler.tasks)
    stopped.open.set()
    await restarting
    assert result.cancelled()
    assert not [name for name in scheduler.clients if name.startswith("gpurt")]
    async with Worker(scheduler.address, nthreads=1):
        assert_right(await client.compute(shuffled()))
    for worker in crew:
        await worker.finished()


@on_gated_cluster()
async def test_a_run_can_not_be_closed(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker closes nevertheless."""
    close, failed = ShuffleRun.close, []

    async def fails(self: Any) -> None:
        await close(self)
        failed.append(self)
        raise RuntimeError("a test")

    monkeypatch.setattr(ShuffleRun, "close", fails)
    assert_right(await client.compute(shuffled()))
    await crew[1].close()
    assert failed
