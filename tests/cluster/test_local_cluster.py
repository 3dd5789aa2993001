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
from distributed import Client, LocalCluster, WorkerPlugin
from distributed.protocol.pickle import dumps

from benchmarks.chaos import FAULTS, Plan, files
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


# ---- chaos on a cluster that is running already ---------------------------------------------------


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
