"""Run chaos on a cluster that is running already."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import click
import pytest
from distributed import Client, LocalCluster

from benchmarks.chaos import FAULTS, Plan, files
from benchmarks.chaos import command as chaos
from tests.helpers.waiting import until


def test_it_begins_once_the_workers_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        ThreadPoolExecutor(1) as thread,
    ):
        address = cluster.scheduler.address

        def workers() -> int:
            with chaos.running_cluster(address, 1) as (client, _, _):
                return len(client.nthreads())

        began = thread.submit(workers)
        until(lambda: any(name.startswith("Client-") for name in cluster.scheduler.clients))
        cluster.scale(1)
        assert began.result() == 1
        monkeypatch.setattr(chaos, "PATIENCE_S", 0.1)
        with (
            pytest.raises(click.ClickException, match=r"has 1 workers after 0\.1 s instead of 2"),
            chaos.running_cluster(address, 2),
        ):
            pass


def test_an_answer_is_not_the_one_before_that_a_busy_client_still_holds() -> None:
    """Without the runtime: Dask gives a result that is still held again, though files were replaced."""

    class Busy:
        """Keep the thread that releases futures busy as soon as a result has come."""

        def __init__(self, client: Client):
            self.sync, self.client = client.sync, client

        def compute(self, *args: Any, **how: Any) -> Any:
            future: Any = self.client.compute(*args, **how)

            def result() -> Any:
                found = future.result()
                self.client.loop.add_callback(time.sleep, 0.5)
                return found

            return SimpleNamespace(result=result)

    specs = Plan(5, ["files"], list(FAULTS)).step(0).operations
    spec = next(each for each in specs if not each.variant % 3)  # in a store
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        operation = files.Files()
        busy: Any = Busy(client)
        parts = operation.compute(spec, operation.build(spec, "pandas"), busy)
    assert operation.check(spec, parts, "pandas") is None
