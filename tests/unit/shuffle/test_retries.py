"""Count the runs of a shuffle that count."""

from __future__ import annotations

from dask_gpurt.shuffle.retries import RunsInARow


def test_runs_that_fail_in_a_row_add_up() -> None:
    runs = RunsInARow()
    for so_far in range(4):
        assert runs["a"] == so_far
        runs.begins("a", ["x", "y"])
        runs.done("x")  # and then a worker is lost


def test_a_run_that_was_completed_begins_the_count_anew() -> None:
    runs = RunsInARow()
    runs.begins("a", ["x", "y"])
    runs.begins("a", ["x", "y"])
    for key in ("y", "another", "x"):
        runs.done(key)
    assert runs["a"] == 0
    runs.begins("a", ["y"])  # x is still in memory
    assert runs["a"] == 1
    runs.done("y")
    assert runs["a"] == 0


def test_an_output_of_two_shuffles_counts_for_both() -> None:
    runs = RunsInARow()
    runs.begins("left", ["x"])
    runs.begins("right", ["x", "y"])
    runs.done("x")
    assert (runs["left"], runs["right"]) == (0, 1)


def test_nothing_is_kept_of_what_is_forgotten() -> None:
    runs = RunsInARow()
    runs.begins("a", ["x"])
    runs.begins("b", ["y", "z"])
    runs.done("x")
    runs.forget("b")
    runs.forget("never there")
    assert not any(vars(runs).values())
