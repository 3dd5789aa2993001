"""Run the benchmark of overlap on this host, and check its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


def test_a_rehearsal_on_this_host(tmp_path: Path) -> None:
    output, picture = tmp_path / "results.json", tmp_path / "results.png"
    chosen = ("--cells", "fp32 GEMM / all-to-all", "--workloads", "join,sort", "--repeat", "1")
    done = overlap("--json", output, "--plot", picture, *chosen)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert not results["errors"]
    parts = results["parts"]
    assert list(parts["collectives"]["cells"]) == ["fp32 GEMM / all-to-all"]
    assert list(parts["workers"]["cells"]) == ["join", "sort"]
    for cell in parts["workers"]["cells"].values():
        assert {"off", "priority"} <= set(cell["settings"])
        assert len(cell["rounds"]) == 1
    assert set(parts["pipeline"]["figures"]["modes"]) == {"off", "priority"}
    assert len(parts["pipeline"]["run"]) == 2
    assert set(parts["pipeline"]["figures"]["f"]) == {"off", "priority"}
    assert "best setting of each cell / off" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def overlap(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.overlap", "--backend", "pandas", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
