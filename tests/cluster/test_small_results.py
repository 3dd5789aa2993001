"""Send the results of transfers and barriers along with their dependents, so that no worker fetches them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.utils import key_split
from distributed import wait

from dask_gpurt.dask_hooks.worker import put_results
from dask_gpurt.observe import Metrics
from dask_gpurt.scheduler.results import REPORTS, SmallResults
from dask_gpurt.shuffle.messages import NOTE, Transferred
from dask_gpurt.shuffle.run import ShuffleRun
from dask_gpurt.worker.tasks import RunLookup
from tests.helpers.clusters import cluster
from tests.helpers.in_process import on_cluster, until

PARTS, ROWS = 6, 60
#: The active memory manager drops unneeded replicas of results every two seconds.
WITHOUT_MANAGER: dict[str, Any] = {"distributed.scheduler.active-memory-manager.start": False}


def frame(seed: int) -> Any:
    """Return a collection whose shuffle differs for each seed."""
    rows = np.arange(ROWS)
    return dd.from_pandas(pd.DataFrame({"key": rows % 7, "row": rows, "seed": seed}), npartitions=PARTS)


def fetched(*workers: Any) -> set[str]:
    """Return the prefixes of the keys that workers fetched from peers."""
    return {
        key_split(key) for worker in workers for log in worker.transfer_incoming_log for key in log["keys"]
    }


def sent(scheduler: Any) -> float:
    metrics: Metrics = scheduler.extensions["gpurt"].metrics
    return float(metrics.snapshot()["counters"].get("shuffle.results.sent", 0))


def barrier_of(scheduler: Any) -> Any:
    (barrier,) = (task for key, task in scheduler.tasks.items() if str(key).startswith("shuffle-barrier-"))
    return barrier


async def shuffled(client: Any, seed: int) -> Any:
    with dask.config.set({"dataframe.shuffle.method": "gpurt"}):
        out = client.persist(frame(seed).shuffle("key"))
    await wait(out)
    assert sorted((await client.compute(out)).row) == list(range(ROWS))
    return out


@on_cluster(workers=3, **WITHOUT_MANAGER)
async def test_no_task_of_a_shuffle_fetches_the_result_of_another(
    client: Any, scheduler: Any, *workers: Any
) -> None:
    out = await shuffled(client, 0)
    barrier = barrier_of(scheduler)
    assert not {"shuffle-transfer", "shuffle-barrier"} & fetched(*workers)
    assert len(barrier.who_has) == 3  # each worker owns outputs
    replicas = sum(len(task.who_has) - 1 for task in (barrier, *barrier.dependencies))
    assert sent(scheduler) == replicas >= 2
    del out


@on_cluster(workers=2)
async def test_sent_results_are_released_with_the_shuffle(client: Any, scheduler: Any, *workers: Any) -> None:
    out = await shuffled(client, 0)
    assert sent(scheduler)
    del out
    await until(lambda: not any(worker.data for worker in workers))
    await until(lambda: not any(worker.state.tasks for worker in workers))
    assert not scheduler.tasks


@on_cluster(workers=2)
async def test_without_notes_results_are_fetched(client: Any, scheduler: Any, *workers: Any) -> None:
    results = scheduler.extensions["gpurt"].shuffles.results
    results.uninstall()
    await shuffled(client, 0)
    assert not sent(scheduler)
    assert fetched(*workers) >= {"shuffle-transfer", "shuffle-barrier"}


@on_cluster(workers=2)
async def test_a_result_that_is_being_fetched_is_not_taken(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    """The scheduler counts it as a replica, and is then notified that it is not."""
    one = client.submit(int, 1, workers=[a.address], key="one")
    await one
    told: list[dict[str, Any]] = []

    def send(message: dict[str, Any]) -> None:
        told.append(message)
        b.batched_send(message)

    fetching: Any = SimpleNamespace(
        state=SimpleNamespace(tasks={"one": SimpleNamespace(state="flight")}),
        batched_stream=SimpleNamespace(send=send),
    )
    scheduler.add_replica(scheduler.tasks["one"], scheduler.workers[b.address])
    put_results(fetching, {"one": 1})
    assert [message["op"] for message in told] == ["release-worker-data"]
    await until(lambda: len(scheduler.tasks["one"].who_has) == 1)
    assert "one" not in b.data


@on_cluster(workers=1)
async def test_a_result_of_an_earlier_run_of_a_task_is_replaced(
    client: Any, scheduler: Any, worker: Any
) -> None:
    """The worker has fetched it, and the scheduler had no report of that when it ran the task again."""
    one = client.submit(int, 1, key="one")
    await one
    put_results(worker, {"one": 2})
    assert worker.data["one"] == 2
    assert await client.gather(one) == 2


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_about_the_previous_result_comes_late(report: str) -> None:
    """The scheduler has sent the result of another run of the task meanwhile, and counts it as a replica."""
    told, counted = list[str](), list[str]()
    scheduler: Any = SimpleNamespace(
        extensions={"shuffle": SimpleNamespace(active_shuffles={})},
        stream_handlers={name: lambda key, worker, **_: told.append(worker) for name in REPORTS},
        send_all=lambda *messages: None,
        add_replica=lambda task, worker: counted.append(worker.address),
    )
    original = scheduler.stream_handlers[report]
    a, b = "tcp://a:1", "tcp://b:1"
    results = SmallResults(scheduler, {a, b}, Metrics())
    results.install()
    handle = scheduler.stream_handlers[report]
    results._send(SimpleNamespace(address=a), {MagicMock(key="barrier", who_has=()): 7})
    assert counted == [a]

    def reports() -> list[str]:
        told.clear()
        for key, worker in (("barrier", a), ("barrier", b), ("another", a)):
            handle(key=key, worker=worker, stimulus_id="")
        return told

    assert reports() == [b, a]
    results.confirmed(a, ["barrier"])
    assert reports() == [a, b, a]
    results._send(SimpleNamespace(address=a), {MagicMock(key="barrier", who_has=()): 8})
    assert reports() == [b, a]
    results.on_worker_removed(a)
    assert reports() == [a, b, a], "another worker may join at its address"
    results.uninstall()
    assert scheduler.stream_handlers[report] is original


def test_a_note_of_another_run_or_dispatch_tells_nothing() -> None:
    metadata: dict[str, Any] = {}
    result = Transferred(4, 2, (7, 1), "transfer-2", "tcp://a:1")  # type: ignore[arg-type]
    result.note(metadata)
    task: Any = SimpleNamespace(key="transfer-2", state="memory", run_id=7, metadata=metadata)
    known = Transferred.of_task(task, 4)
    assert known is not None
    assert (known, known.__dict__) == (result, result.__dict__)
    assert Transferred.of_task(task, 5) is None
    task.run_id = 8  # it was sent to a worker again
    assert Transferred.of_task(task, 4) is None
    task.run_id, task.state = 7, "processing"
    assert Transferred.of_task(task, 4) is None
    task.state, task.metadata = "memory", None
    assert Transferred.of_task(task, 4) is None
    assert metadata.keys() == {NOTE}


# ---- the run of a task is looked up without the event loop ----------------------------------------


def count_asking(dask_worker: Any) -> None:
    runs = dask_worker.plugins["shuffle"].shuffle_runs
    runs.asked = []

    dasks = runs.get_or_create

    async def ask(*args: Any) -> Any:
        runs.asked.append(args)
        return await dasks(*args)

    runs.get_or_create = ask


def test_only_the_first_task_of_a_run_asks_the_event_loop() -> None:
    with cluster() as client:
        client.run(count_asking)
        frame = dd.from_pandas(pd.DataFrame({"key": range(1000)}), npartitions=16)
        assert len(frame.shuffle("key").compute()) == 1000
        asked = client.run(lambda dask_worker: len(dask_worker.plugins["shuffle"].shuffle_runs.asked))
    assert set(asked.values()) <= {0, 1}  # once the other worker has announced the run, no task asks
    assert any(asked.values())


class Asked(Exception):
    """Dask's own lookup was called."""


