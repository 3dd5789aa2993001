"""Run each benchmark on small data, as a user types it: results are checked, without errors, and written."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.budget import PHASES
from benchmarks.exchange.legs import combine
from benchmarks.tpch.queries import QUERIES
from benchmarks.tpch.styles import STYLES
from tests.helpers.tpch import SCALE, small_tables

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


# ---- TPC-H -----------------------------------------------------------------------------------------


def measured(module: str, folder: Path, *options: str, timeout: int = 240) -> dict[str, Any]:
    """Run a benchmark on small tables, and return its results.

    Dask reads several small files as one partition; a join is shuffled only with several partitions.
    """
    tables, output = small_tables(folder / "tables", parts=12), folder / "results.json"
    given = ["--data", str(tables.directory), "--scale", str(SCALE), "--parts", str(tables.parts)]
    command = [sys.executable, "-m", module, *given, *options, "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    results: dict[str, Any] = json.loads(output.read_text())
    wrong = [figure for figure in results.get("figures", ()) if figure.get("errors")]
    assert not wrong
    assert done.returncode == 0, done.stderr
    return results


@pytest.mark.nightly
def test_the_command_measures_and_checks_all_contenders(tmp_path: Path) -> None:
    options = ["--queries", "3,6", "--backend", "pandas", "--repeat", "1"]
    results = measured("benchmarks.tpch", tmp_path, *options)
    figures = {(each["query"], each["contender"]): each for each in results["figures"]}
    assert set(figures) == set(itertools.product([3, 6], ["gpurt", "tasks", "p2p"]))
    for figure in figures.values():
        seconds = figure["budget"]["seconds"]
        assert list(seconds) == list(PHASES)
        assert sum(seconds.values()) == pytest.approx(figure["warm"]["median"], rel=0.01)
        assert figure["budget"]["read_bytes"] > 0
    # A join of several partitions has to be shuffled by the chosen method.
    assert figures[3, "gpurt"]["budget"]["shuffles"] > 0
    assert figures[3, "tasks"]["budget"]["shuffles"] == 0
    assert "hash-join-transfer" in figures[3, "p2p"]["budget"]["tasks"]
    assert "hash-join-transfer" not in figures[3, "tasks"]["budget"]["tasks"]
    assert set(results["ratios"]) == {"tasks", "p2p"}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_all_styles_have_duckdbs_results_with_each_method(tmp_path: Path) -> None:
    options = ["--style", "all", "--backend", "pandas", "--repeat", "0"]
    figures = measured("benchmarks.tpch", tmp_path, *options, timeout=1100)["figures"]
    assert len(figures) == 3 * len(STYLES) * len(QUERIES)
