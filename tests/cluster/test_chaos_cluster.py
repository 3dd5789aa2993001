"""Run chaos on a cluster that is running already."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import click
import pytest
from distributed import LocalCluster

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
