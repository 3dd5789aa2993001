"""Test the benchmark of skewed keys: data, checks and figures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pandas as pd
import pytest
from click.testing import CliRunner

from benchmarks.skew import clusters
from benchmarks.skew.__main__ import main, turns
from benchmarks.skew.contest import in_order, rows_by_worker
from benchmarks.skew.figures import Run, busiest, figures
from benchmarks.skew.frames import (
    KEYS,
    Size,
    digest,
    expected,
    join,
    left_frame,
    left_part,
    right_frame,
    total,
)

SIZE = Size(rows=4003, partitions=3)


def left(keys: str) -> pd.DataFrame:
    return pd.concat([left_part(part, keys, SIZE) for part in range(SIZE.partitions)])


def test_few_keys_have_most_rows() -> None:
    shares = {keys: left(keys).key.value_counts(normalize=True).iloc[0] for keys in KEYS}
    assert shares["even"] < 0.01
    assert shares["zipf"] == pytest.approx(0.25, abs=0.05)
    assert shares["hot"] == pytest.approx(0.30, abs=0.05)


@pytest.mark.parametrize("keys", list(KEYS))
def test_joins_have_a_row_for_each_of_the_left_side_whatever_its_keys_are(keys: str) -> None:
    sides = left_frame(keys, SIZE), right_frame(SIZE)
    parts = join(*sides).to_delayed()
    found = total([digest(part.compute(scheduler="sync")) for part in parts])
    assert found == expected(keys, SIZE)
    assert found.rows == SIZE.rows


def test_a_digest_tells_rows_but_not_their_order() -> None:
    rows = pd.DataFrame({"key": [1, 2, 3], "payload": [4, 5, 6]})
    assert digest(rows.iloc[::-1]) == digest(rows) == total([digest(rows[:1]), digest(rows[1:])])
    swapped = rows.assign(payload=[5, 4, 6])
    for other in (rows[:2], swapped, pd.concat([rows, rows[:1]]), rows.rename(columns={"key": "z"})):
        assert digest(other) != digest(rows)
    assert digest(rows[:0]) == (0, 0)


def run(cell: str, contender: str, turn: int, seconds: float) -> Run:
    return Run(cell, contender, turn, seconds, [30, 10], [1.0, seconds], [200, 100], moved=turn)


def test_cells_are_compared_with_their_yardstick_of_the_same_turn() -> None:
    runs = [
        run("even", "gpurt", 0, 99), run("hot", "gpurt", 0, 1),
        run("even", "gpurt", 1, 2), run("hot", "gpurt", 1, 4),
        run("even", "gpurt", 2, 4), run("hot", "gpurt", 2, 8),
        run("even", "tasks", 1, 6), run("hot", "tasks", 1, 6),
        run("even", "tasks", 2, 12), run("hot", "tasks", 2, 12),
    ]  # fmt: skip
    found = {
        (each["cell"], each["contender"]): each for each in figures(runs, {"hot": "even"}, "gpurt", limit=400)
    }
    assert len(found) == 4
    ours = found["hot", "gpurt"]
    assert ours["of_yardstick"] == pytest.approx({"ratio": 2, "low": 2, "high": 2})
    assert ours["busiest_processor_seconds"]["ratio"] == pytest.approx(2)
    assert (ours["busiest_rows"], ours["outputs_moved"], ours["peak_of_limit"]) == (1.5, 1.5, 0.5)
    assert ours["seconds"] == {"median": 6, "min": 4, "max": 8}
    assert "of_yardstick" not in found["even", "gpurt"]
    assert found["even", "tasks"]["times_gpurt"]["ratio"] == pytest.approx(3)
    assert found["even", "tasks"]["processor_times_gpurt"]["ratio"] == pytest.approx((7 / 3 * 13 / 5) ** 0.5)
    assert found["hot", "tasks"]["of_yardstick"]["ratio"] == pytest.approx(1)
    assert (busiest([1, 3]), busiest([0, 0])) == (1.5, 1)


def test_rows_count_where_they_are() -> None:
    holders = {("join-1a", 1): ["b", "a"], ("join-1a", 0): ["a"], ("join-1a", 2): ["b"]}
    assert rows_by_worker([1, 10, 100], holders, ["a", "b", "c"]) == [1, 110, 0]


def test_cells_come_with_what_they_are_compared_with() -> None:
    assert in_order(["hot"]) == ["even", "hot"]


def test_turns_end_before_the_limit_and_are_enough_for_an_interval() -> None:
    def seconds(*each: float) -> Iterator[float]:
        """Return the clock's readings: at the start, and before and after each turn."""
        now = 0.0
        yield now
        for one in each:
            yield now
            now += one
            yield now
        yield now

    assert list(turns(4, None)) == [0, 1, 2, 3, 4]
    assert list(turns(2, 0.0)) == [0, 1, 2]
    slow = seconds(10, 30, 10, 10)
    assert list(turns(9, 85.0, clock=lambda: next(slow))) == [0, 1, 2, 3]  # the longest took 30, 60 are over
    assert list(islice(turns(9, 1e9), 5)) == [0, 1, 2, 3, 4]


def test_a_contender_that_this_version_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "KEYS", ())
    done = CliRunner().invoke(main, ["--contenders", "gpurt-unbalanced"])
    assert done.exit_code == 2
    assert "needs the setting gpurt.shuffle.balance" in done.output
