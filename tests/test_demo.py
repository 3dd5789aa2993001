"""The demo, the examples and the benchmark, run the way a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pandas as pd
import pytest

from dask_gpurt.cli.demo import (
    OPERATIONS,
    Outcome,
    all_passed,
    canonical,
    check,
    choose_methods,
    print_results,
)
from dask_gpurt.cli.report import render_report, speedups

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the project and return what it wrote."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "folder" / "demo.html"


@pytest.fixture(scope="module")
def results(page: Path) -> dict[str, Any]:
    small = ("--backend", "pandas", "--partitions", "4", "--repeat", "1")
    done = run("-m", "dask_gpurt", "demo", "--json", *small, "--report", page)
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_demo_checks_every_result_and_times_every_method(results: dict[str, Any]) -> None:
    assert results["passed"]
    assert [operation["name"] for operation in results["operations"]] == [known.name for known in OPERATIONS]
    for operation in results["operations"]:
        assert operation["checks"] == {"gpurt": True, "tasks": True, "p2p": True}
        assert all(len(timings) == 1 for timings in operation["seconds"].values())
        assert operation["rows"] > 0
    joins = results["operations"][:2]
    assert all(join["bytes"]["shared-memory"] > 0 for join in joins)
    assert {link["path"] for link in results["paths"]} >= {"shared-memory"}
    assert set(results["speedups"]) == {"tasks", "p2p"}
    assert results["versions"]["dask"]
    assert results["hardware"]["cores"] >= 1


def test_demo_ends_with_a_table(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_results(results, [Outcome(**operation) for operation in results["operations"]])
    printed = capsys.readouterr().out
    assert all(operation.name in printed for operation in OPERATIONS)
    assert "3 of 3" in printed
    assert results["report"] in printed


def test_demo_writes_a_small_report_that_fetches_nothing(results: dict[str, Any], page: Path) -> None:
    html = page.read_text()
    minidom.parseString(html)
    assert len(html) < 150_000
    assert "<script" not in html
    assert "http" not in html
    assert all(operation.name in html for operation in OPERATIONS)


def test_report_tells_failures(results: dict[str, Any]) -> None:
    first, *others = results["operations"]
    failed = {**first, "checks": {"p2p": False}, "errors": {"p2p": "<lost rows>"}, "seconds": {"p2p": []}}
    html = render_report({**results, "operations": [failed, *others]})
    minidom.parseString(html)
    assert "&lt;lost rows&gt;" in html


def test_demo_refuses_an_unknown_method() -> None:
    done = run("-m", "dask_gpurt", "demo", "--methods", "gpurt,disc", code=2)
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
    good = Outcome("a", 1, {}, checks={"gpurt": True, "p2p": True})
    assert all_passed([good], ["gpurt", "p2p"])
    assert all_passed([Outcome("a", 1, {}, checks={"gpurt": True}, errors={"p2p": "x"})], ["gpurt", "p2p"])
    assert not all_passed([good, Outcome("b", 1, {}, checks={"p2p": True})], ["gpurt", "p2p"])
    assert not all_passed([Outcome("b", 1, {}, checks={"gpurt": True, "p2p": False})], ["gpurt", "p2p"])


def test_methods_are_split_and_speedups_are_geometric_means() -> None:
    assert choose_methods("gpurt, p2p") == ["gpurt", "p2p"]
    seconds = {"a": {"gpurt": [1.0], "tasks": [2.0]}, "b": {"gpurt": [1.0], "tasks": [8.0]}}
    assert speedups(seconds) == pytest.approx({"tasks": 4.0})


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example: Path) -> None:
    printed = run(example).stdout
    assert printed
    assert "off" not in printed


def test_shuffle_benchmark_checks_and_writes_its_results(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    arguments = ("--size", "4MiB", "--partitions", "4", "--workers", "2", "--backend", "pandas")
    done = run("benchmarks/shuffle.py", *arguments, "--repeat", "1", "--json", output)
    assert "gpurt against p2p" in done.stdout
    results = json.loads(output.read_text())
    assert len(results["runs"]) == 3 * 3 * 2
    assert {figure["operation"] for figure in results["figures"]} == {"shuffle", "merge", "set_index"}
    for figure in results["figures"]:
        assert 0 < figure["share_of_link_limit"] < 1
        assert figure["peak_bytes"]["host"] > 0
    assert results["link_limit"]["bytes_per_second"] > 0
    assert set(results["speedups"]) == {"tasks", "p2p"}
