"""Put the runtime through the events of Dask's own p2p tests (docs/design/p2p-events.md).

Scheduler, workers and client share a process. A gate stops a step of a run until the event has happened.
"""

from __future__ import annotations

import asyncio
import threading
from functools import wraps
from typing import Any

import pandas as pd
import pytest
from dask import config
from distributed import KilledWorker, Worker, futures_of, wait
from distributed.core import Status
from distributed.shuffle._core import id_from_key
from distributed.shuffle._shuffle import DataFrameShuffleRun

from dask_gpurt.protocol import NEW_OWNERS_OP
from dask_gpurt.scheduler import recovery
from dask_gpurt.scheduler.recovery import Recovery
from dask_gpurt.scheduler.results import SmallResults
from dask_gpurt.shuffle.receiver import Receiver
from dask_gpurt.shuffle.run import ShuffleRun
from dask_gpurt.shuffle.spec import ShuffleSpec
from tests.helpers.gated_runs import (
    PARTS,
    ROWS,
    Gate,
    Gated,
    Watched,
    assert_right,
    frames,
    on_gated_cluster,
    outputs,
    runs,
    shuffled,
    until,
)

# ---- a worker leaves -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "which"),
    [("transfer", "the one"), ("barrier", "the one"), ("barrier", "another"), ("unpack", "the one")],
)
@on_gated_cluster(workers=3)
async def test_a_worker_is_closed(run: Gated, phase: str, which: str) -> None:
    """The worker whose step is stopped, or another worker; the state machine closes them at any step."""
    await run.begin(phase)
    leaves = run.at_gate if which == "the one" else run.others[0]
    closing = asyncio.create_task(leaves.close(executor_wait=False))
    await until(lambda: leaves.address not in run.scheduler.workers)
    run.stopped.open.set()
    await closing
    await run.ends_right()


# ---- a run begins again --------------------------------------------------------------


@on_gated_cluster()
async def test_one_side_of_a_join_begins_again_when_outputs_are_there(run: Gated) -> None:
    """The other side continues, and is offered the shards again that it had released."""
    await run.stop_join("unpack")
    await until(lambda: any(ts.state == "memory" for ts in outputs(run.scheduler)))
    before = list(run.scheduler.extensions["shuffle"].active_shuffles.values())
    (one, _) = run.crew[0].plugins["shuffle"].shuffle_runs._active_runs.values()
    await one._begin_again("a test")
    assert [each.archived for each in before].count(True) == 1
    await run.join_ends_right()


@on_gated_cluster()
async def test_an_output_is_needed_once_more_when_another_has_failed(run: Gated) -> None:
    """Otherwise it would be rescheduled for ever: Dask does not restart a shuffle with a failed output."""
    assemble = Receiver.assemble

    def fails(self: Any, partition: int, key: Any) -> Any:
        if partition == 1:
            raise ValueError("a test")
        return assemble(self, partition, key)

    run.monkeypatch.setattr(Receiver, "assemble", fails)
    out = shuffled().optimize()
    graph, keys = dict(out.__dask_graph__()), out.__dask_keys__()
    (barrier,) = filter(id_from_key, graph)
    first, *others = run.client.get(graph, [*keys, barrier], sync=False)
    await wait([first, *others])
    expected = await first
    first.release()
    await until(lambda: keys[0] not in run.scheduler.tasks)
    (first,) = run.client.get(graph, [keys[0]], sync=False)
    pd.testing.assert_frame_equal(await asyncio.wait_for(first, 20), expected)
    assert runs(*run.crew) == len(run.crew), "no other run was needed"
    del first, others


# ---- a worker leaves, or comes, in other ways ----------------------------------------


@on_gated_cluster(workers=4, **{"gpurt.shuffle.retries": 1})
async def test_a_run_loses_workers_more_often_than_it_may_be_mended(run: Gated) -> None:
    """The run restarts."""
    await run.begin("transfer")
    first, second, *_ = run.others
    await first.close(executor_wait=False)
    await until(lambda: run.counted("shuffle.runs.recovered"))
    assert not run.counted("shuffle.runs.restarted")
    await second.close(executor_wait=False)
    await until(lambda: run.counted("shuffle.runs.restarted"))
    await run.ends_right()


