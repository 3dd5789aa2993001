"""Cache planning and fuse tasks on a client with the runtime enabled; results equal Dask's."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster, get_client, wait

import dask_gpurt
from benchmarks.common.waiting import thread_stacks
from dask_gpurt.client.planning import packed
from dask_gpurt.client.session import SESSIONS
from tests.helpers.clusters import Library, cluster, counters
from tests.helpers.nightly import nightly
from tests.helpers.planned import tables
from tests.helpers.waiting import LIMIT_S

PLANS = "planning.plans.reused"


def query(path: Path, library: str, filesystem: str = "fsspec") -> Any:
    with dask.config.set({"dataframe.backend": library}):
        table = dd.read_parquet(path, filesystem=filesystem)
    sums = table.groupby("key")["ratio"].sum(split_out=2).reset_index()
    return table[table.small > 0].merge(sums, on="key", suffixes=("", "_sum"), broadcast=False)


def result(path: Path, library: str, filesystem: str = "fsspec") -> Any:
    found = query(path, library, filesystem).compute()
    found = found.to_pandas() if hasattr(found, "to_pandas") else found
    return found[["key", "ratio", "ratio_sum"]].sort_values(["key", "ratio"]).reset_index(drop=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    table = tables(rows=60)[0][["key", "small", "ratio"]]
    dd.from_pandas(table, npartitions=4).to_parquet(tmp_path / "table")
    return tmp_path / "table"


def reused(client: Client) -> float:
    return float(dask_gpurt.report(client).counters.get(PLANS, 0))


@pytest.mark.parametrize("filesystem", ["fsspec", nightly("arrow")])
def test_plans_are_reused_and_give_the_same(
    client: Client, library: Library, path: Path, filesystem: str
) -> None:
    before = reused(client)
    # Changing a setting, such as the backend, drops the cache.
    with dask.config.set({"dataframe.backend": library.name}):
        first, second = (result(path, library.name, filesystem) for _ in range(2))
    assert reused(client) > before
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        expected = result(path, library.name, filesystem)
    for found in (first, second):
        assert found.equals(expected) or (found - expected).abs().max().max() < 1e-9


def test_that_the_scheduler_keeps_no_plans_once_the_runtime_is_off(path: Path) -> None:
    async def stop(dask_scheduler: Any) -> None:
        await dask_scheduler.extensions["gpurt"].stop()

    with cluster("pandas", workers=1, here=True) as client:
        plan = packed.pack(query(path, "pandas").optimize().expr)
        assert pickle.loads(pickle.dumps(plan)) is plan  # kept in this process, which the scheduler is in
        client.run_on_scheduler(stop)
        assert pickle.loads(pickle.dumps(plan)) is not plan


@pytest.mark.parametrize("setting", [False, nightly("auto")])
def test_nothing_is_written_if_that_is_off(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: bool | str
) -> None:
    SESSIONS.save_stores()  # of earlier tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with dask.config.set({"gpurt.planning.store": setting}), cluster("pandas", workers=1, here=True):
        result(path, "pandas")
        SESSIONS.save_stores()
    assert (tmp_path / "cache").exists() == (setting == "auto")


def tasks(client: Client) -> int:
    """Return the number of tasks of the last computation."""
    return int(
        client.run_on_scheduler(lambda dask_scheduler: sum(map(len, dask_scheduler.computations[-1].groups)))
    )


def test_computations_have_fewer_tasks_and_the_same_results(path: Path) -> None:
    with cluster("pandas", here=True, planning__optimise=False) as client:
        expected = result(path, "pandas")
        unfused = tasks(client)
        dask_gpurt.disable(client)
        with dask.config.set({"gpurt.planning.optimise": True}):
            dask_gpurt.enable(client)
        assert result(path, "pandas").equals(expected)
        assert tasks(client) <= unfused / 2
        dask_gpurt.disable(client)
        assert result(path, "pandas").equals(expected)
        assert tasks(client) >= unfused


def test_collections_are_published_sent_and_pickled(client: Client, path: Path) -> None:
    """Each is pickled with the function that makes collections, which the planner has replaced."""
    rows = dd.read_parquet(path)
    total, joined = int(rows.small.sum().compute()), rows.merge(rows[["key"]].drop_duplicates(), on="key")
    client.publish_dataset(joined=joined, kept=rows.persist())
    try:
        for name in ("joined", "kept"):
            assert client.get_dataset(name).small.sum().compute() == total
    finally:
        client.unpublish_dataset("joined")
        client.unpublish_dataset("kept")
    assert pickle.loads(pickle.dumps(joined)).small.sum().compute() == total
    assert client.submit(len, client.submit(list, rows)).result() == len(rows.columns)


def test_an_array_of_chosen_rows_is_planned(client: Client, path: Path) -> None:
    """Its expression has a dimension, but no columns."""
    rows = dd.read_parquet(path)
    total = rows[rows.small > 0].small.values.sum().compute()
    assert total == rows[rows.small > 0].small.sum().compute()
    assert "planning.as-dask" not in dask_gpurt.report(client).fallbacks


def test_computations_at_the_same_time_are_of_the_same_shuffle(
    client: Client, library: Library, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tasks fused in two ways have two names, and a run serves each output only once."""
    with dask.config.set({"dataframe.backend": library.name}):
        shuffled = dd.read_parquet(path).shuffle("key")
        results = [
            shuffled.ratio.sum(),
            shuffled.ratio.max(),
            (shuffled.ratio * 2).sum(),
            shuffled.groupby("key").ratio.sum().sum(),
            dd.read_parquet(path).ratio.min(),
        ]
        expected = [590.0, 59 / 3, 1180.0, 590.0, 0.0]
        for _ in range(2):
            futures = client.compute(results[:1]) + [client.compute(each) for each in results]
            together = client.compute(results)
            assert client.gather(futures) == pytest.approx(expected[:1] + expected)
            assert client.gather(together) == pytest.approx(expected)
            del futures, together
    assert "different `run_spec`" not in caplog.text
    assert dask_gpurt.report(client).counters.get("shuffle.runs.recovered", 0) == 0


