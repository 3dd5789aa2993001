"""Merge the losses of shuffles that share outputs, and find the owners that all sides of a join agree on."""

from __future__ import annotations

from dask_gpurt.shuffle.losses import PendingLosses, common_owners


def test_losses_of_the_same_outputs_are_repaired_together() -> None:
    losses = PendingLosses[str]()
    first = losses.add({"left", "right"}, {1}, "a worker has left", 5.0)
    second = losses.add({"right", "left"}, {2}, "a shard is lost", 6.0)
    other = losses.add({"alone"}, {1}, "a shard is lost", 7.0)
    assert first is second is not other
    assert (first.reason, first.since, first.outputs) == ("a worker has left", 5.0, {1, 2})
    assert sorted(losses.shuffles(first)) == ["left", "right"]


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
