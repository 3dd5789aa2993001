"""Watch published shards that their owners do not know of."""

from __future__ import annotations

from dask_gpurt.exchange.pools import UNCLAIMED_PATIENCE_S, UnclaimedShards

ONE, OTHER = ("a shuffle", 1), ("a shuffle", 2)
FIRST, SECOND = ("host", 0, 0), ("host", 1, 0)
LATER = UNCLAIMED_PATIENCE_S


def watched() -> tuple[UnclaimedShards, list[tuple[str, str]]]:
    """Return the watch of two runs, and the list of those that are told, each with the owner."""
    shards, told = UnclaimedShards(), list[tuple[str, str]]()
    shards.begins(ONE, lambda owner: told.append(("one", owner)))
    shards.begins(OTHER, lambda owner: told.append(("other", owner)))
    return shards, told


def test_a_run_is_told_that_an_owner_does_not_know_of_its_shards() -> None:
    shards, told = watched()
    shards.answers("a", {FIRST: ONE, SECOND: ONE}, 0.0)
    shards.answers("b", {}, LATER)
    assert not told
    shards.answers("a", {FIRST: ONE, SECOND: ONE}, LATER)
    assert told == [("one", "a")]


def test_shards_that_are_released_or_published_meanwhile_do_not_count() -> None:
    shards, told = watched()
    shards.answers("a", {FIRST: ONE}, 0.0)
    shards.answers("a", {SECOND: OTHER}, LATER)
    shards.answers("a", {SECOND: OTHER}, LATER + 1)
    assert not told
    shards.answers("a", {FIRST: ONE, SECOND: OTHER}, 2 * LATER)
    assert told == [("other", "a")]


def test_an_owner_that_holds_shards_is_given_time() -> None:
    """It releases them as soon as it has copied them, and then answers that it holds none."""
    shards, told = watched()
    shards.answers("a", {FIRST: ONE}, 0.0)
    shards.answers("a", {}, LATER)
    shards.answers("a", {FIRST: ONE}, LATER)
    assert not told


def test_runs_that_have_ended_and_owners_that_have_left_are_forgotten() -> None:
    shards, told = watched()
    for owner in ("a", "b"):
        shards.answers(owner, {FIRST: ONE, SECOND: OTHER}, 0.0)
    shards.ends(OTHER)
    shards.ends(OTHER)
    shards.forget("b")
    for owner in ("a", "b"):
        shards.answers(owner, {FIRST: ONE, SECOND: OTHER}, LATER)
    assert told == [("one", "a")]
