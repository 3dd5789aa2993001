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
from distributed import KilledWorker, Worker, wait
from distributed.core import Status
from distributed.shuffle._core import id_from_key
from distributed.shuffle._shuffle import DataFrameShuffleRun

from dask_gpurt.protocol import NEW_OWNERS_OP
from dask_gpurt.scheduler import recovery
from dask_gpurt.scheduler.recovery import Recovery
from dask_gpurt.scheduler.results import SmallResults
from dask_gpurt.shuffle.receiver import Receiver
from dask_gpurt.shuffle.spec import ShuffleSpec
from tests.helpers.gated_runs import (
    FRAME,
    STEPS,
    Gate,
    Watched,
    assert_right,
    counted,
    frames,
    gate,
    on_gated_cluster,
    outputs,
    runs,
    shuffled,
    until,
)

# ---- a worker leaves -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "which"),
    [
        *((phase, "the one") for phase in STEPS),
        *((phase, "another") for phase in ("transfer", "barrier", "unpack")),
    ],
)
@on_gated_cluster(workers=3)
async def test_a_worker_is_closed(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch, phase: str, which: str
) -> None:
    """In each phase: the worker whose step is stopped, and another worker."""
    stopped = gate(monkeypatch, phase)
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    (leaves, *_) = [w for w in crew if (w.address == stopped.where[0]) == (which == "the one")]
    closing = asyncio.create_task(leaves.close(executor_wait=False))
    await until(lambda: leaves.address not in scheduler.workers)
    stopped.open.set()
    await closing
    assert_right(await result)
    del result


# ---- a run begins again --------------------------------------------------------------


