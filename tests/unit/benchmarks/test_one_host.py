"""Test the rules of the benchmark of placement among the workers of one host."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from benchmarks.placement.one_host import Plan, turns
from benchmarks.placement.one_host_cells import CELLS, homes, left, partial, plain, right, size_of
from benchmarks.placement.one_host_figures import Run, figures, table
from dask_gpurt.config.values import Size


def made(side: str, turn: int, seconds: float) -> Run:
    return Run(side, turn, seconds, moved=0, spilled=0, decisions=0, first_share=0.9, first_free=0.5)


def test_the_first_worker_holds_its_share_and_the_others_take_turns() -> None:
    assert homes("abc", 10, 0.9) == ["a"] * 9 + ["b"]
    assert homes("abc", 20, 0.9) == ["a"] * 18 + ["b", "c"]
    assert homes("ab", 2, 0.9) == ["a", "a"]
    assert homes("ab", 4, None) == ["a", "b", "a", "b"]


def test_a_turn_is_skipped_that_may_end_later() -> None:
    clock = iter([100.0, 60.0, 60.0, 30.0, 30.0])
    assert list(turns(7, lambda: next(clock))) == [0, 1]


def test_all_turns_run_where_time_is_left() -> None:
    assert list(turns(3, lambda: 100.0)) == [0, 1, 2, 3]


def test_turns_that_one_side_has_not_ended_do_not_count() -> None:
    runs = [made(side, turn, 2.0 if side == "off" else 1.0) for turn in range(3) for side in ("off", "on")]
    found = figures([*runs, made("off", 3, 9.0)])
    assert found["turns"] == 2
    assert found["ratio"]["ratio"] == pytest.approx(2.0)
    assert found["off"]["seconds"] == 2.0


def test_a_cell_with_too_few_turns_has_no_figures_and_says_why() -> None:
    runs = [made(side, turn, 1.0) for turn in range(2) for side in ("off", "on")]
    assert figures(runs) == {} == figures([])
    cells: dict[str, dict[str, Any]] = {
        "uneven": {"figures": {}, "error": None},
        "pressure": {"figures": {}, "error": "MemoryError: x"},
    }
    assert list(table(cells).columns[1].cells) == ["too few turns", "MemoryError: x"]


@pytest.mark.parametrize("cell", list(CELLS))
def test_a_gpu_has_room_for_the_pools_of_both_clusters(cell: str) -> None:
    settings = Plan(2, "cudf", "ucx", 0.35).settings(CELLS[cell], "on")
    tier, exchange = (Size.parse(settings[f"gpurt.{name}"]) for name in ("memory.device", "exchange.pool"))
    assert tier.fraction == pytest.approx(0.28)
    assert exchange.fraction is not None
    assert 2 * (0.35 + exchange.fraction) < 0.9


def test_the_program_agrees_with_a_result_that_takes_no_join() -> None:
    size = size_of(16_000, 4, "pandas")
    both = [pd.concat([make(part, size, 0) for part in range(4)]) for make in (left, right)]
    merged = both[0].merge(both[1], on="key")
    joined = merged.groupby("weight").payload.agg(["count", "sum"])
    summed = pd.concat([partial(part, size) for part in range(4)]).groupby(level=0).sum()
    assert plain(joined).equals(plain(summed))
