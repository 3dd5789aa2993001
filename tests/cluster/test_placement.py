"""Run placement on a cluster: enabled and disabled, and with workers that join and leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, Event, SchedulerPlugin, as_completed, wait

import dask_gpurt
from dask_gpurt.tools.testing import differing_links
from tests.helpers.clusters import cluster, counters
from tests.helpers.waiting import until


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with differing_links(), cluster(workers=2, placement__enabled=True) as client:
        yield client


def add(*numbers: int) -> int:
    return sum(numbers)


def test_choices_are_counted(client: Client) -> None:
    first = client.submit(add, 1, 2)
    assert client.submit(add, first, 3).result() == 6
    assert counters(client)["placement.decisions"] >= 2


def test_workers_come_and_go_under_load(client: Client) -> None:
    import time

    def slow(i: int) -> int:
        time.sleep(0.02)
        return i

    local: Any = client.cluster
    futures = client.map(slow, range(300))
    total = client.submit(sum, futures)
    local.scale(3)
    client.wait_for_workers(3, timeout=60)
    local.scale(2)
    assert total.result(timeout=120) == sum(range(300))
    local.scale(2)
    client.wait_for_workers(2, timeout=60)
    assert not _fallbacks(client)


def test_a_restart_in_the_middle_of_work(client: Client) -> None:
    import time

    def slow(i: int) -> int:
        time.sleep(0.02)
        return i

    first = client.map(slow, range(200), pure=False)
    total = client.submit(sum, first)
    next(iter(as_completed(first)))
    client.restart(timeout=120)
    assert total.cancelled()
    before = counters(client)["placement.decisions"]
    again = client.map(slow, range(20), pure=False)
    assert client.submit(sum, again).result(timeout=120) == sum(range(20))
    assert counters(client)["placement.decisions"] > before
    assert not _fallbacks(client)


@pytest.mark.slow
def test_a_cluster_adapts_to_its_load_and_back() -> None:
    def waits(i: int) -> int:
        assert Event("all at work").wait(timeout=60)
        return i

    with differing_links(), cluster(workers=1, placement__enabled=True) as client:
        local: Any = client.cluster
        seen: list[int] = []
        plugin = Arrivals(seen)
        local.scheduler.add_plugin(plugin)
        local.adapt(minimum=1, maximum=3, interval="100ms", target_duration="500ms", wait_count=3)
        numbers = client.map(waits, range(60))
        pairs = client.map(add, numbers[::2], numbers[1::2])
        client.wait_for_workers(3, timeout=60)
        until(lambda: all(client.processing().values()))  # then each worker has a result when it is retired
        Event("all at work", client=client).set()
        assert client.submit(sum, pairs).result(timeout=120) == sum(range(60))
        assert plugin.alone.wait(60)  # the results stay, on the remaining worker
        assert max(seen) == 3
        assert client.submit(sum, numbers).result(timeout=60) == sum(range(60))
        assert not _fallbacks(client)


class Arrivals(SchedulerPlugin):
    """Record the number of workers, and when only one is left."""

    name = "arrivals"

    def __init__(self, seen: list[int]):
        self.seen = seen
        self.alone = threading.Event()

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self.seen.append(len(scheduler.workers))

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        if len(scheduler.workers) == 1:
            self.alone.set()


def test_a_shuffle_runs_under_our_choices(client: Client) -> None:
    import dask.dataframe as dd
    import pandas as pd

    frame = pd.DataFrame({"key": range(1000), "value": range(1000)})
    left, right = (dd.from_pandas(frame, npartitions=8) for _ in range(2))
    assert len(left.merge(right, on="key").compute()) == 1000
    assert not _fallbacks(client)


def test_switched_off_dask_chooses(client: Client) -> None:
    dask_gpurt.disable(client)
    try:
        overridden = client.run_on_scheduler(lambda dask_scheduler: "is_rootish" in dask_scheduler.__dict__)
        assert not overridden
        future = client.submit(add, 1, 2, pure=False)
        wait(future)
    finally:
        dask_gpurt.enable(client)


def _fallbacks(client: Client) -> dict[str, Any]:
    found = dask_gpurt.report(client)["fallbacks"]
    return {what: known for what, known in found.items() if what.startswith("placement")}
