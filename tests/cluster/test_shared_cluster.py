"""Reuse the shared cluster for each test, until a test fails or leaves state behind."""

from __future__ import annotations

import os

import psutil
import pytest
from distributed import Client, Event

import dask_gpurt
from tests.helpers import shared_cluster as module
from tests.helpers.shared_cluster import Lease, SharedCluster


def processes(client: Client) -> set[int]:
    return set(client.run(os.getpid).values())


def test_it_serves_with_other_settings_until_a_test_fails_or_leaves_something_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FAILURES", 0)
    monkeypatch.setattr(module, "CHECK", False)
    failed: list[str] = []
    shared = SharedCluster(lambda: len(failed))
    with shared.client() as client:
        first = processes(client)
    with shared.client(exchange__pool="3 MiB") as client:
        assert processes(client) == first
        workers = dask_gpurt.report(client)["workers"].values()
        assert {worker["pools"]["host"]["capacity"] for worker in workers} == {3 * 2**20}

    lease = Lease(shared.client)
    assert processes(lease.client) == processes(lease.client) == first
    failed.append("a test")
    lease.end()
    assert not any(map(psutil.pid_exists, first))
    second = processes(lease.client)
    lease.end()

    monkeypatch.setattr("tests.helpers.waiting.LIMIT_S", 0)
    with pytest.raises(AssertionError, match=r"'events': \['left'\]"), shared.client() as client:
        Event("left", client=client).set()
    assert not any(map(psutil.pid_exists, second))
