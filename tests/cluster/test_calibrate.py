"""Calibrate: measure workloads beside shuffles, write the table, and say why where that is not possible."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner
from distributed import get_worker

from dask_gpurt.cli import main
from dask_gpurt.cli.calibrate import CAPS, WORKLOADS, device_of, launched_by, measure, print_table, tables
from dask_gpurt.overlap.table import path_of, read, write
from tests.helpers.clusters import cluster
from tests.helpers.overlap_cluster import Starting
from tests.helpers.overlap_cluster import start as start  # a fixture


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
