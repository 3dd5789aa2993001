"""Look up a task's run without the event loop, as long as it is the run that the task belongs to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dask.dataframe as dd
import pandas as pd

from dask_gpurt.observe import Metrics
from dask_gpurt.shuffle.run import ShuffleRun
from dask_gpurt.worker.tasks import RunLookup
from tests.helpers.clusters import cluster


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
