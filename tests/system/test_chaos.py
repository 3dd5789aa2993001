"""Test the chaos tool: what it draws, what it breaks, and that its checker finds errors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from dask._expr import SingletonExpr
from distributed import Worker
from hypothesis import given
from hypothesis import strategies as st

import dask_gpurt
from benchmarks.chaos import FAULTS, OPERATIONS, Plan
from benchmarks.chaos.command import chaos as command
from benchmarks.chaos.faults import MESSAGES
from benchmarks.chaos.leftovers import Probe, growth, of_probes, of_threads
from benchmarks.chaos.operation import difference
from benchmarks.chaos.worker_side import OF_THE_RUNTIME
from dask_gpurt.device import PoolFull
from dask_gpurt.exchange import Exchange
from tests.helpers.in_process import gen_client_cluster
from tests.helpers.shared_memory import alone_in_shm

seeds, numbers = st.integers(0, 2**32), st.integers(0, 10_000)


def plan(seed: int, rows: int = 1_000_000) -> Plan:
    return Plan(seed, list(OPERATIONS), list(FAULTS), rows)


# ---- the plan ------------------------------------------------------------------------


@given(seeds, numbers, numbers)
def test_a_step_depends_on_the_seed_and_its_number_alone(seed: int, number: int, other: int) -> None:
    state = random.getstate()
    first = plan(seed).step(number)
    again = plan(seed)
    again.step(other)
    assert again.step(number) == first
    assert again.setup == plan(seed).setup
    assert random.getstate() == state


# ---- the checker ---------------------------------------------------------------------

RIGHT = pd.DataFrame({"key": [1, 1, 2, 3], "row": [0, 1, 2, 3], "value": [0.5, None, 2.5, 3.5]})


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([RIGHT[RIGHT.key == 2], RIGHT[RIGHT.key != 2].iloc[::-1]], None),
        ([RIGHT, RIGHT[RIGHT.row == 3]], "5 rows, expected 4 (1 more than once, 0 missing, 0 made up)"),
        ([RIGHT[RIGHT.row > 0]], "3 rows, expected 4 (0 more than once, 1 missing, 0 made up)"),
        ([RIGHT.assign(row=[0, 1, 2, 2])], "(1 more than once, 1 missing, 0 made up)"),
        ([RIGHT.assign(value=[0.5, None, 2.5, 3.6])], "DataFrame.iloc[:, 2]"),
        ([RIGHT[RIGHT.row != 1], RIGHT[RIGHT.row == 1]], "rows of one key are in several partitions: [1]"),
        ([RIGHT.drop(columns="value")], "columns ['key', 'row']"),
    ],
)
def test_invalid_options_are_reported(parts: list[pd.DataFrame], problem: str | None) -> None:
    found = difference(parts, RIGHT, by=["row"], homes="key")
    assert found == problem or (problem and found and problem in found)


def test_disorder_across_partitions_is_found() -> None:
    parts = [RIGHT[2:], RIGHT[:2]]
    assert "row 0 in order of 'key' is" in str(difference(parts, RIGHT, by=["row"], ordered_by="key"))
    assert difference(parts[::-1], RIGHT, by=["row"], ordered_by="key") is None


def test_a_mapping_of_a_dead_process_is_told() -> None:
    one = Probe(0, frozenset({1}), frozenset({1, 2, 3}), 0, (), ())
    other = Probe(0, frozenset({2}), frozenset({2}), 4, ("<a run>",), ("gpurt-comm_0",))
    assert of_probes({"a": one, "b": other}) == [
        "a maps 1 pools of processes that have ended",
        "b keeps 4 shards that were offered to it",
        "b keeps <a run>",
    ]
    assert of_threads({"a": one, "b": other}) == ["b keeps 1 threads when the runtime is off: gpurt-comm_0"]


def test_memory_that_grows_is_told() -> None:
    flat = [(float(at), 200 * 2**20 + at) for at in range(0, 300, 10)]
    assert growth(flat) is None
    assert growth([(at, nbytes + int(at) * 2**20) for at, nbytes in flat])
    assert growth([(float(at), at * 2**30) for at in range(60)]) is None  # too short to tell


# ---- faults in a process -------------------------------------------------------------


@gen_client_cluster()
async def test_the_parts_that_faults_wrap_exist(c: Any, s: Any, a: Worker, b: Worker) -> None:
    """A fault that patches a renamed function of the runtime would never occur, and test nothing."""
    await dask_gpurt.enable(c)
    assert set(MESSAGES.values()) <= set(a.handlers)
    exchange = a.plugins["gpurt"].exchange
    refusing = OF_THE_RUNTIME["offers"](exchange, one_in=1, seed=0)
    with pytest.raises(MemoryError):
        exchange.take()
    refusing.stop()
    assert exchange.take.__func__ is Exchange.take
    pool = exchange.pools.known("host").pool
    failing = OF_THE_RUNTIME["transfers"](exchange, one_in=1, seed=0)
    for error in (PoolFull, RuntimeError):
        with pytest.raises(error):
            exchange.pools.known("host").allocate(1)
    failing.stop()
    assert "allocate" not in vars(pool)
    (device,) = exchange.pools.devices.values()
    failing = OF_THE_RUNTIME["allocations"](exchange, one_in=1, seed=0)
    with pytest.raises(MemoryError):
        device.gather([])
    failing.stop()
    assert "gather" not in vars(device)
    await dask_gpurt.disable(c)


# ---- the command ---------------------------------------------------------------------


def chaos(*arguments: str) -> Result:
    with alone_in_shm():
        return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize("option", ["--only", "--faults"])
def test_a_pattern_that_matches_nothing_is_refused(option: str) -> None:
    done = chaos(option, "shufle")
    assert done.exit_code == 2
    assert "'shufle' matches none of" in done.output


@pytest.mark.slow
def test_no_faults_and_all_is_well_and_a_wrong_row_is_not(tmp_path: Path) -> None:
    """Only two runs: each starts a cluster of processes, and lists /dev/shm before and after."""
    size = ("--rows", "2000", "--workers", "2", "--roomy", "--json", str(tmp_path / "report"))
    done = chaos("--steps", "2", "--seed", "1", "--faults", "", *size)
    looks_up = SingletonExpr.__new__  # not earlier: closed clients of other tests may have had the runtime on
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "report").read_text())["well"]

    seed = next(n for n in range(99) if Plan(n, ["shuffle"], ["wrong-row"]).step(0).faults)
    done = chaos("--steps", "1", "--seed", str(seed), "--only", "shuffle", "--faults", "wrong-row", *size)
    assert done.exit_code == 1, done.output
    assert "(0 more than once, 1 missing, 0 made up)" in done.output
    report = json.loads((tmp_path / "report").read_text())
    assert {row["ending"] for row in report["outcomes"]} == {"wrong"}
    assert report["left"] == []
    assert SingletonExpr.__new__ is looks_up, "the tool leaves Dask patched in its process"
