"""Cap kernels on real workers while runs are in flight, and report workers that cannot."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Client

import dask_gpurt
from dask_gpurt.overlap.table import KernelCap, OverlapTable, write
from tests.helpers.launches import Launches
from tests.helpers.overlap_cluster import Starting, assert_right, shuffled
from tests.helpers.overlap_cluster import start as start  # a fixture
from tests.helpers.shared_cluster import SharedCluster

RUN = ("run of the test", 1)


def replies(client: Client) -> list[dict[str, Any]]:
    return [dict(reply.overlap) for reply in dask_gpurt.report(client).workers.values()]


def launches(dask_worker: Any) -> tuple[bool, int, dict[str | int, int]]:
    """Return whether caps apply, that of all kernels, and those of single ones."""
    found = dask_worker.plugins["gpurt"].overlap.residency._launches
    return found.on, found.cap, found.caps


async def begin_run(dask_worker: Any) -> None:
    dask_worker.plugins["gpurt"].exchange.run_begins(RUN)


async def end_run(dask_worker: Any) -> None:
    dask_worker.plugins["gpurt"].exchange.run_ends(RUN)


def test_the_caps_of_the_table_apply_while_a_run_is_in_flight(start: Starting) -> None:
    write(OverlapTable("host", {}, (), (KernelCap(11, "add", 6), KernelCap(12, "sort", 8))))
    client = start("calibrated")
    assert not any(on for on, *_ in client.run(launches).values())
    client.run(begin_run)
    assert set(map(str, client.run(launches).values())) == {str((True, 0, {11: 6, 12: 8}))}
    client.run(end_run)
    assert not any(on for on, *_ in client.run(launches).values())
    assert_right(shuffled())
    report = dask_gpurt.report(client)
    assert report.counters["overlap.confined"] >= 2
    assert not any(reply.fallbacks for reply in report.workers.values())
    wanted = {"mode": "calibrated", "caps": {"default": None, "kernels": 2}, "reason": None}
    assert replies(client) == [wanted, wanted]


def test_a_number_caps_all_kernels_and_switching_off_ends_that(start: Starting) -> None:
    client = start(4)
    client.run(begin_run)
    assert [(one.on, one.cap) for one in Launches.made] == [(True, 4), (True, 4)]
    dask_gpurt.disable(client)
    assert not any(one.on for one in Launches.made)


def test_without_a_table_there_is_priority_only_and_the_command_to_run(start: Starting) -> None:
    client = start("calibrated")
    assert_right(shuffled())
    for reply in dask_gpurt.report(client).workers.values():
        assert reply.overlap["mode"] == "priority"
        assert "run 'dask gpurt calibrate' on this host" in reply.fallbacks["overlap.uncapped"].reason


def test_without_the_interposer_the_reason_is_shown(shared_cluster: SharedCluster) -> None:
    with shared_cluster.client(overlap__mode=4) as client:
        assert_right(shuffled())
        report = dask_gpurt.report(client)
    for reply in report.workers.values():
        reason = reply.fallbacks["overlap.uncapped"].reason
        assert "interposer" in reason
        assert reason.endswith("The shuffle keeps its priority")
    assert [reply.overlap["mode"] for reply in report.workers.values()] == ["priority"] * 2


@pytest.mark.parametrize("mode", ["off", "priority"])
def test_without_caps_nothing_of_a_worker_is_replaced(shared_cluster: SharedCluster, mode: str) -> None:
    with shared_cluster.client(overlap__mode=mode) as client:
        assert_right(shuffled())
        assert {part["mode"] for part in replies(client)} == {"off"}, "there is no GPU"
        assert not any(reply.fallbacks for reply in dask_gpurt.report(client).workers.values())
        heard = client.run(lambda dask_worker: dask_worker.plugins["gpurt"].overlap.residency is None)
        assert all(heard.values())
