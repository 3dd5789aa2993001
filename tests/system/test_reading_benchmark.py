"""Run the benchmark of reads beside compute on this host, and check its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.overlap import reading

ROOT = Path(__file__).parents[2]


def test_a_round_is_held_against_the_same_round_without_reads_aside() -> None:
    measured = [
        {"what": what, "seconds": seconds}
        for cold_0, cold_1 in ((4.0, 2.0), (6.0, 3.0), (8.0, 2.0))
        for what, seconds in {
            "cold, 0 beside": cold_0,
            "cold, 1 beside": cold_1,
            "warm, 0 beside": 2.0,
            "warm, 1 beside": 2.0,
            "compute alone": 1.0,
            "decoding and computing alone": 4.0,
            "disk alone, cold": 2.0,
            "disk alone, warm": 0.5,
        }.items()
    ]
    found = reading.figures(measured, [0, 1])
    cold = found["against none beside"]["cold, 1 beside"]
    assert (cold["median"], cold["low"], cold["high"]) == (0.5, 0.25, 0.5)
    longer = found["against the longer of compute and disk"]
    assert longer == {
        "cold, 0 beside": 3.0,
        "cold, 1 beside": 1.0,
        "warm, 0 beside": 2.0,
        "warm, 1 beside": 2.0,
    }
    assert found["against the longer of decoding with compute and disk"]["cold, 0 beside"] == 1.5


@pytest.mark.slow
@pytest.mark.release
def test_it_runs(tmp_path: Path) -> None:
    output = tmp_path / "reading.json"
    arguments = ["--files", "4", "--rows", "1000", "--rounds", "1", "--rate", "1MiB", "--json", str(output)]
    command = [sys.executable, "-m", "benchmarks.overlap.reading", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    found = json.loads(output.read_text())
    counted = {run["what"]: run.get("counters", {}) for run in found["runs"]}
    assert counted["warm, 1 beside"]["reads.aside"] > 0
    assert "reads.aside" not in counted["warm, 0 beside"]
