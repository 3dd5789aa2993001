"""Run the benchmark of the exchange as a user types it, and check that it cannot hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.exchange.legs import combine

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    small = ("--size", "4MiB", "--partitions", "4", "--workers", "2", "--backend", "pandas")
    command = [sys.executable, "-m", "benchmarks.exchange", *small, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_results_are_checked_and_written(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = run("--repeat", "2", "--index", "--json", output)
    assert done.returncode == 0, done.stderr
    assert "GiB shared-memory" in done.stdout
    results = json.loads(output.read_text())
    assert [turn["rows"] for turn in results["turns"]] == 3 * [2**22 // 16]
    (figure,) = results["figures"]
    assert 0 < figure["min_seconds"] <= figure["median_seconds"] <= figure["max_seconds"]
    assert 0 < figure["share_of_link_limit"] < 1
    assert all(figure["phases"][phase] > 0 for phase in ("produce", "settle", "consume"))
    assert figure["counters"]["exchange.bytes.shared-memory"] > 0
    assert not results["errors"]


def test_lost_rows_are_an_error() -> None:
    part = {"stamps": [0, 1, 2, 3, 4], "counters": {"a": 1}, "given": [2, 5, 6, 7]}
    whole = combine([{**part, "received": [1, 2, 3, 4]}, {**part, "received": [3, 8, 9, 10]}])
    assert (whole["rows"], whole["seconds"], whole["counters"]) == (4, 4, {"a": 2})
    with pytest.raises(ValueError, match="rows and checksums"):
        combine([{**part, "received": [1, 5, 6, 7]}])
