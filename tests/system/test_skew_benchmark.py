"""Run the benchmark of slow links as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_hosts.hosts import UnsupportedError, require

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_link_is_slow_in_its_cell_and_every_row_arrives(tmp_path: Path) -> None:
    try:
        require()
    except UnsupportedError as error:
        pytest.skip(str(error))
    output = tmp_path / "results.json"
    # Few partitions: shuffles with `tasks` take mostly as long as their many small messages.
    some = ("--cells", "slow-link", "--rows", "100_000", "--partitions", "6", "--workers", "3")
    link = ("--link", "100MB", "--repeat", "2")
    where = ("--contenders", "gpurt,tasks", "--backend", "pandas", "--json", str(output))
    command = [sys.executable, "-m", "benchmarks.skew", *some, *link, *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "the kernel forbids" in done.stderr:
        pytest.skip("the kernel forbids hosts on one machine")
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    runs = {(run["cell"], run["contender"], run["turn"]): run for run in results["runs"]}
    assert len(runs) == 2 * 2 * 3
    for (cell, _, _), run in runs.items():
        assert run["slow_rate"] == (10**7 if cell == "slow-link" else 0)
        assert len(run["sent"]) == len(run["received"]) == 3
        assert min(run["received"]) > 0
    for found in results["figures"]:
        assert ("ideal_seconds" in found) == (found["cell"] == "slow-link")