@on_gated_cluster(workers=3, **{"gpurt.exchange.paths": ["comms"]})
async def test_the_repair_of_a_run_fails(run: Gated, caplog: pytest.LogCaptureFixture) -> None:
    """It waits for an output that is being assembled, so its error reaches no caller; the run restarts."""
    mend, failed = Recovery._reassign, threading.Event()

    def fails_once(self: Recovery, *args: Any, **options: Any) -> None:
        if failed.is_set():
            mend(self, *args, **options)
        else:
            failed.set()
            raise ValueError("a test")

    await run.begin("unpack")
    run.monkeypatch.setattr(Recovery, "_reassign", fails_once)
    run.monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 3600)
    boxes = {worker.address: worker.plugins["gpurt"].exchange.pools.known("host") for worker in run.crew}
    await until(lambda: all(box.readers() <= {address} for address, box in boxes.items()))
    await run.close(run.others[0])
    assert not failed.is_set()
    await run.ends_right()
    assert run.counted("shuffle.runs.restarted") == 1
    assert caplog.text.count("cannot be repaired") == 1


@on_gated_cluster()
async def test_all_workers_leave_and_another_comes(run: Gated) -> None:
    """No participant is left to repair the run: it restarts on the new worker."""
    await run.begin("transfer")
    for worker in [*run.others, run.at_gate]:
        await run.remove(worker)
    assert run.counted("shuffle.runs.restarted") == 1
    run.stopped.open.set()
    async with Worker(run.scheduler.address, nthreads=1) as other:
        await run.ends_right()
        assert runs(other) == 1
    for worker in run.crew:
        await worker.finished()


@on_gated_cluster(workers=3, **{"gpurt.takeover": False})
async def test_a_shuffle_of_dasks_own_loses_a_worker(run: Gated) -> None:
    """It restarts as in plain Dask, and the runtime takes no part."""
    barrier, reached_by, goes_on = DataFrameShuffleRun.barrier, list[str](), threading.Event()

    async def stops(self: Any, run_ids: Any) -> int:
        reached_by.append(self.local_address)
        await until(goes_on.is_set)
        return await barrier(self, run_ids)

    run.monkeypatch.setattr(DataFrameShuffleRun, "barrier", stops)
    with config.set({"dataframe.shuffle.method": "p2p"}):
        result = run.client.compute(frames().shuffle("key"))
    await until(lambda: reached_by)
    leaves, *stay = sorted(run.crew, key=lambda worker: worker.address == reached_by[0])
    await leaves.close(executor_wait=False)
    goes_on.set()
    assert_right(await result)
    assert len(reached_by) > 1
    assert not runs(*stay)
    del result


@on_gated_cluster(**{"gpurt.exchange.paths": ["comms"]})
async def test_a_worker_is_closed_that_has_nothing_any_more(run: Gated) -> None:
    """It owns no output, and its shards have been pulled: it is removed from the run without a repair."""
    run.monkeypatch.setattr(ShuffleSpec, "pick_worker", lambda self, partition, workers: sorted(workers)[0])
    await run.begin("unpack")
    owner, other = sorted(run.crew, key=lambda worker: worker.address)
    shards = other.plugins["gpurt"].exchange.pools.known("host")
    await until(lambda: owner.address not in shards.readers())
    (shuffle,) = run.scheduler.extensions["shuffle"].active_shuffles.values()
    before = shuffle.run_spec.worker_for.epoch
    await run.close(other)
    assert other.address not in shuffle.participating_workers
    assert shuffle.run_spec.worker_for.epoch == before
    await run.ends_right()
    assert not run.counted("shuffle.runs.recovered")
    assert not run.counted("shuffle.runs.restarted")


@on_gated_cluster(workers=3)
async def test_a_worker_that_takes_no_part_is_closed(run: Gated) -> None:
    *part, other = run.crew
    await run.begin("barrier", workers=[w.address for w in part], allow_other_workers=False)
    await other.close()
    await run.ends_right()
    assert runs(*part) == len(part)