def ask(*_: Any, **__: Any) -> None:
    raise Asked


def found(run: Any, *which: Any) -> bool:
    plugin = SimpleNamespace(
        shuffle_runs=SimpleNamespace(_active_runs={"a": run}),
        get_or_create_shuffle=ask,
        get_shuffle_run=ask,
    )
    run_lookup = RunLookup(SimpleNamespace(plugins={"shuffle": plugin}), Metrics())
    run_lookup.install()
    find = plugin.get_shuffle_run if len(which) == 2 else plugin.get_or_create_shuffle
    try:
        assert find(*which) is run
    except Asked:
        return False
    finally:
        run_lookup.uninstall()
        assert plugin.get_or_create_shuffle is plugin.get_shuffle_run is ask
    return True


def a_run(**state: Any) -> ShuffleRun:
    run = object.__new__(ShuffleRun)
    usual = {"run_id": 2, "closed": False, "_exception": None, "_exchange": SimpleNamespace(closed=False)}
    vars(run).update({**usual, **state})
    return run


def test_a_run_that_goes_on_is_found() -> None:
    assert found(a_run(), "a")
    assert found(a_run(), "a", 2)


def test_about_any_other_run_dask_is_asked() -> None:
    assert not found(a_run(), "another")
    assert not found(a_run(), "a", 1)
    assert not found(a_run(), "a", 3)
    assert not found(a_run(closed=True), "a")
    assert not found(a_run(_exception=ValueError("lost")), "a", 2)
    assert not found(SimpleNamespace(run_id=2), "a")  # a run of Dask's own


def test_without_dasks_plugin_there_is_nothing_to_find() -> None:
    metrics = Metrics()
    run_lookup = RunLookup(SimpleNamespace(plugins={}), metrics)
    run_lookup.install()
    run_lookup.uninstall()
    assert "shuffle.run-lookup" in metrics.snapshot()["fallbacks"]
