"""Measure gaps between tasks per thread, in the order of execution."""

from __future__ import annotations

from benchmarks.overlap.between_tasks import Run, compare, gaps
from dask_gpurt.tools.bench.budget import Step

ONE, OTHER = ("a", 1), ("b", 1)


def test_gaps_are_between_the_tasks_of_one_thread() -> None:
    steps = [
        Step("x", "compute", ONE, 3.0, 4.0),
        Step("x", "compute", ONE, 1.0, 2.5),
        Step("x", "compute", OTHER, 2.5, 2.75),
        Step("x", "transfer", ONE, 2.5, 3.0),
        Step("x", "compute", OTHER, 3.75, 5.0),
    ]
    assert sorted(gaps(steps)) == [0.5, 1.0]


def test_runs_are_compared_in_pairs() -> None:
    runs = [
        Run("chain", on, 1.0 if on else 2.0 * turn, 1, 1, 1, 1) for turn in (1, 2, 3) for on in (True, False)
    ]
    found = compare(runs)["chain"]["gap_ms"]
    assert (found["on"], found["off"], found["ratio"]) == (1.0, 4.0, 0.25)
    low, high = found["interval"]
    assert 1 / 6 <= low <= 0.25 <= high <= 0.5
