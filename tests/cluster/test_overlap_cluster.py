"""Run the modes of overlap on real workers: bytes in flight, measurements, failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pytest
from click.testing import CliRunner
from distributed import Client

import dask_gpurt
from dask_gpurt.cli import main
from dask_gpurt.overlap.samples import OverlapSample, SoloSample, StepSample
from dask_gpurt.overlap.statistics import OverlapStatistics
from dask_gpurt.overlap.statistics_file import CacheKey, load, write
from dask_gpurt.worker.overlap import COMMUNICATION_PREFIXES
from tests.helpers.overlap_cluster import FRAME, Starting, assert_right, doubled, shuffled
from tests.helpers.overlap_cluster import start as start  # a fixture
from tests.helpers.shared_cluster import SharedCluster


def replies(client: Client) -> list[dict[str, Any]]:
    return [reply["overlap"] for reply in dask_gpurt.report(client)["workers"].values()]


def test_where_nothing_confines_there_is_priority_only_and_the_reason(shared_cluster: SharedCluster) -> None:
    with shared_cluster.client(overlap__residency="auto") as client:
        assert_right(shuffled())
        report = dask_gpurt.report(client)
    for reply in report["workers"].values():
        reason = reply["fallbacks"]["overlap.unconfined"]["reason"]
        assert "interposer" in reason
        assert reason.endswith("The shuffle keeps its priority")


def test_tasks_beside_a_shuffle_are_measured(start: Starting, tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    client = start(mode="adaptive", learned=str(path))
    client.run(lambda dask_worker: dask_worker.plugins["gpurt"].exchange.run_begins(("run of the test", 1)))
    client.gather(client.map(lambda number: number + 1, range(20), key="increment"))
    client.run(lambda dask_worker: dask_worker.plugins["gpurt"].exchange.run_ends(("run of the test", 1)))
    assert_right(shuffled())
    found = replies(client)
    assert {reply["mode"] for reply in found} == {"adaptive"}
    assert all(reply["elapsed"] > 0 for reply in found)
    decided = {(entry["subject"], entry["decided"]) for reply in found for entry in reply["decisions"]}
    assert ("increment", "priority only") in decided
    kernels = {row["kernel"] for reply in found for row in reply["kernels"]}
    assert not any("transfer" in kernel for kernel in kernels)
    dask_gpurt.disable(client)
    assert set(load(path)[1].kernels) >= kernels


def learn(kernel: str, dask_worker: Any) -> None:
    """Teach a worker about a kernel that communication slows down, on worker 0 only."""
    governor, speed = dask_worker.plugins["gpurt"].overlap._governor, (0.5, 1.0)[dask_worker.name]
    for _ in range(5):
        governor.learn(SoloSample(kernel, 1.0, 1.0))
        governor.learn_step(StepSample(0.1, 1e9, {kernel: OverlapSample(1.0, 1 / speed)}))


async def share(dask_worker: Any) -> None:
    await dask_worker.plugins["gpurt"].overlap._stats_sync.share()


def test_workers_decide_from_what_all_have_learnt(start: Starting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpurt.overlap.stats_sync.AVERAGE_MAX_AGE_S", 0.0)
    client = start(mode="adaptive", learned="auto")
    for _ in range(2):  # in the first round no other worker may have reported yet
        client.run(learn, "join")
        client.run(share)
    for reply in replies(client):
        (row,) = reply["kernels"]
        assert 0.5 < row["compute"] < 1.0


def test_a_fused_task_that_computes_and_splits_counts_as_compute(start: Starting) -> None:
    client = start(mode="adaptive", learned="auto")
    frame = dd.from_pandas(FRAME, npartitions=4).shuffle("key")
    frame = frame.map_partitions(doubled).shuffle("value").map_partitions(doubled)
    assert len(frame.persist()) == len(FRAME)  # persist lets Dask fuse
    kernels = {row["kernel"] for reply in replies(client) for row in reply["kernels"]}
    assert "doubled-operation+shuffle-transfer" in kernels
    assert not kernels & COMMUNICATION_PREFIXES


def test_after_a_shuffle_nothing_is_in_flight(start: Starting) -> None:
    client = start(mode="adaptive", learned="auto")
    assert_right(shuffled())

    def flying(dask_worker: Any) -> tuple[int, int]:
        exchange = dask_worker.plugins["gpurt"].exchange
        return len(exchange._publishing), exchange.puller.under_way

    assert set(client.run(flying).values()) == {(0, 0)}


def test_a_worker_gets_its_own_execute_back(start: Starting) -> None:
    client = start(mode="fixed", fixed={"residency": 4, "sms": "none"})
    assert_right(shuffled())
    dask_gpurt.disable(client)
    assert set(client.run(lambda dask_worker: "execute" in dask_worker.__dict__).values()) == {False}


@pytest.mark.parametrize("content", [b"no json", None])
def test_a_file_that_is_of_no_use_leaves_priority_only(
    start: Starting, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "learned.json"
    if content is None:
        write(path, CacheKey("NVIDIA A100", {}), OverlapStatistics())
        said = f"{path} was measured on NVIDIA A100, but this process runs on host"
    else:
        path.write_bytes(content)
        said = f"{path} cannot be read as statistics of kernels"
    before = path.read_bytes()
    client = start(mode="adaptive", learned=str(path))
    assert_right(shuffled())
    for reply in dask_gpurt.report(client)["workers"].values():
        assert reply["fallbacks"]["overlap.unconfined"]["reason"].startswith(said)
        assert not reply["overlap"]["decisions"]
    assert path.read_bytes() == before


def test_a_cap_above_the_device_leaves_priority_only(start: Starting) -> None:
    client = start(mode="fixed", fixed={"residency": 64, "sms": "none"})
    assert_right(shuffled())
    reasons = {
        known["reason"]
        for reply in dask_gpurt.report(client)["workers"].values()
        for known in reply["fallbacks"].values()
    }
    assert any("at most the 32 that an SM of this device holds" in reason for reason in reasons)


def test_the_command_asks_the_workers(start: Starting) -> None:
    client = start(mode="adaptive", learned="auto")
    assert_right(shuffled())
    arguments = ["overlap", "--json", "--scheduler", client.scheduler.address]
    found = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert len(found) == 2
    assert {part["mode"] for part in found.values()} == {"adaptive"}


def test_the_default_does_nothing_to_tasks_without_a_gpu(shared_cluster: SharedCluster) -> None:
    with shared_cluster.client() as client:
        assert_right(shuffled())
        assert {reply["mode"] for reply in replies(client)} == {"off"}
        printed = CliRunner().invoke(main, ["overlap", "--scheduler", client.scheduler.address]).stdout
        assert printed.startswith("no kernel is confined on the 2 workers")
        assert len(printed.splitlines()) == 1
        assert not any(reply["fallbacks"] for reply in dask_gpurt.report(client)["workers"].values())
        assert all(reply["elapsed"] == 0 and not reply["decisions"] for reply in replies(client))
