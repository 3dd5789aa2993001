"""Run the benchmark of the examples on small data, and check its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.programs.__main__ import ALONE, COPIES, RUNTIME, Run, figures
from tests.helpers.commands import run

ROOT = Path(__file__).parents[2]


def test_first_and_warm_runs_of_each_contender_have_figures_of_their_own() -> None:
    runs = [
        Run("flights", contender, turn, 0.5, warm, seconds, {})
        for contender, times in ((RUNTIME, (1.0, 3.0, 2.0)), (ALONE, (5.0, 4.0, 9.0)))
        for turn, first in enumerate(times)
        for warm, seconds in enumerate((first, first / 2, first / 4))
    ]
    assert [
        (row["contender"], row["warm"], row["runs"], *row["seconds"].values()) for row in figures(runs)
    ] == [
        (RUNTIME, False, 3, 2, 1, 3),
        (RUNTIME, True, 6, 0.625, 0.25, 1.5),
        (ALONE, False, 3, 5, 4, 9),
        (ALONE, True, 6, 2.125, 1, 4.5),
    ]


@pytest.mark.slow
def test_results_have_a_date_and_all_runs(tmp_path: Path) -> None:
    pytest.importorskip("xgboost", reason="xgboost is not installed")
    output = tmp_path / "results.json"
    options = ["--programs", "xgboost", "--orders", "500", "--repeat", "1", "--json", output]
    run(sys.executable, "-m", "benchmarks.programs", *options, PYTHONPATH=str(ROOT))
    found = json.loads(output.read_text())
    assert found["date"].startswith("20")
    assert [one["contender"] for one in found["runs"]] == [
        RUNTIME,
        f"{RUNTIME}{COPIES}",
        ALONE,
        f"{ALONE}{COPIES}",
    ]
    for one in found["runs"]:
        assert one["found"]["rows"] == 16 * 500
        assert ("rows shuffled" in one["found"]) == one["contender"].startswith(RUNTIME)
    # XGBoost's bins depend on which rows share a worker, and Dask alone does not always choose the same one.
    errors = [one["found"]["error"] for one in found["runs"]]
    assert max(errors) < 1.1 * min(errors)