@pytest.mark.parametrize("phase", ["transfer", "barrier", "unpack"])
@on_gated_cluster(**{"distributed.scheduler.allowed-failures": 0})
async def test_no_failures_are_allowed_and_a_worker_is_lost(run: Gated, phase: str) -> None:
    await run.begin(phase)
    await run.remove(run.at_gate)
    with pytest.raises(KilledWorker):
        await run.result_at_gate()
    run.stopped.open.set()
    await run.at_gate.finished()
    run.released().release()


@pytest.mark.parametrize("lost", ["its worker", "another worker"])
def test_a_result_of_a_transfer_is_fetched_by_the_barrier_and_a_worker_is_lost(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """As where results are not sent ahead. The barrier is sent again when the lost input is transferred."""
    monkeypatch.setattr(SmallResults, "_send_transfers", lambda self, run, barrier: None)
    stopped, gather, fetched_from = Gate(), Worker.gather_dep, list[str]()

    @wraps(gather)
    async def stops(self: Any, worker: str, to_gather: Any, *args: Any, **kwargs: Any) -> Any:
        if any("shuffle-transfer" in str(key) for key in to_gather) and stopped.stops(self.address):
            fetched_from.append(worker)
            await until(stopped.open.is_set)
        return await gather(self, worker, to_gather, *args, **kwargs)

    monkeypatch.setattr(Worker, "gather_dep", stops)

    @on_gated_cluster(workers=3, **{"distributed.scheduler.worker-saturation": 1.0})
    async def test(run: Gated) -> None:
        result = run.client.compute(shuffled())
        await until(lambda: fetched_from)
        watched, (here, *_) = Watched(run.scheduler), stopped.where
        others = [worker for worker in run.crew if worker.address != here]
        (leaves,) = [w for w in others if (w.address == fetched_from[0]) == (lost == "its worker")]
        await run.remove(leaves)
        stopped.open.set()
        assert_right(await result)
        assert watched.transferred_since() == watched.transferred_by(leaves.address) != set()
        assert not run.counted("shuffle.runs.restarted")
        await leaves.finished()
        del result

    test()


@on_gated_cluster(**{"distributed.worker.memory.pause": False})
async def test_a_worker_is_paused_and_another_one_is_lost(run: Gated) -> None:
    a, b = run.crew
    await run.begin("barrier")
    a.status = Status.paused
    await until(lambda: len(run.scheduler.running) == 1)
    b.batched_stream.close()
    await until(lambda: not run.scheduler.running)
    run.stopped.open.set()
    a.status = Status.running
    await run.ends_right()


@on_gated_cluster(workers=3)
async def test_a_worker_takes_part_that_is_not_wholly_on_and_another_is_closed(run: Gated) -> None:
    """It receives no message about the new owners before its next request, and stays in the run."""
    await run.begin("barrier")
    late, leaves = run.others
    ready = run.scheduler.extensions["gpurt"].workers.ready
    ready.discard(late.address)
    renew = late.stream_handlers.pop(NEW_OWNERS_OP)
    await leaves.close()
    await run.ends_right()
    assert late.status is Status.running
    late.stream_handlers[NEW_OWNERS_OP] = renew
    ready.add(late.address)


@on_gated_cluster(workers=3)
async def test_workers_leave_between_repeats(run: Gated) -> None:
    for leaves in (None, run.crew[2], run.crew[1]):
        if leaves is not None:
            await leaves.close()
        assert_right(await run.client.compute(shuffled()))


@on_gated_cluster()
async def test_a_worker_joins_and_is_given_an_output(run: Gated) -> None:
    """It takes no part in the run, and redirects the task to the owner."""
    await run.begin("barrier")
    async with Worker(run.scheduler.address) as joined:
        await until(lambda: "gpurt" in joined.plugins)
        some = outputs(run.scheduler)[0]
        (some.annotations or {}).pop("shuffle_original_restrictions", None)
        run.scheduler.set_restrictions({some.key: {joined.address}})
        await run.ends_right()


@on_gated_cluster()
async def test_workers_that_take_part_are_not_chosen_for_scaling_down(run: Gated) -> None:
    assert len(run.scheduler.workers_to_close(n=2)) == 2
    await run.begin("barrier")
    assert not run.scheduler.workers_to_close(n=2)
    await run.ends_right()


# ---- a shuffle is let go, and wanted again -------------------------------------------


@pytest.mark.parametrize(
    ("phase", "again"),
    [
        ("transfer", "at once"),
        ("offers", "at once"),
        ("barrier", "later"),
        ("barrier", "never"),
        ("unpack", "at once"),
    ],
)
@on_gated_cluster()
async def test_a_shuffle_is_let_go(run: Gated, phase: str, again: str) -> None:
    """Stale messages meet a new run of the same shuffle; the state machine lets go of them at any step."""
    gate = run.gate(phase)
    out = run.client.persist(shuffled())
    await until(gate.reached.is_set)
    del out
    if again == "later":
        await until(lambda: not run.scheduler.tasks)
    result = None if again == "never" else run.client.compute(shuffled())
    await asyncio.sleep(0)
    gate.open.set()
    if result is not None:
        assert_right(await result)
    del result


@on_gated_cluster()
async def test_some_outputs_are_wanted_more_and_some_no_more(run: Gated) -> None:
    whole, client = shuffled(), run.client
    some = client.persist(whole.partitions[: PARTS // 2])
    await until(lambda: any(ts.state == "memory" for ts in run.scheduler.tasks.values()))
    every = client.persist(whole)
    assert_right(await client.compute(every))
    del some
    rest = client.persist(every.partitions[PARTS // 2 :])
    del every
    assert 0 < len(await client.compute(rest)) < ROWS
    del rest
    await until(lambda: not run.scheduler.tasks)
    few = await client.compute(whole.partitions[:1])  # culled to one
    assert (few["key"] == few["row"] % 17).all()


@on_gated_cluster(**{"gpurt.shuffle.retries": 1})
async def test_one_result_is_lost_again_and_again_and_the_others_are_kept(run: Gated) -> None:
    """Each run receives the only output that is needed, and ends. Such runs do not count as failed."""
    scheduler = run.scheduler
    shuffles = scheduler.extensions["shuffle"].active_shuffles
    kept = run.client.persist(shuffled().map_partitions(lambda part: part.assign(more=1)))
    first = min(future.key for future in futures_of(kept))
    for _ in range(3):
        await wait(kept)
        await until(lambda: not shuffles)
        assert not [name for name in scheduler.clients if name.startswith("gpurt")]
        scheduler.extensions["gpurt"].lost(next(iter(scheduler.tasks[first].who_has)).address, [first])
        await until(lambda: shuffles)
        (active,) = shuffles.values()
        assert [share.outputs for share in active.run_spec.worker_for.shares.values()] == [(0,)]
    assert_right(await run.client.compute(kept))
    del kept


@on_gated_cluster()
async def test_the_scheduler_forgets_all_tasks(run: Gated) -> None:
    """As when the scheduler restarts, which closes workers without a nanny."""
    await run.begin("barrier")
    restarting = asyncio.create_task(run.client.restart(wait_for_workers=False))
    await until(lambda: not run.scheduler.tasks)
    result = run.released()
    await restarting
    assert result.cancelled()
    assert not [name for name in run.scheduler.clients if name.startswith("gpurt")]
    async with Worker(run.scheduler.address, nthreads=1):
        assert_right(await run.client.compute(shuffled()))
    for worker in run.crew:
        await worker.finished()


@on_gated_cluster()
async def test_a_run_can_not_be_closed(run: Gated) -> None:
    """The worker closes nevertheless."""
    close, failed = ShuffleRun.close, []

    async def fails(self: Any) -> None:
        await close(self)
        failed.append(self)
        raise RuntimeError("a test")

    run.monkeypatch.setattr(ShuffleRun, "close", fails)
    assert_right(await run.client.compute(shuffled()))
    await run.crew[1].close()
    assert failed
