"""Run the benchmark of skewed keys on a cluster, and check the results of its cells."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.skew import contest
from benchmarks.skew.__main__ import main
from benchmarks.skew.frames import Digest

SMALL = ("--rows", "5000", "--workers", "2", "--partitions", "3", "--repeat", "2", "--backend", "pandas")


@pytest.mark.nightly
def test_a_cell_is_run_in_turns_with_its_yardstick(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = CliRunner().invoke(
        main, [*SMALL, "--contenders", "gpurt", "--cells", "hot", "--json", str(output)]
    )
    assert done.exit_code == 0, done.output
    results = json.loads(output.read_text())
    assert [(run["turn"], run["cell"]) for run in results["runs"]] == list(product(range(3), ["even", "hot"]))
    for run in results["runs"]:
        assert sum(run["rows"]) == 5000
        assert all(len(run[what]) == 2 for what in ("rows", "processor_seconds", "peak_bytes"))
        assert min(run["peak_bytes"]) > 0
    assert [figure["cell"] for figure in results["figures"] if "of_yardstick" in figure] == ["hot"]
    assert not results["fallbacks"]["gpurt"]


@pytest.mark.nightly
def test_a_wrong_result_fails_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "expected", lambda *_, **__: Digest(5000, 1))
    done = CliRunner().invoke(main, [*SMALL, "--contenders", "tasks", "--cells", "hot"])
    assert isinstance(done.exception, ValueError)
    assert "even by tasks, run 0" in str(done.exception)
