"""Count consecutive failed runs and losses, and merge the losses of shuffles that share outputs."""

from __future__ import annotations

from dask_gpurt.shuffle.losses import ConsecutiveLosses, ConsecutiveRuns, PendingLosses, common_owners


def test_a_run_that_was_completed_begins_the_count_anew() -> None:
    runs = ConsecutiveRuns()
    runs.begins("a", ["x", "y"])
    runs.begins("a", ["x", "y"])
    for key in ("y", "another", "x"):
        runs.done(key)
    assert runs["a"] == 0
    runs.begins("a", ["y"])  # x is still in memory
    assert runs["a"] == 1
    runs.done("y")
    assert runs["a"] == 0


def test_nothing_is_kept_of_what_is_forgotten() -> None:
    runs = ConsecutiveRuns()
    runs.begins("a", ["x"])
    runs.begins("b", ["y", "z"])
    runs.done("x")
    runs.forget("b")
    runs.forget("never there")
    assert not any(vars(runs).values())


A, B = "tcp://a:1", "tcp://b:1"


def test_a_worker_that_is_lost_counts_once_however_often_it_is_told_of() -> None:
    losses = ConsecutiveLosses()
    losses.loses("a", ["x", "y"], [A], [])  # the scheduler removes it
    losses.loses("a", ["x", "y"], [A], [])  # another worker cannot reach it
    losses.loses("a", ["x", "y"], [A], [3])  # a third cannot read a shard of it
    losses.loses("a", ["x", "y"], [], ["transfer-1", "transfer-2"])  # the barrier finds what is missing
    assert losses["a"] == 1
    losses.loses("a", ["y"], [B], [])
    assert losses["a"] == 2


def test_an_input_that_is_missing_again_is_another_loss() -> None:
    losses = ConsecutiveLosses()
    losses.loses("a", ["x"], [A], [])
    losses.loses("a", ["x"], [], ["transfer-1"])
    losses.loses("a", ["x"], [], ["transfer-1"])
    assert losses["a"] == 2
    losses.loses("a", ["x"], [], ["transfer-2"])
    assert losses["a"] == 2


def test_a_worker_is_lost_again_after_it_has_taken_part_again() -> None:
    losses = ConsecutiveLosses()
    losses.loses("a", ["x"], [A], [])
    losses.takes_part(A)
    losses.loses("a", ["x"], [A], [])
    assert losses["a"] == 2


def test_a_run_is_completed_with_the_outputs_that_were_lost_last() -> None:
    losses = ConsecutiveLosses()
    losses.loses("a", ["x"], [A], [])
    losses.loses("a", ["x", "y"], [A], [3])
    losses.done("x")
    assert losses["a"] == 1
    losses.done("y")
    assert losses["a"] == 0
    losses.loses("a", ["x"], [], [3])
    assert losses["a"] == 1


def test_inputs_missing_after_a_move_without_a_loss_do_not_count() -> None:
    losses = ConsecutiveLosses()
    losses.moves("a")
    losses.loses("a", ["x"], [], ["transfer-1", "transfer-2"])
    assert losses["a"] == 0
    losses.loses("a", ["x"], [], ["transfer-1"])  # it counts if it is missing again
    assert losses["a"] == 1
    losses.moves("a")
    losses.loses("a", ["x"], [A], [])  # as does a lost worker
    assert losses["a"] == 2


# ---- losses of shuffles that share outputs -----------------------------------------------------------


def test_a_loss_after_a_repair_is_another_one() -> None:
    losses = PendingLosses[str]()
    repaired = losses.add({"shuffle"}, {1}, "a shard is lost", 5.0)
    losses.forget(losses.shuffles(repaired))
    assert "shuffle" not in losses
    assert not losses
    assert losses.add({"shuffle"}, {2}, "a shard is lost", 6.0).outputs == {2}


def test_a_retirement_is_no_loss_until_something_is_missing() -> None:
    loss = PendingLosses[str]().add({"shuffle"}, {1}, "worker w retires", 5.0)
    assert not loss.is_loss
    loss.missing.add(1)
    assert loss.is_loss


def test_outputs_have_common_owners_only_if_all_sides_agree() -> None:
    left, right = {1: "a", 2: "b", 3: "c"}, {1: "a", 2: "b"}
    assert common_owners({1, 2}, [left, right]) == {1: "a", 2: "b"}
    assert common_owners({1, 3}, [left, right]) == {}
    assert common_owners(set(), [left, right]) == {}


def test_losses_of_shuffles_that_share_outputs_only_now_become_one() -> None:
    losses = PendingLosses[str]()
    one, other = losses.add({"a"}, {1}, "w1 left", 1.0), losses.add({"b", "c"}, {3}, "w9 left", 0.5)
    one.gone.add("w1")
    other.gone.add("w9")
    other.missing.add("transfer")
    other.culprits.add("w9")
    both = losses.add({"a", "b"}, {5}, "an output is missing", 2.0)
    assert (both.reason, both.since, both.outputs) == ("w9 left", 0.5, {1, 3, 5})
    assert (both.gone, both.missing, both.culprits) == ({"w1", "w9"}, {"transfer"}, {"w9"})
    assert sorted(losses.shuffles(both)) == ["a", "b", "c"]
    assert both is other
    assert losses.shuffles(one) == []
