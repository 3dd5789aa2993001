"""Disable the runtime, or parts of it, on an incompatible Dask or system; coexist with other plugins."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from click.testing import CliRunner
from dask.dataframe.dask_expr import _merge
from distributed import Scheduler, Worker
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

import dask_gpurt
from dask_gpurt import preload
from dask_gpurt.cli import main
from dask_gpurt.cli.doctor import examine
from dask_gpurt.dask_hooks import UnsupportedError
from tests.helpers.in_process import gen_client_cluster, on_plain_cluster, whole_state

FRAME = pd.DataFrame({"key": [row % 17 for row in range(200)], "row": range(200)})


async def runs_of_a_shuffle(client: Any) -> float:
    """Shuffle, and return the number of workers on which it used the runtime."""

    async def runs() -> float:
        workers = (await dask_gpurt.report(client))["workers"].values()
        return sum(worker["counters"].get("shuffle.runs", 0) for worker in workers)

    before = await runs()
    with client.as_current():
        found = await client.compute(dd.from_pandas(FRAME, npartitions=4).shuffle("key"))
    assert sorted(found["row"]) == list(range(200))
    return await runs() - before


def another_create(self: Any, shuffle_id: Any, key: Any, worker: str, priority: int) -> Any:
    """Replace a method, as a future version of Dask might."""
    raise AssertionError("Dask's own shuffles do not come here in this test")


@on_plain_cluster()
async def test_another_dask_keeps_it_off_and_is_told_of_once(
    client: Any,
    scheduler: Any,
    a: Any,
    b: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = r"2026\.7\.1 to .*ShuffleSchedulerPlugin\._create takes \(.*priority\), expected"
    before = whole_state(scheduler, a, b)
    with monkeypatch.context() as patch:
        patch.setattr(ShuffleSchedulerPlugin, "_create", another_create)
        with pytest.raises(UnsupportedError, match=said):
            await dask_gpurt.enable(client)
        assert whole_state(scheduler, a, b) == before
        caplog.clear()
        with caplog.at_level(logging.ERROR, "dask_gpurt"):
            await preload.activate(scheduler)
        assert [record.message.partition(":")[0] for record in caplog.records] == ["the runtime stays off"]
        assert whole_state(scheduler, a, b) == before
        found = examine()
        assert not found["ok"]
        assert any("_create" in problem for problem in found["problems"])
    await dask_gpurt.enable(client)
    assert dask_gpurt.is_enabled(client)


def test_the_doctor_says_why_it_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShuffleSchedulerPlugin, "_create", another_create)
    said = CliRunner().invoke(main, ["doctor"])
    text = " ".join(said.stdout.split())
    assert said.exit_code == 1
    assert "work as the runtime expects, 1 differ" in text
    assert "Differs shuffles on the scheduler, ShuffleSchedulerPlugin._create takes" in text
    assert "_create takes (self, shuffle_id, key, worker, priority)" in text
    assert "it stays off" in text


#: A Dask that has moved a function which its other modules import at import time.
MOVED = """\
import sys
import distributed
from distributed.shuffle import _shuffle
del _shuffle._get_worker_for_range_sharding
from dask_gpurt.cli import main
main(["doctor"])
"""


@pytest.mark.slow
def test_the_doctor_runs_where_a_name_has_moved() -> None:
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "_get_worker_for_range_sharding does not exist" in " ".join(done.stdout.split())


@on_plain_cluster()
async def test_without_a_part_that_is_not_needed_it_goes_on(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks then ask the event loop for their run, since the lookup's seam does not match."""
    find = ShuffleWorkerPlugin.get_shuffle_run

    def another(self: Any, shuffle_id: Any, run_id: int, patience: float = 1.0) -> Any:
        return find(self, shuffle_id, run_id)

    monkeypatch.setattr(ShuffleWorkerPlugin, "get_shuffle_run", another)
    await dask_gpurt.enable(client)
    assert await runs_of_a_shuffle(client) == 2
    for worker in (a, b):
        fallbacks = worker.plugins["gpurt"].metrics.snapshot()["fallbacks"]
        assert "patience" in fallbacks["shuffle.run-lookup"]["reason"]
        assert not vars(worker.plugins["shuffle"]).keys() & {"get_shuffle_run", "get_or_create_shuffle"}


