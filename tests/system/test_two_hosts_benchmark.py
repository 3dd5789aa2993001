"""Run the benchmark of placement on two hosts, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_hosts.hosts import UnsupportedError, require

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_sides_take_turns_agree_and_are_simulated(tmp_path: Path) -> None:
    try:
        require()
    except UnsupportedError as error:
        pytest.skip(str(error))
    output = tmp_path / "results.json"
    some = ("--pairs", "2", "--links", "1", "--workloads", "uneven-reuse,random-dag", "--scale", "0.1")
    command = [sys.executable, "-m", "benchmarks.two_hosts", *some, "--always", "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "the kernel forbids two hosts" in done.stderr:
        pytest.skip("the kernel forbids two hosts on one machine")
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert [cell["workload"] for cell in results["cells"]] == ["uneven-reuse", "random-dag"]
    for cell in results["cells"]:
        assert cell["workload"] in done.stdout
        assert [run["side"] for run in cell["runs"]] == ["on", "off", "off", "on", "on", "off"]
        assert cell["measured"]["low"] <= cell["measured"]["ratio"] <= cell["measured"]["high"]
        assert cell["simulated"] > 0
        assert cell["decisions"] > 0
        assert len(cell["simulated_seconds"]) == 2
    assert results["links"]["1"]["bandwidths"].keys() == {"between", "within"}
    assert not results["links"]["1"]["fallbacks"]
