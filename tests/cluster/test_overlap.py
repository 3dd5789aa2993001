"""Cap kernels on workers while runs are in flight, and calibrate; report workers that cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster, get_worker

import dask_gpurt
from dask_gpurt.cli import main
from dask_gpurt.cli.calibrate import CAPS, WORKLOADS, device_of, launched_by, measure, print_table, tables
from dask_gpurt.overlap.table import KernelCap, OverlapTable, path_of, read, write
from tests.helpers.clusters import QUICK, cluster, instrument
from tests.helpers.interposers import Launches
from tests.helpers.shared_cluster import SharedCluster

# ---- clusters whose kernels a fake interposer caps -------------------------------------------------


FRAME = pd.DataFrame({"key": range(2000), "value": 0.5})


def shuffled() -> pd.DataFrame:
    result: pd.DataFrame = dd.from_pandas(FRAME, npartitions=4).shuffle("key").compute()
    return result


def assert_right(frame: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(frame.sort_values("key", ignore_index=True), FRAME, check_dtype=False)


Starting = Callable[[int | str], Client]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Starting]:
    """Start a cluster in this process, in a mode of overlap, with the test's own interposer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("dask_gpurt.worker.overlap.Interposer", Launches)
    Launches.made.clear()
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    opened: list[Any] = []

    def begin(mode: int | str) -> Client:
        with dask.config.set({**QUICK, "gpurt.overlap.mode": mode}):
            local = LocalCluster(protocol="tcp", **options)
            client = Client(local)
            opened[:] = [client, local]
            instrument(client)
            dask_gpurt.enable(client)
        return client

    yield begin
    dask_gpurt.disable(opened[0])
    for one in opened:
        one.close()


# ---- caps -----------------------------------------------------------------------------------------

RUN = ("run of the test", 1)


def replies(client: Client) -> list[dict[str, Any]]:
    return [dict(reply.overlap) for reply in dask_gpurt.report(client).workers.values()]


def launches(dask_worker: Any) -> tuple[bool, Any]:
    """Return whether caps apply, and what was written last: the cap of all kernels, and those of some."""
    found = dask_worker.plugins["gpurt"].overlap.residency._launches
    return found.on, (found.written or [None])[-1]


async def begin_run(dask_worker: Any) -> None:
    dask_worker.plugins["gpurt"].exchange.run_begins(RUN)


async def end_run(dask_worker: Any) -> None:
    dask_worker.plugins["gpurt"].exchange.run_ends(RUN)


def test_the_caps_of_the_table_apply_while_a_run_is_in_flight(start: Starting) -> None:
    write(OverlapTable("host", {}, (), (KernelCap(11, "add", 6), KernelCap(12, "sort", 8))))
    client = start("calibrated")
    assert not any(on for on, *_ in client.run(launches).values())
    client.run(begin_run)
    assert set(map(str, client.run(launches).values())) == {str((True, (0, {11: 6, 12: 8})))}
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
    assert [(one.on, one.written[-1]) for one in Launches.made] == [(True, (4, {}))] * 2
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


# ---- calibrate: measure workloads beside shuffles -------------------------------------------------


def test_without_a_gpu_there_is_nothing_to_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.diagnostics.nvml.device_get_count", lambda: 0)
    shown = CliRunner().invoke(main, ["calibrate"])
    assert shown.exit_code == 1
    assert "there is no GPU on this host" in shown.output


def test_where_nothing_is_capped_it_says_why() -> None:
    with (
        cluster(overlap__mode=8) as client,
        pytest.raises(click.ClickException, match=r"kernels cannot be capped on worker .*interposer"),
    ):
        device_of(client)


@pytest.mark.nightly
def test_every_workload_is_measured_beside_shuffles(
    start: Starting, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workloads = {name: WORKLOADS[name] for name in ("join", "text")}
    monkeypatch.setattr("dask_gpurt.cli.calibrate.PARTITIONS_PER_WORKER", 1)
    monkeypatch.setattr("dask_gpurt.cli.calibrate.MIN_ROUNDS", 2)
    monkeypatch.setattr("dask_gpurt.cli.calibrate.CAPS", (8, 4))
    monkeypatch.setattr("dask_gpurt.cli.calibrate.WORKLOADS", workloads)
    table = measure(start(8), "pandas", 2**16, 0.0)
    assert table.device == "host"
    assert [(one.workload, one.cap, one.rounds) for one in table.measured] == [
        (name, cap, 2) for name in workloads for cap in (8, 4)
    ]
    assert read(write(table)) == table
    print_table(path_of("host"), table)
    shown = capsys.readouterr().out
    assert shown.startswith("host")
    assert all(name in shown for name in workloads)
    assert str(path_of("host")) in shown.replace("\n", "")


def launching(part: Any) -> Any:
    for kernel in ("sort", "gather"):
        get_worker().plugins["gpurt"].overlap.residency._launches.launch(kernel)
    return part


def test_the_kernels_of_a_workload_are_those_that_it_launches(start: Starting) -> None:
    client = start(max(CAPS))
    frame, _ = tables("pandas", 2**12, 4)
    computed = frame.map_partitions(launching, meta=frame._meta)
    assert sorted(launched_by(client, computed).values()) == ["gather", "sort"]
    assert launched_by(client, frame.map_partitions(len, meta=(None, "int64"))) == {}
    assert len(computed.compute()), "beside no run"
    kernels = client.run(lambda dask_worker: len(dask_worker.plugins["gpurt"].overlap.residency.kernels()))
    assert set(kernels.values()) == {2}
