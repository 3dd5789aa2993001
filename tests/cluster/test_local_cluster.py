"""Start a cluster for a command, or take one that is running, and interrupt the command."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import click
import pytest
from distributed import LocalCluster, WorkerPlugin
from distributed.protocol.pickle import dumps

from benchmarks.chaos import command as chaos
from dask_gpurt.cli.cluster import local_cluster
from tests.helpers.waiting import until


@pytest.fixture(autouse=True)
def taken() -> Iterator[None]:
    """Take ctrl-C as a command in a terminal does: a shell has its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_it_is_interrupted_while_the_scheduler_waits_for_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    waiting: list[Future[Any]] = []

    def command() -> None:
        with local_cluster("pandas", 1) as cluster:
            cluster.wait_for_workers(1)
            call = {"op": "run", "function": dumps(time.sleep), "args": dumps((60,))}
            broadcast = cluster.scheduler.broadcast(msg=call, on_error="return")
            waiting.append(asyncio.run_coroutine_threadsafe(broadcast, cluster.loop.asyncio_loop))
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        command()
    waiting[0].result(10)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_its_client_is_interrupted_while_it_gathers(caplog: pytest.LogCaptureFixture) -> None:
    """The client gives up its tasks before the cluster closes, and a dropped task would be logged."""

    class Client:
        def __init__(self, cluster: Any):
            pass

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            logging.getLogger("asyncio").error("Task exception was never retrieved")

    def command() -> None:
        with local_cluster("pandas", 1) as cluster, Client(cluster):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        command()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
    with local_cluster("pandas", 1):
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class NoMemory(WorkerPlugin):
    """Fail as the RMM pool of a worker on a full GPU."""

    def setup(self, worker: Any) -> None:
        raise MemoryError("the GPU is full")


class ClusterOfDaskCuda(LocalCluster):
    """Start workers as dask-cuda's cluster does, which does not notice if one fails; the second fails."""

    def __init__(self, rmm_pool_size: float, n_workers: int, rmm_async: bool, **options: Any):
        super().__init__(n_workers=0, **{**options, "processes": False, "silence_logs": logging.CRITICAL})
        self.scale(n_workers)
        self.sync(self._correct_state)

    def new_worker_spec(self) -> dict[Any, Any]:
        options = {**self.new_spec["options"], "plugins": {NoMemory()} if self.worker_spec else set()}
        return {len(self.worker_spec): {**self.new_spec, "options": options}}


def test_a_worker_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask_cuda", SimpleNamespace(LocalCUDACluster=ClusterOfDaskCuda))
    with pytest.raises(click.ClickException, match="only 1 of 2 workers started"), local_cluster("cudf", 2):
        pytest.fail("a command would run on fewer workers than it says")


def test_chaos_begins_once_the_workers_of_a_running_cluster_have_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
