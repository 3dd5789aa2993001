"""Calibrate: the learned figures, their file, and the message if there is nothing to learn."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import dask_gpurt
from dask_gpurt.cli import main
from dask_gpurt.cli.calibrate import QUERIES, ensure_confined, learn, random_rows, split_text, written_since
from dask_gpurt.overlap.statistics_file import load
from tests.helpers.clusters import cluster
from tests.helpers.overlap_cluster import Starting
from tests.helpers.overlap_cluster import start as start  # a fixture


def test_without_a_gpu_there_is_nothing_to_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.diagnostics.nvml.device_get_count", lambda: 0)
    shown = CliRunner().invoke(main, ["calibrate"])
    assert shown.exit_code == 1
    assert "there is no GPU on this host" in shown.output


def test_where_nothing_confines_it_says_why() -> None:
    with (
        cluster(overlap__mode="adaptive", overlap__residency="auto") as client,
        pytest.raises(click.ClickException, match=r"no statistics can be collected on worker .*interposer"),
    ):
        ensure_confined(client)


@pytest.mark.slow
def test_every_query_is_learnt_beside_shuffles(
    start: Starting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dask_gpurt.cli.calibrate.PARTITIONS_PER_WORKER", 4)
    client = start(mode="adaptive", learned=str(tmp_path / "learned.json"))
    ensure_confined(client)
    assert learn(client, "pandas", 2**22, 0.0) == len(QUERIES)
    budgets = client.run(lambda dask_worker: dask_worker.plugins["gpurt"].overlap._governor.budget)
    assert set(budgets.values()) == {1.0}, "trials may lose all of the time"
    dask_gpurt.disable(client)
    _, known = load(tmp_path / "learned.json")
    kernels = known.kernels
    assert {"sort_values", "split_text"} <= set(kernels)
    assert all(kernel.samples > 0 for kernel in kernels.values())
    assert any(kernel.alone.count for kernel in kernels.values())
    assert any(kernel.beside for kernel in kernels.values())


def test_text_is_cut_at_a_digit() -> None:
    part = random_rows(0, 3, 4, "pandas").assign(value=[172, 7, 55])
    assert split_text(part).tolist() == [1, 0, 2]


def test_only_new_files_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "dask-gpurt"
    folder.mkdir()
    path = folder / "overlap-H200.json"
    path.write_text("{}")
    assert written_since(0.0) == [path]
    assert written_since(path.stat().st_mtime + 1) == []