def test_more_workers_have_queries_planned_anew(
    client: Client, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned() -> float:
        dd.read_parquet(path)[["key", "ratio"]].groupby("key").ratio.sum().compute()
        return counters(client)["planning.plans.computed"]

    first, again = planned(), planned()
    monkeypatch.setattr("dask_gpurt.dask_hooks.computing.cluster_size", lambda client: (3, 7))
    assert (again, planned()) == (first, first + 1)


def test_tasks_in_the_process_of_the_client_read_files_as_they_are(tmp_path: Path) -> None:
    """Arrow keeps the footer of a file that such a task has read with what the client knows of the file."""
    pd.DataFrame({"key": range(10)}).to_parquet(tmp_path / "0.parquet")
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "processes": False}
    with LocalCluster(**options, dashboard_address=":0") as local, Client(local) as client:
        dask_gpurt.enable(client)
        kept = dd.read_parquet(tmp_path, filesystem="arrow")
        for rows in (10, 1_000, 20):
            table = pd.DataFrame({"key": range(rows)})
            table.to_parquet(tmp_path / "0.parquet")
            assert [*kept[kept.key != 3].compute().key] == [*table[table.key != 3].key]


# ---- in tasks, on workers with several threads ----------------------------------------------------

TASKS = 4


def sort_and_join(number: int) -> int:
    """Compute dataframes on the cluster that this task is part of, by a plan that computes divisions too."""
    get_client()
    left = pd.DataFrame({"k": np.arange(400) % 10, "x": np.arange(400)[::-1] + number})
    right = pd.DataFrame({"k": np.arange(10), "y": np.arange(10)})
    joined = dd.from_pandas(left, npartitions=4).merge(dd.from_pandas(right, npartitions=2), on="k")
    return int(joined.sort_values("x").y.sum().compute())


def run_tasks(client: Client) -> None:
    """Check the results of tasks that compute dataframes; if they hang, fail with the workers' stacks."""
    tasks = client.map(sort_and_join, range(TASKS), pure=False)
    try:
        wait(tasks, timeout=2 * LIMIT_S)
    except TimeoutError:
        pytest.fail(json.dumps(client.run(thread_stacks), indent=1).replace("\\n", "\n"))
    assert client.gather(tasks) == [1_800] * TASKS


def test_tasks_compute_dataframes_on_workers_with_several_threads() -> None:
    with cluster(workers=1, threads=4) as client:
        if sys.version_info < (3, 12):  # the first Python without a lock for all instances
            assert not any(client.run(_reads_as_python_does).values())
        run_tasks(client)
        dask_gpurt.disable(client)
        assert all(client.run(_reads_as_python_does).values())


def _reads_as_python_does() -> bool:
    return not hasattr(vars(cached_property)["__get__"], "__wrapped__")


# ---- two clusters, one without the runtime --------------------------------------------------------

ROWS = 400
FRAME = pd.DataFrame({"key": np.arange(ROWS) % 7, "row": np.arange(ROWS)})


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[Client, Client]]:
    """Return a client with the runtime, and a plain one."""
    with ExitStack() as stack:
        served, plain = (
            stack.enter_context(
                Client(
                    stack.enter_context(
                        LocalCluster(
                            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
                        )
                    ),
                    set_as_default=False,
                )
            )
            for _ in range(2)
        )
        dask_gpurt.enable(served)
        yield served, plain
        dask_gpurt.disable(served)


WAYS: dict[str, Callable[[Client, Any], Any]] = {
    "compute": lambda client, frame: client.compute(frame).result(),
    "persist": lambda client, frame: client.compute(client.persist(frame)).result(),
    "scheduler": lambda client, frame: frame.compute(scheduler=client),
    "get": lambda client, frame: dask.compute(frame, scheduler=client.get)[0],
    "current": lambda client, frame: frame.compute(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("current", ["served", "plain"])
def test_each_computation_goes_by_its_client(clients: tuple[Client, Client], current: str, way: str) -> None:
    served, plain = clients
    with served.as_current() if current == "served" else plain.as_current():
        runs = dask_gpurt.report(served)["counters"].get("shuffle.runs", 0)
        for client in (plain, served) if way != "current" else [served if current == "served" else plain]:
            shuffled = dd.from_pandas(FRAME, npartitions=3).shuffle("key")
            found = WAYS[way](client, shuffled)
            assert sorted(found.row) == list(range(ROWS))
        expected = runs + (way != "current" or current == "served")
        assert dask_gpurt.report(served)["counters"].get("shuffle.runs", 0) == expected
