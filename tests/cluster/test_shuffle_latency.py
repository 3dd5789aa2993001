"""Find the task timestamps of a shuffle on a cluster, for the latency benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.shuffle.latency import main


@pytest.mark.parametrize("method", ["gpurt", "p2p"])
def test_a_shuffle_is_measured_by_processor_time(method: str, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    options = [
        "--clock",
        "cpu",
        "--backend",
        "pandas",
        "--method",
        method,
        "--partitions",
        "3",
        "--rows",
        "9",
    ]
    done = CliRunner().invoke(main, [*options, "--repeat", "2", "--json", str(output)])
    assert done.exit_code == 0, done.output
    results = json.loads(output.read_text())
    assert len(results["runs"]) == 2
    assert all(run["total"] > run["barrier"] > 0 for run in results["runs"])
