"""Run the benchmark of reads beside compute on this host, and check its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_it_runs(tmp_path: Path) -> None:
    output = tmp_path / "reading.json"
    arguments = ["--files", "4", "--rows", "1000", "--rounds", "1", "--rate", "1MiB", "--json", str(output)]
    command = [sys.executable, "-m", "benchmarks.overlap.reading", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    found = json.loads(output.read_text())
    counted = {run["what"]: run.get("counters", {}) for run in found["runs"]}
    assert counted["warm, 1 beside"]["reads.aside"] > 0
    assert "reads.aside" not in counted["warm, 0 beside"]
