"""Run ``dask gpurt simulate`` as a user types it."""

from __future__ import annotations

import json
import statistics

import pytest
from click.testing import CliRunner, Result

from dask_gpurt.cli import main

SMALL = ("--cluster", "dgx", "--partitions", "8")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_json_has_the_figures_of_both() -> None:
    done = command(*SMALL, "--workload", "shuffle-join", "--compare", "stock", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    ours, stock = said["results"]
    assert (ours["placement"], stock["placement"]) == ("gpurt", "stock")
    for one in (ours, stock):
        assert one["workers"] == 8
        assert one["runs"] == one["tasks"] > 0
        assert one["makespan"] > 0
        assert one["decision_us"] > 0
        assert set(one["bytes"]) <= {"nvlink", "same-device"}
    assert said["summary"]["speedup"] == pytest.approx(stock["makespan"] / ours["makespan"])
    assert said["summary"]["worst"] == "shuffle-join on dgx"


def test_a_table_for_people() -> None:
    done = command(*SMALL, "--workload", "tree-reduction", "--compare", "stock")
    assert done.exit_code == 0, done.output
    assert "tree-reduction" in done.stdout
    for row in ("makespan", "between hosts", "spilled", "worst memory", "a decision"):
        assert row in done.stdout
    assert "stock takes 1.00 times as long as gpurt" in done.stdout
    first, second = done.stderr.splitlines()
    assert first == "tree-reduction on dgx with gpurt (0 of 2 done)"
    assert second == "tree-reduction on dgx with stock (1 of 2 done)"


@pytest.mark.nightly
def test_several_seeds_count_together() -> None:
    said = json.loads(command(*SMALL, "--compare", "stock", "--repeat", "3", "--json").stdout)
    ours, stock = (
        [one["makespan"] for one in said["results"] if one["placement"] == name]
        for name in ("gpurt", "stock")
    )
    assert len(set(stock)) == 3
    ratios = [their / our for our, their in zip(ours, stock, strict=True)]
    assert said["summary"]["worst_speedup"] == pytest.approx(statistics.geometric_mean(ratios))


def test_what_dask_gives_up_is_said_with_its_reason() -> None:
    done = command("--workload", "tree-reduction", "--workers", "64", "--partitions", "4")
    assert done.exit_code == 1
    assert "tree-reduction on rdma with gpurt: ('tree-level0', 0) failed" in done.output
    assert "worth of input dependencies" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "sort"], "'sort' is not one of"),
        (["--workers", "5000"], "5000 is not in the range 1<=x<=4096"),
        (["--partitions", "1"], "1 is not in the range x>=2"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], said: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2
    assert said in done.output