@on_gated_cluster()
async def test_one_side_of_a_join_begins_again_when_outputs_are_there(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side continues, and is offered the shards again that it had released."""
    stopped = gate(monkeypatch, "unpack")
    with config.set({"dataframe.shuffle.method": "gpurt"}):
        out = client.persist(frames().merge(frames("other"), on="key"))
    await until(lambda: any(ts.state == "memory" for ts in outputs(scheduler)))
    before = list(scheduler.extensions["shuffle"].active_shuffles.values())
    (one, _) = crew[0].plugins["shuffle"].shuffle_runs._active_runs.values()
    await one._begin_again("a test")
    assert [run.archived for run in before].count(True) == 1
    stopped.open.set()
    assert len(await client.compute(out)) == len(FRAME.merge(FRAME, on="key"))
    del out


@on_gated_cluster()
async def test_an_output_is_needed_once_more_when_another_has_failed(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be rescheduled for ever: Dask does not restart a shuffle with a failed output."""
    assemble = Receiver.assemble

    def fails(self: Any, partition: int, key: Any) -> Any:
        if partition == 1:
            raise ValueError("a test")
        return assemble(self, partition, key)

    monkeypatch.setattr(Receiver, "assemble", fails)
    out = shuffled().optimize()
    graph, keys = dict(out.__dask_graph__()), out.__dask_keys__()
    (barrier,) = filter(id_from_key, graph)
    first, *others = client.get(graph, [*keys, barrier], sync=False)
    await wait([first, *others])
    expected = await first
    first.release()
    await until(lambda: keys[0] not in scheduler.tasks)
    (first,) = client.get(graph, [keys[0]], sync=False)
    pd.testing.assert_frame_equal(await asyncio.wait_for(first, 20), expected)
    assert runs(*crew) == len(crew), "no other run was needed"
    del first, others


# ---- a worker leaves, or comes, in other ways ----------------------------------------


@on_gated_cluster(workers=4, **{"gpurt.shuffle.retries": 1})
async def test_a_run_loses_workers_more_often_than_it_may_be_mended(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run restarts."""
    stopped = gate(monkeypatch, "transfer")
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    first, second, *_ = [worker for worker in crew if worker.address != stopped.where[0]]
    await first.close(executor_wait=False)
    await until(lambda: counted(scheduler, "shuffle.runs.recovered"))
    assert not counted(scheduler, "shuffle.runs.restarted")
    await second.close(executor_wait=False)
    await until(lambda: counted(scheduler, "shuffle.runs.restarted"))
    stopped.open.set()
    assert_right(await result)
    del result


@on_gated_cluster(workers=3, **{"gpurt.exchange.paths": ["comms"]})
async def test_the_repair_of_a_run_fails(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for an output that is being assembled, so its error reaches no caller; the run restarts."""
    stopped, mend, failed = gate(monkeypatch, "unpack"), Recovery._reassign, threading.Event()

    def fails_once(self: Recovery, *args: Any, **options: Any) -> None:
        if failed.is_set():
            mend(self, *args, **options)
        else:
            failed.set()
            raise ValueError("a test")

    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    monkeypatch.setattr(Recovery, "_reassign", fails_once)
    monkeypatch.setattr(recovery, "MAX_REPAIR_DELAY_S", 3600)
    boxes = {worker.address: worker.plugins["gpurt"].exchange.pools.known("host") for worker in crew}
    await until(lambda: all(box.readers() <= {address} for address, box in boxes.items()))
    leaves = next(worker for worker in crew if worker.address != stopped.where[0])
    await leaves.close(executor_wait=False)
    await until(lambda: leaves.address not in scheduler.workers)
    assert not failed.is_set()
    stopped.open.set()
    assert_right(await asyncio.wait_for(result, 60))
    assert counted(scheduler, "shuffle.runs.restarted") == 1
    assert caplog.text.count("cannot be repaired") == 1
    del result


@on_gated_cluster()
async def test_all_workers_leave_and_another_comes(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No participant is left to repair the run: it restarts on the new worker."""
    stopped = gate(monkeypatch, "transfer")
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    for worker in sorted(crew, key=lambda worker: worker.address == stopped.where[0]):
        await scheduler.remove_worker(worker.address, stimulus_id="a-worker-is-lost")
    assert counted(scheduler, "shuffle.runs.restarted") == 1
    stopped.open.set()
    async with Worker(scheduler.address, nthreads=1) as other:
        assert_right(await result)
        assert runs(other) == 1
    for worker in crew:
        await worker.finished()
    del result


@on_gated_cluster(workers=3, **{"gpurt.takeover": False})
async def test_a_shuffle_of_dasks_own_loses_a_worker(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It restarts as in plain Dask, and the runtime takes no part."""
    barrier, reached_by, goes_on = DataFrameShuffleRun.barrier, list[str](), threading.Event()

    async def stops(self: Any, run_ids: Any) -> int:
        reached_by.append(self.local_address)
        await until(goes_on.is_set)
        return await barrier(self, run_ids)

    monkeypatch.setattr(DataFrameShuffleRun, "barrier", stops)
    with config.set({"dataframe.shuffle.method": "p2p"}):
        result = client.compute(frames().shuffle("key"))
    await until(lambda: reached_by)
    leaves, *stay = sorted(crew, key=lambda worker: worker.address == reached_by[0])
    await leaves.close(executor_wait=False)
    goes_on.set()
    assert_right(await result)
    assert len(reached_by) > 1
    assert not runs(*stay)
    del result


@on_gated_cluster(**{"gpurt.exchange.paths": ["comms"]})
async def test_a_worker_is_closed_that_has_nothing_any_more(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It owns no output, and its shards have been pulled: it is removed from the run without a repair."""
    monkeypatch.setattr(ShuffleSpec, "pick_worker", lambda self, partition, workers: sorted(workers)[0])
    stopped = gate(monkeypatch, "unpack")
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    owner, other = sorted(crew, key=lambda worker: worker.address)
    shards = other.plugins["gpurt"].exchange.pools.known("host")
    await until(lambda: owner.address not in shards.readers())
    (shuffle,) = scheduler.extensions["shuffle"].active_shuffles.values()
    before = shuffle.run_spec.worker_for.epoch
    await other.close(executor_wait=False)
    await until(lambda: other.address not in scheduler.workers)
    assert other.address not in shuffle.participating_workers
    assert shuffle.run_spec.worker_for.epoch == before
    stopped.open.set()
    assert_right(await result)
    assert not counted(scheduler, "shuffle.runs.recovered")
    assert not counted(scheduler, "shuffle.runs.restarted")
    del result


@on_gated_cluster(workers=3)
async def test_a_worker_that_takes_no_part_is_closed(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = gate(monkeypatch, "barrier")
    *part, other = crew
    result = client.compute(shuffled(), workers=[w.address for w in part], allow_other_workers=False)
    await until(stopped.reached.is_set)
    await other.close()
    stopped.open.set()
    assert_right(await result)
    assert runs(*part) == len(part)
    del result


@pytest.mark.parametrize("phase", ["transfer", "barrier", "unpack"])
@on_gated_cluster(**{"distributed.scheduler.allowed-failures": 0})
async def test_no_failures_are_allowed_and_a_worker_is_lost(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    stopped = gate(monkeypatch, phase)
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    (lost,) = [worker for worker in crew if worker.address == stopped.where[0]]
    await scheduler.remove_worker(lost.address, stimulus_id="a-worker-is-lost")
    with pytest.raises(KilledWorker):
        await result
    stopped.open.set()
    await lost.finished()
    result.release()


@pytest.mark.parametrize("lost", ["its worker", "another worker"])
def test_a_result_of_a_transfer_is_fetched_by_the_barrier_and_a_worker_is_lost(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """As where results are not sent ahead. The barrier is sent again when the lost input is transferred."""
    monkeypatch.setattr(SmallResults, "_send_transfers", lambda self, run, barrier: None)
    stopped, gather = Gate(), Worker.gather_dep
    fetched_from: list[str] = []

    @wraps(gather)
    async def stops(self: Any, worker: str, to_gather: Any, *args: Any, **kwargs: Any) -> Any:
        if any("shuffle-transfer" in str(key) for key in to_gather) and stopped.stops(self.address):
            fetched_from.append(worker)
            await until(stopped.open.is_set)
        return await gather(self, worker, to_gather, *args, **kwargs)

    monkeypatch.setattr(Worker, "gather_dep", stops)

    @on_gated_cluster(workers=3, **{"distributed.scheduler.worker-saturation": 1.0})
    async def test(client: Any, scheduler: Any, *crew: Any) -> None:
        result = client.compute(shuffled())
        await until(lambda: fetched_from)
        watched = Watched(scheduler)
        (leaves,) = [
            worker
            for worker in crew
            if worker.address != stopped.where[0]
            and (worker.address == fetched_from[0]) == (lost == "its worker")
        ]
        await scheduler.remove_worker(leaves.address, stimulus_id="a-worker-is-lost")
        stopped.open.set()
        assert_right(await result)
        assert watched.transferred_since() == watched.transferred_by(leaves.address) != set()
        assert not counted(scheduler, "shuffle.runs.restarted")
        await leaves.finished()
        del result

    test()


@on_gated_cluster()
async def test_the_barrier_ends_with_owners_that_are_not_the_current_ones(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = gate(monkeypatch, "barrier")
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    [active] = scheduler.extensions["shuffle"].active_shuffles.values()
    active.run_spec.worker_for.move({})  # the workers are not notified
    stopped.open.set()
    assert_right(await result)
    assert len(stopped.where) > 1, "it was run again"
    del result


@on_gated_cluster(**{"distributed.worker.memory.pause": False})
async def test_a_worker_is_paused_and_another_one_is_lost(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = gate(monkeypatch, "barrier")
    a, b = crew
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    a.status = Status.paused
    await until(lambda: len(scheduler.running) == 1)
    b.batched_stream.close()
    await until(lambda: not scheduler.running)
    stopped.open.set()
    a.status = Status.running
    assert_right(await result)
    del result


@on_gated_cluster(workers=3)
async def test_a_worker_takes_part_that_is_not_wholly_on_and_another_is_closed(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It receives no message about the new owners before its next request, and stays in the run."""
    stopped = gate(monkeypatch, "barrier")
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    late, leaves, _ = sorted(crew, key=lambda worker: worker.address == stopped.where[0])
    ready = scheduler.extensions["gpurt"].workers.ready
    ready.discard(late.address)
    renew = late.stream_handlers.pop(NEW_OWNERS_OP)
    await leaves.close()
    stopped.open.set()
    assert_right(await result)
    assert late.status is Status.running
    late.stream_handlers[NEW_OWNERS_OP] = renew
    ready.add(late.address)
    del result


@on_gated_cluster(workers=3)
async def test_workers_leave_between_repeats(client: Any, scheduler: Any, *crew: Any) -> None:
    for leaves in (None, crew[2], crew[1]):
        if leaves is not None:
            await leaves.close()
        assert_right(await client.compute(shuffled()))


@on_gated_cluster()
async def test_a_worker_joins_and_is_given_an_output(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no part in the run, and redirects the task to the owner."""
    stopped = gate(monkeypatch, "barrier")
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    async with Worker(scheduler.address) as joined:
        await until(lambda: "gpurt" in joined.plugins)
        some = outputs(scheduler)[0]
        (some.annotations or {}).pop("shuffle_original_restrictions", None)
        scheduler.set_restrictions({some.key: {joined.address}})
        stopped.open.set()
        assert_right(await result)
        del result


@on_gated_cluster()
async def test_workers_that_take_part_are_not_chosen_for_scaling_down(
    client: Any, scheduler: Any, *crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = gate(monkeypatch, "barrier")
    assert len(scheduler.workers_to_close(n=2)) == 2
    result = client.compute(shuffled())
    await until(stopped.reached.is_set)
    assert not scheduler.workers_to_close(n=2)
    stopped.open.set()
    assert_right(await result)
    del result
