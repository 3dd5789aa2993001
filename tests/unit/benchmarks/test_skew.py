"""Test the benchmark of skewed keys and slow workers: data, checks, figures, and the stopped process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import click
import pandas as pd
import psutil
import pytest
from click.testing import CliRunner

from benchmarks.skew import clusters
from benchmarks.skew.__main__ import link_of, main, turns
from benchmarks.skew.contest import in_order, rows_by_worker
from benchmarks.skew.figures import (
    Run,
    busiest,
    capacity_left,
    figures,
    ideal_with_slow_link,
    slow_link_lines,
)
from benchmarks.skew.frames import (
    KEYS,
    Size,
    digest,
    expected,
    join,
    join_groupby,
    left_frame,
    left_part,
    right_frame,
    total,
)
from benchmarks.skew.slowed import half_speed
from tests.helpers.waiting import until

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
    for build, grouped in ((join, False), (join_groupby, True)):
        parts = build(*sides).to_delayed()
        found = total([digest(part.compute(scheduler="sync")) for part in parts])
        assert found == expected(keys, SIZE, grouped)
        assert grouped or found.rows == SIZE.rows


def test_a_digest_tells_rows_but_not_their_order() -> None:
    rows = pd.DataFrame({"key": [1, 2, 3], "payload": [4, 5, 6]})
    assert digest(rows.iloc[::-1]) == digest(rows) == total([digest(rows[:1]), digest(rows[1:])])
    swapped = rows.assign(payload=[5, 4, 6])
    for other in (rows[:2], swapped, pd.concat([rows, rows[:1]]), rows.rename(columns={"key": "z"})):
        assert digest(other) != digest(rows)
    assert digest(rows[:0]) == (0, 0)


def run(cell: str, contender: str, turn: int, seconds: float, capacity: float = 1.0) -> Run:
    return Run(
        cell,
        contender,
        turn,
        seconds,
        capacity,
        [30, 10],
        [1.0, seconds],
        [200, 100],
        moved=turn,
        slow=None if capacity == 1 else 0,
    )


def test_cells_are_compared_with_their_yardstick_of_the_same_turn_and_what_was_left() -> None:
    runs = [
        run("full-speed", "gpurt", 0, 99), run("half-speed", "gpurt", 0, 1),
        run("full-speed", "gpurt", 1, 2), run("half-speed", "gpurt", 1, 4, capacity=0.75),
        run("full-speed", "gpurt", 2, 4), run("half-speed", "gpurt", 2, 8, capacity=0.75),
        run("full-speed", "tasks", 1, 6), run("half-speed", "tasks", 1, 6, capacity=0.75),
        run("full-speed", "tasks", 2, 12), run("half-speed", "tasks", 2, 12, capacity=0.75),
    ]  # fmt: skip
    found = {
        (each["cell"], each["contender"]): each
        for each in figures(runs, {"half-speed": "full-speed"}, "gpurt", limit=400)
    }
    assert len(found) == 4
    ours = found["half-speed", "gpurt"]
    assert ours["of_ideal"] == pytest.approx({"ratio": 1.5, "low": 1.5, "high": 1.5})
    assert ours["busiest_processor_seconds"]["ratio"] == pytest.approx(2)
    assert (ours["busiest_rows"], ours["outputs_moved"], ours["peak_of_limit"]) == (1.5, 1.5, 0.5)
    assert ours["seconds"] == {"median": 6, "min": 4, "max": 8}
    assert ours["slow_processor"] == pytest.approx((1 / 2.5 + 1 / 4.5) / 2)
    assert "of_ideal" not in found["full-speed", "gpurt"]
    assert found["full-speed", "tasks"]["times_gpurt"]["ratio"] == pytest.approx(3)
    assert found["full-speed", "tasks"]["processor_times_gpurt"]["ratio"] == pytest.approx(
        (7 / 3 * 13 / 5) ** 0.5
    )
    assert found["half-speed", "tasks"]["of_ideal"]["ratio"] == pytest.approx(0.75)


def test_others_take_the_time_of_a_stopped_worker_where_processors_are_shared() -> None:
    assert capacity_left(workers=4, threads=1, stopped=0.5, cores=16) == pytest.approx(3.5 / 4)
    assert capacity_left(workers=2, threads=1, stopped=0.5, cores=2) == pytest.approx(0.75)
    assert capacity_left(workers=4, threads=1, stopped=0.5, cores=2) == 1
    assert (busiest([1, 3]), busiest([0, 0])) == (1.5, 1)


def test_a_worker_with_a_slow_link_has_an_ideal_share() -> None:
    def ideal(seconds: float, rate: int, cores: int = 16) -> float:
        """Return the ideal time for four single-threaded workers that shuffle 160 MB."""
        return ideal_with_slow_link(seconds, 160e6, rate, workers=4, threads=1, cores=cores)

    assert ideal(3.0, 10**9) == pytest.approx(3.0), "the link is fast enough for a quarter"
    assert ideal(3.0, 1) == pytest.approx(4.0, rel=0.01), "the others do all"
    assert ideal(3.0, 1, cores=2) == pytest.approx(3.0, rel=0.01), "so they do, by as many processors"
    between = ideal(3.0, 5 * 10**6)
    share = 1 - between / 4.0
    assert share * (1 - share) * 160e6 / 5e6 == pytest.approx(between, rel=0.02)


def test_the_ideal_of_a_slow_link_is_by_what_the_yardstick_has_shuffled() -> None:
    full = replace(run("full-speed", "gpurt", 1, 3.0), sent=[30, 30, 30, 30], received=[30] * 4)
    slow = replace(run("slow-link", "gpurt", 1, 6.0), sent=[1, 2, 3, 4], received=[9, 8, 7, 6])
    slow = replace(slow, rows=[1] * 4, processor_seconds=[1.0] * 4, slow=3, slow_rate=10, cores=16)
    again = [replace(each, turn=2) for each in (full, slow)]  # an interval takes two turns
    (_, found) = figures([full, slow, *again], {"slow-link": "full-speed"}, "gpurt", limit=400)
    ideal = ideal_with_slow_link(3.0, 160, 10, workers=4, threads=1, cores=16)
    assert found["ideal_seconds"] == ideal
    assert found["of_ideal"]["ratio"] == pytest.approx(6.0 / ideal)
    assert (found["link_sent"], found["link_received"]) == (4, 6)
    formula, line = slow_link_lines([found])
    assert "s (1 - s)" in formula
    assert line.startswith(f"slow-link, gpurt: ideal {ideal:.2f} s")


def test_cells_with_links_and_without_do_not_mix() -> None:
    assert link_of(["zipf"], 10) is None
    assert link_of(["slow-link", "slow-link-known"], 10) == 10
    with pytest.raises(click.UsageError, match="half-speed"):
        link_of(["slow-link", "half-speed"], 10)


def test_rows_count_where_they_are() -> None:
    holders = {("join-1a", 1): ["b", "a"], ("join-1a", 0): ["a"], ("join-1a", 2): ["b"]}
    assert rows_by_worker([1, 10, 100], holders, ["a", "b", "c"]) == [1, 110, 0]


def test_cells_come_with_what_they_are_compared_with() -> None:
    assert in_order(["hot"]) == ["even", "hot"]
    assert in_order(["half-speed-known", "zipf"])[2:] == [
        "full-speed", "half-speed", "half-speed-known", "settle",
    ]  # fmt: skip


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


def test_a_stopped_process_goes_on_in_the_end_and_may_end_meanwhile() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            with half_speed(process.pid) as cycle:
                until(lambda: cycle.stopped_seconds > 0)
            assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
            with half_speed(process.pid) as cycle:
                until(lambda: cycle.stopped_seconds > 0)
                process.kill()
                process.wait()
                until(lambda: not cycle.running)
        finally:
            process.kill()


def test_a_contender_that_this_version_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "KEYS", ())
    done = CliRunner().invoke(main, ["--contenders", "gpurt-unbalanced"])
    assert done.exit_code == 2
    assert "needs the setting gpurt.shuffle.balance" in done.output
