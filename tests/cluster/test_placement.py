"""Run placement on a cluster: enabled and disabled, and with workers that join and leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, Event, as_completed

import dask_gpurt
from benchmarks.common.faults import differing_links
from tests.helpers.clusters import cluster, counters
from tests.helpers.waiting import until


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with differing_links(), cluster(workers=2, placement__enabled=True) as client:
        yield client


def add(*numbers: int) -> int:
    return sum(numbers)


def waits(i: int) -> int:
    assert Event("go on").wait(timeout=60)
    return i


@pytest.fixture(autouse=True)
def _held(client: Client) -> Iterator[None]:
    """Hold tasks that wait until the test lets them go on, or ends."""
    event = Event("go on", client=client)
    event.clear()
    yield
    event.set()


def test_workers_come_and_go_under_load(client: Client) -> None:
    local: Any = client.cluster
    futures = client.map(waits, range(60))
    total = client.submit(sum, futures)
    local.scale(3)
    client.wait_for_workers(3, timeout=60)
    until(lambda: len(client.processing()) == 3 and all(client.processing().values()))
    local.scale(2)
    Event("go on", client=client).set()
    assert total.result(timeout=120) == sum(range(60))
    client.wait_for_workers(2, timeout=60)
    assert not _fallbacks(client)


def test_a_restart_in_the_middle_of_work(client: Client) -> None:
    first = client.map(add, range(20), pure=False)
    total = client.submit(sum, [*first, *client.map(waits, range(20), pure=False)])
    next(iter(as_completed(first)))
    client.restart(timeout=120)
    assert total.cancelled()
    before = counters(client)["placement.decisions"]
    again = client.map(add, range(20), pure=False)
    assert client.submit(sum, again).result(timeout=120) == sum(range(20))
    assert counters(client)["placement.decisions"] > before
    assert not _fallbacks(client)


def _fallbacks(client: Client) -> dict[str, Any]:
    found = dask_gpurt.report(client)["fallbacks"]
    return {what: known for what, known in found.items() if what.startswith("placement")}