@on_plain_cluster()
async def test_a_worker_with_another_handler_of_its_data_keeps_its_own(
    client: Any, scheduler: Any, a: Any, b: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All or none of `execute`, `gather_dep` and `get_data` are replaced, or peers would get wrong data."""
    get_data = Worker.get_data

    async def another(self: Any, comm: Any, keys: Any, who: Any = None, trust: bool = False) -> Any:
        return await get_data(self, comm, keys, who)

    before = whole_state(scheduler, a, b)
    with monkeypatch.context() as patch:
        patch.setattr("dask_gpurt.dask_hooks.require", lambda: None)  # passes on client and scheduler
        patch.setattr(Worker, "get_data", another)
        with pytest.raises(UnsupportedError, match=r"Worker\.get_data takes \(.*trust\), expected"):
            await dask_gpurt.enable(client)
    assert whole_state(scheduler, a, b) == before
    assert not {"execute", "gather_dep"} & vars(a).keys()


@gen_client_cluster(nthreads=[("127.0.0.1", 1)])
async def test_a_scheduler_with_another_dask_than_the_client_says_so(
    client: Any, scheduler: Any, a: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check passes on the client; the scheduler's check counts too."""
    before = set(scheduler.plugins), set(scheduler.extensions), set(a.plugins)
    with monkeypatch.context() as patch:
        checks = iter([None, UnsupportedError("of another version")])
        patch.setattr("dask_gpurt.dask_hooks.require", lambda: _raise(next(checks)))
        with pytest.raises(UnsupportedError, match="of another version"):
            await dask_gpurt.enable(client)
    assert (set(scheduler.plugins), set(scheduler.extensions), set(a.plugins)) == before


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def test_every_process_looks_at_expressions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One verdict: a scheduler is not switched on where its clients would say that the runtime stays off."""

    @gen_client_cluster(nthreads=[])
    async def run(client: Any, scheduler: Scheduler) -> None:
        monkeypatch.setattr(_merge.Merge, "_lower", lambda self, optimizer: None)
        with pytest.raises(UnsupportedError, match=r"Merge\._lower takes \(self, optimizer\)"):
            await dask_gpurt.enable(client)
        await preload.activate(scheduler)
        assert "gpurt" not in scheduler.extensions
        assert "the runtime stays off" in caplog.text

    # The method that this process has replaced hides it.
    patched = vars(_merge.Merge)["_lower"]
    monkeypatch.setattr(_merge.Merge, "_lower", getattr(patched, "__wrapped__", patched))
    run()


# ---- beside others ---------------------------------------------------------------------------


#: Windows: without the modules and functions that Python has on Linux only.
ELSEWHERE = """\
import asyncio, logging, os, sys, types
from distributed import Client, Scheduler

# What is imported before has its own ways for other systems, and Dask's are not there on Linux.
sys.modules["fcntl"] = None
for name in ("memfd_create", "sched_getaffinity", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)
import dask_gpurt
from dask_gpurt import dask_hooks, preload
dask_hooks.sys = types.SimpleNamespace(platform="win32")

async def main():
    async with Scheduler(dashboard_address=":0", host="127.0.0.1", port=0) as scheduler:
        await preload.activate(scheduler)
        async with Client(scheduler.address, asynchronous=True) as client:
            assert not dask_gpurt.is_enabled(client)
            try:
                await dask_gpurt.enable(client)
            except RuntimeError as error:
                print(error)

logging.basicConfig()
asyncio.run(main())
"""


@pytest.mark.slow
def test_elsewhere_than_on_linux_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("the runtime works on Linux only, this is win32")
    assert "the runtime stays off: the runtime works on Linux only" in done.stderr
