"""Run the benchmark of the examples on small data, and check its results."""

from __future__ import annotations

from benchmarks.programs.__main__ import ALONE, RUNTIME, Run, figures


def test_first_and_warm_runs_of_each_contender_have_figures_of_their_own() -> None:
    runs = [
        Run("flights", contender, turn, 0.5, warm, seconds, {})
        for contender, times in ((RUNTIME, (1.0, 3.0, 2.0)), (ALONE, (5.0, 4.0, 9.0)))
        for turn, first in enumerate(times)
        for warm, seconds in enumerate((first, first / 2, first / 4))
    ]
    assert [
        (row["contender"], row["warm"], row["runs"], *row["seconds"].values()) for row in figures(runs)
    ] == [
        (RUNTIME, False, 3, 2, 1, 3),
        (RUNTIME, True, 6, 0.625, 0.25, 1.5),
        (ALONE, False, 3, 5, 4, 9),
        (ALONE, True, 6, 2.125, 1, 4.5),
    ]
