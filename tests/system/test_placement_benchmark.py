"""Run the benchmark of placement on real clusters, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


def test_both_sides_take_turns_and_agree(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    small = ("--size", "4MiB", "--workers", "2", "--repeat", "2")
    some = ("--workload", "skewed-join", "--workload", "tree-reduction")
    command = [sys.executable, "-m", "benchmarks.placement.clusters", *small, *some, "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    for figure in results["figures"]:
        assert figure["workload"] in done.stdout
        sides = (figure["stock"], figure["gpurt"])
        assert all(side["min"] <= side["median"] <= side["max"] for side in sides)
        assert all(side["cpu"] > 0 for side in sides)
        assert figure["ratio"] == pytest.approx(sides[0]["median"] / sides[1]["median"])
    turns = [run["side"] for run in results["runs"] if run["workload"] == "skewed-join"]
    assert turns == ["gpurt", "stock", "stock", "gpurt", "gpurt", "stock"]
    assert not results["fallbacks"]


def test_each_cell_of_one_host_takes_turns_and_has_figures(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    small = ("--size", "8MiB", "--workers", "2", "--repeat", "2", "--backend", "pandas")
    command = [sys.executable, "-m", "benchmarks.placement.one_host", *small, "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    cells = json.loads(output.read_text())["cells"]
    assert list(cells) == ["uneven", "pressure", "slow-link"]
    for name, cell in cells.items():
        assert name in done.stdout
        assert [run["side"] for run in cell["runs"]] == ["on", "off", "off", "on", "on", "off"]
        assert cell["figures"]["turns"] == 2
        assert cell["figures"]["off"]["decisions"] == 0
    assert cells["uneven"]["figures"]["on"]["first_share"] == pytest.approx(0.9, abs=0.02)
    assert cells["pressure"]["figures"]["on"]["first_free"] < 0.2
