"""Run each benchmark on small data, as a user types it: results are checked, without errors, and written."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exchange.legs import combine

ROOT = Path(__file__).parents[2]
PANDAS = "--backend pandas"
#: Programs with their arguments, and what their results hold.
PROGRAMS = {
    "exchange": (f"--size 4MiB --partitions 4 --workers 2 {PANDAS} --repeat 2 --index", "turns"),
    "overlap": (f"{PANDAS} --cells 'fp32 GEMM / all-to-all' --workloads join --repeat 1", "parts"),
    "overlap.reading": ("--files 4 --rows 1000 --rounds 1 --rate 1MiB", "runs"),
    "shuffle": (f"--size 4MiB --partitions 4 --workers 2 {PANDAS} --repeat 1", "runs"),
    "skew": (f"--rows 5000 --workers 2 --partitions 3 --repeat 2 {PANDAS} --cells hot", "runs"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    arguments, holds = PROGRAMS[name]
    output = tmp_path / "results.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *shlex.split(arguments), "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(output.read_text())
    assert results[holds]
    assert not results.get("errors")


def test_lost_rows_are_an_error() -> None:
    part = {"stamps": [0, 1, 2, 3, 4], "counters": {"a": 1}, "given": [2, 5, 6, 7]}
    whole = combine([{**part, "received": [1, 2, 3, 4]}, {**part, "received": [3, 8, 9, 10]}])
    assert (whole["rows"], whole["seconds"], whole["counters"]) == (4, 4, {"a": 2})
    with pytest.raises(ValueError, match="rows and checksums"):
        combine([{**part, "received": [1, 5, 6, 7]}])
