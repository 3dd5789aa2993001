"""The cluster that tests share: it serves one after the other, until one fails or leaves something behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
from distributed import Client, Event

import dask_gpurt
from tests.helpers import shared_cluster as module
from tests.helpers.shared_cluster import Lease, SharedCluster


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedCluster]:
    monkeypatch.setattr(module, "FAILURES", 0)
    monkeypatch.setattr(module, "CHECK", False)
    shared = SharedCluster()
    yield shared
    shared.close()


def processes(client: Client) -> set[int]:
    return set(client.run(os.getpid).values())


def test_it_serves_with_other_settings_until_a_test_fails_or_leaves_something_behind(
    shared: SharedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.client() as client:
        first = processes(client)
    with shared.client(exchange__pool="3 MiB") as client:
        assert processes(client) == first
        workers = dask_gpurt.report(client)["workers"].values()
        assert {worker["pools"]["host"]["capacity"] for worker in workers} == {3 * 2**20}

    lease = Lease(shared.client)
    assert processes(lease.client) == processes(lease.client) == first
    lease.end_after_failure()
    assert not any(map(psutil.pid_exists, first))
    second = processes(lease.client)
    lease.end()

    monkeypatch.setattr("tests.helpers.waiting.LIMIT_S", 0)
    with pytest.raises(AssertionError, match=r"'events': \['left'\]"), shared.client() as client:
        Event("left", client=client).set()
    assert not any(map(psutil.pid_exists, second))
