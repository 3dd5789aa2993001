"""Tasks find their run without the event loop, as long as it is the one that they belong to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import dask.dataframe as dd
import pandas as pd
from distributed import Event
from distributed.core import Status

from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError, active_runs, transferred_shuffle
from dask_gpurt.observe import Metrics
from dask_gpurt.plugins.run_lookup import RunLookup
from dask_gpurt.shuffle.run import ShuffleRun
from tests.helpers.clusters import cluster
from tests.helpers.in_process import on_cluster, until


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
    # The worker, as it hears of the first task, and this task, if it begins before the answer is there.
    # Once the other worker has told of the run, none asks.
    assert set(asked.values()) <= {0, 1, 2}
    assert any(asked.values())


def test_the_run_is_asked_for_before_its_first_task_begins() -> None:
    @on_cluster(workers=1, **{"dataframe.convert-string": False})
    async def run(client: Any, scheduler: Any, worker: Any) -> None:
        meta = pd.DataFrame({"key": [0]}).iloc[:0]
        shuffled = client.persist(dd.from_map(make_in_turn, range(4), meta=meta).shuffle("key"))
        await until(lambda: any(r.is_open for r in active_runs(worker.plugins["shuffle"]).values()))
        assert transfers(worker)
        assert not any(worker.state.tasks[key].state == "executing" for key in transfers(worker))
        await Event("let go", client=client).set()
        assert len(await client.compute(shuffled)) == 40

    run()


def make_in_turn(_: int) -> pd.DataFrame:
    """Make the first one at once. The next one keeps the only thread, so the first one's transfer waits."""
    if Event("first").is_set():
        Event("let go").wait()
    Event("first").set()
    return pd.DataFrame({"key": range(10)})


def transfers(worker: Any) -> list[Any]:
    return [key for key in worker.state.tasks if transferred_shuffle(key) is not None]


def test_transfers_name_their_shuffle() -> None:
    assert transferred_shuffle(("shuffle-transfer-abc", 1)) == "abc"
    assert transferred_shuffle(("hash-join-transfer-abc", 1)) == "abc"
    for other in (
        "shuffle-transfer-abc",
        ("shuffle-barrier-abc", 0),
        (("shuffle-transfer-abc",), 0),
        ("x", 1),
    ):
        assert transferred_shuffle(other) is None


def test_a_run_that_can_not_be_had_is_asked_for_again() -> None:
    asked = []

    async def refuse(*args: Any) -> None:
        asked.append(args)
        raise P2PConsistencyError("not now")

    async def run() -> None:
        runs = SimpleNamespace(_active_runs={}, get_or_create=refuse)
        tasks = list[asyncio.Task[None]]()
        worker = SimpleNamespace(
            plugins={"shuffle": SimpleNamespace(shuffle_runs=runs)},
            status=Status.running,
            _ongoing_background_tasks=SimpleNamespace(
                call_soon=lambda function, *args: tasks.append(asyncio.create_task(function(*args)))
            ),
        )
        run_lookup = RunLookup(worker, Metrics())
        key = ("shuffle-transfer-abc", 0)
        run_lookup.expect(key)
        run_lookup.expect(("shuffle-transfer-abc", 1))  # it is being asked for
        await asyncio.gather(*tasks)
        assert asked == [("abc", key)]
        run_lookup.expect(key)
        await asyncio.gather(*tasks)
        assert asked == [("abc", key)] * 2
        worker.status = Status.closing
        run_lookup.expect(key)
        assert len(tasks) == 2

    asyncio.run(run())


class Asked(Exception):
    """Dask was asked."""


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
    assert not found(SimpleNamespace(run_id=2), "a")  # of Dask's own


def test_without_dasks_plugin_there_is_nothing_to_find() -> None:
    metrics = Metrics()
    run_lookup = RunLookup(SimpleNamespace(plugins={}), metrics)
    run_lookup.install()
    run_lookup.uninstall()
    assert "shuffle.run-lookup" in metrics.snapshot()["fallbacks"]
