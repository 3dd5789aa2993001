"""Report on a cluster in which workers have left or are stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pytest
from click.testing import CliRunner
from distributed import Client, default_client

import dask_gpurt
from dask_gpurt.cli import main
from dask_gpurt.observe import Fallback
from dask_gpurt.protocol import HEARTBEAT_METRIC
from tests.helpers.clusters import cluster
from tests.helpers.waiting import until

ROWS = 5_000


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with cluster(workers=2) as client:
        yield client


def last_heartbeat(client: Client, address: str) -> dict[str, Any]:
    """Return the counters and fallbacks in a worker's last heartbeat."""

    def read(dask_scheduler) -> dict[str, Any]:  # type: ignore[no-untyped-def]
        return dask_scheduler.workers[address].metrics.get(HEARTBEAT_METRIC, {})  # type: ignore[no-any-return]

    found: dict[str, Any] = client.run_on_scheduler(read)
    return found


def test_totals_outlive_a_killed_worker_and_the_loss_is_said(client: Client) -> None:
    frame = pd.DataFrame({"key": range(ROWS)})
    assert len(dd.from_pandas(frame, npartitions=6).shuffle("key").compute()) == ROWS
    killed, pid = next(iter(client.run(os.getpid).items()))

    def fall_back(dask_worker) -> None:  # type: ignore[no-untyped-def]
        dask_worker.plugins["gpurt"].metrics.fallback(Fallback.OVERLAP_UNCAPPED, "no space left")

    client.run(fall_back, workers=[killed])
    before = dask_gpurt.report(client)
    assert before.counters["shuffle.runs"] == 1
    assert before.counters["shuffle.rows"] == ROWS
    assert before.departed == ()
    of_killed = before.workers[killed].counters
    # A fallback is no counter: a heartbeat from before it has the same counters.
    until(lambda: last_heartbeat(client, killed).get("fallbacks"))
    until(lambda: last_heartbeat(client, killed)["counters"] == of_killed)
    os.kill(pid, signal.SIGKILL)
    until(lambda: dask_gpurt.report(client).departed)
    after = dask_gpurt.report(client)
    assert of_killed.items() <= after.departed[0].counters.items()
    assert after.counters["shuffle.rows"] == ROWS
    assert after.counters["shuffle.runs"] == 1
    (gone,) = after.departed
    assert gone.address == killed
    assert gone.fallbacks["overlap.uncapped"].reason == "no space left"
    assert f"{killed} left at" in repr(after)
    assert "no space left" in repr(after)
    printed = CliRunner().invoke(main, ["doctor", "--scheduler", client.scheduler.address]).stdout
    assert "no space left" in " ".join(printed.split())  # lines wrap
    assert " ".join(str(gone).split()) in " ".join(printed.split())


def test_a_worker_that_stands_still_is_said_to(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpurt.scheduler.reports.CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.setattr("dask_gpurt.scheduler.reports.REPLY_TIMEOUT_S", 0.3)
    client.wait_for_workers(2)
    stopped, pid = next(iter(client.run(os.getpid).items()))
    os.kill(pid, signal.SIGSTOP)
    try:
        found = dask_gpurt.report(client)
        doctor = CliRunner().invoke(main, ["doctor", "--scheduler", client.scheduler.address])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found.workers[stopped].error == "no answer within 0.3 s"
    assert doctor.exit_code == 1
    assert f"worker {stopped}: no answer within 0.3 s" in " ".join(doctor.stdout.split())


def test_the_disk_tier_has_the_free_space_where_its_files_go(client: Client) -> None:
    (directory,) = set(client.run(lambda dask_worker: os.path.dirname(dask_worker.local_directory)).values())
    rows = dask_gpurt.memory_usage(client).to_pandas(names="metrics")
    whole = os.statvfs(directory)
    for capacity in rows[rows["tier"] == "disk"]["capacity"]:
        assert 0 < capacity <= whole.f_bfree * whole.f_frsize + 2**30  # the disk may have filled meanwhile


def test_an_address_is_enabled_and_other_things_are_refused_with_what_is_wanted(client: Client) -> None:
    with client.as_current(), dask_gpurt.enable(client.scheduler.address) as connected:
        assert isinstance(connected, Client)
        assert dask_gpurt.is_enabled(connected)
        assert dask_gpurt.enable(connected) is connected
        tiers = dask_gpurt.memory_usage(connected).to_pandas()["tier"]
        assert set(tiers) == {"memory", "shared memory", "disk"}
        totals = dask_gpurt.report(connected).to_pandas()
        assert set(totals["worker"]) >= {"cluster"}
    for wrong in (client.scheduler.address, 3):
        with pytest.raises(TypeError, match=r"expected a distributed\.Client"):
            dask_gpurt.report(wrong)  # type: ignore[arg-type]


def test_a_client_that_cannot_switch_it_on_does_not_stay_the_current_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    async def refuse(connected: Client) -> None:
        opened.append(connected)
        raise RuntimeError("not here")

    monkeypatch.setattr("dask_gpurt.client.session.activate", refuse)
    before = default_client()
    with pytest.raises(RuntimeError, match="not here"):
        dask_gpurt.enable(client.scheduler.address)
    assert [one.status for one in opened] == ["closed"]
    assert default_client() is before


def test_computations_are_listed_with_what_rules_did_and_left(client: Client) -> None:
    frame = dd.from_pandas(pd.DataFrame({"key": [*range(50)] * 9, "value": 1}), npartitions=6)
    began = time.time()
    assert len(frame.groupby("key").value.sum(split_out=3).compute()) == 50
    assert client.submit(sum, [1, 2]).result() == 3
    found = dask_gpurt.report(client).queries
    groups, plain = [query for query in found if query["began"] >= began]
    assert groups["tasks"] > 6
    assert 0 < groups["seconds"] <= time.time() - began
    assert groups["bytes"] > 0
    assert "shuffle-transfer" in groups["steps"]
    assert (groups["state"], groups["done"]) == ("done", groups["tasks"])
    assert [note for note in groups["applied"] if note.startswith("CodedGroups ")]
    assert not groups["left"]  # rules on reads have nothing to say of a plan without any
    assert plain["tasks"] == 1
    assert not plain["applied"]
    assert not plain["left"]
    for shown in (repr(found), found.to_html(), dask_gpurt.report(client)._repr_html_()):
        assert "CodedGroups" in shown
    assert dask_gpurt.report(client).to_dict()["queries"][-1]["tasks"] == 1
