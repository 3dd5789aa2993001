"""Run the TPC-H benchmark on clusters of processes, as a user types it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.budget import PHASES
from benchmarks.tpch.queries import QUERIES
from benchmarks.tpch.styles import STYLES
from tests.helpers.tpch import SCALE, small_tables

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


def test_ways_take_turns_on_their_clusters(tmp_path: Path) -> None:
    ways = ["default", "two-at-once", "two-workers"]
    tables, output = small_tables(tmp_path / "tables", parts=12), tmp_path / "results.json"
    options = ["--data", str(tables.directory), "--scale", str(SCALE), "--parts", str(tables.parts)]
    options += ["--ways", ",".join(ways), "--queries", "12", "--repeat", "2", "--json", str(output)]
    options += ["--pipeline", "1MiB", "--partitions", "4", "--workers", "1"]
    command = [sys.executable, "-m", "benchmarks.tpch.live", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    cases = ["pipeline", "ten shuffles", "ten computations", "careful 12"]
    for way in ways:
        assert {case: len(seconds) for case, seconds in found["seconds"][way].items()} == dict.fromkeys(
            cases, 2
        )
        assert found["sums"][way]["careful"]["thread_seconds"] > 0
    assert found["ratios"].keys() == set(ways[1:])
    for of in found["ratios"].values():
        assert of["careful"]["low"] <= of["careful"]["ratio"] <= of["careful"]["high"]


def test_the_command_measures_and_checks_all_contenders(tmp_path: Path) -> None:
    # Dask reads several small files as one partition; a join is shuffled only with several partitions.
    tables, output = small_tables(tmp_path / "tables", parts=12), tmp_path / "results.json"
    options = ["--data", str(tables.directory), "--scale", str(SCALE), "--parts", str(tables.parts)]
    options += ["--queries", "3,6", "--backend", "pandas", "--repeat", "1", "--json", str(output)]
    command = [sys.executable, "-m", "benchmarks.tpch", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
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


@pytest.mark.timeout(1200)
def test_all_styles_have_duckdbs_results_with_each_method(tmp_path: Path) -> None:
    tables, output = small_tables(tmp_path / "tables", parts=12), tmp_path / "results.json"
    options = ["--data", str(tables.directory), "--scale", str(SCALE), "--parts", str(tables.parts)]
    options += ["--style", "all", "--backend", "pandas", "--repeat", "0", "--json", str(output)]
    command = [sys.executable, "-m", "benchmarks.tpch", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    figures = json.loads(output.read_text())["figures"]
    assert not [(each["query"], each["style"], each["errors"]) for each in figures if each["errors"]]
    assert done.returncode == 0, done.stderr
    assert len(figures) == 3 * len(STYLES) * len(QUERIES)


def test_each_query_is_timed_in_a_new_process(tmp_path: Path) -> None:
    tables, output = small_tables(tmp_path / "tables", parts=12), tmp_path / "results.json"
    options = ["--data", str(tables.directory), "--scale", str(SCALE), "--parts", str(tables.parts)]
    options += ["--queries", "6,22", "--style", "columns", "--fresh", "--backend", "pandas", "--repeat", "1"]
    options += ["--contenders", "gpurt,gpurt-flag", "--json", str(output)]
    command = [sys.executable, "-m", "benchmarks.tpch", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())["figures"]
    found = {(each["query"], each["contender"]): (len(each["first"]), each["warm"]["n"]) for each in figures}
    assert found == dict.fromkeys(itertools.product([6, 22], ["gpurt", "gpurt-flag"]), (1, 1))
