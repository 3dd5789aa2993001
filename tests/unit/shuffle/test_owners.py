"""Assign the outputs of a run to owners, and reassign some of them while the others stay as they are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.shuffle.owners import Owners, Share, deal, fair_share

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"


def begun() -> Owners:
    return Owners.begin({0: A, 1: A, 2: B, 3: B})


def shares(owners: Owners) -> list[Share]:
    return [owners.shares[id_] for id_ in sorted(owners.shares)]


# ---- outputs move --------------------------------------------------------------------


def test_outputs_move_and_all_others_stay_in_their_share() -> None:
    owners = begun()
    owners.move({1: B})
    assert shares(owners) == [Share(0, A, (0,)), Share(1, B, (2, 3)), Share(2, B, (1,))]
    assert owners == {0: A, 1: B, 2: B, 3: B}
    assert (owners.epoch, owners.left) == (1, frozenset())


def test_a_worker_has_left() -> None:
    """Its outputs move, or are idle and get an owner without a share; nothing reads its shares any more."""
    owners = begun()
    owners.move({2: A}, gone=[B], idle={3: C})
    assert shares(owners) == [Share(0, A, (0, 1)), Share(2, A, (2,))]
    assert owners == {0: A, 1: A, 2: A, 3: C}
    assert owners.left == {1}
    owners.move({0: C, 1: C, 2: C}, gone=[A])
    assert owners.left == {0, 1, 2}
    assert shares(owners) == [Share(3, C, (0, 1, 2))]


def test_the_id_of_a_share_is_never_used_again() -> None:
    owners = begun()
    seen = set(owners.shares)
    for to in (A, B, A, B):
        before = set(owners.shares)
        owners.move({0: to})
        assert seen.isdisjoint(set(owners.shares) - before)
        seen |= set(owners.shares)


def test_a_copy_for_a_worker_does_not_change_with_the_owners() -> None:
    owners = begun()
    copy = owners.snapshot()
    owners.move({0: B}, gone=[A], idle={1: B})
    owners.seal(1)
    assert shares(copy) == shares(begun())
    assert (dict(copy), copy.epoch, copy.left) == (dict(begun()), 0, frozenset())
    copy.move({0: B})
    assert shares(copy)[-1].id == 2


def test_a_run_without_the_runtime_on_its_scheduler_has_shares_too() -> None:
    assert shares(Owners.of({0: A, 1: B})) == [Share(0, A, (0,)), Share(1, B, (1,))]
    owners = begun()
    owners.move({0: B})
    assert shares(Owners.of(owners)) == shares(owners)


# ---- the barrier ---------------------------------------------------------------------


def test_the_barrier_seals_all_shares_unless_outputs_have_moved() -> None:
    owners = begun()
    owners.move({0: B})
    assert not owners.seal(0)
    assert len(owners.open_shares()) == 3
    assert owners.seal(1)
    assert owners.sealed
    assert not owners.open_shares()


def test_outputs_that_are_being_received_are_not_received_again() -> None:
    owners = begun()
    assert owners.received([0, 3]) == set()
    owners.seal(0)
    owners.move({3: A})
    assert owners.received([0, 3]) == {0}
    owners = Owners.begin({0: A, 1: A}, wanted={0})
    assert owners.received([0, 1]) == {1}, "it is in no share"


# ---- which worker gets how many ------------------------------------------------------


def test_outputs_are_dealt_to_the_workers_with_the_fewest_and_neighbours_stay_together() -> None:
    assert deal([0, 1, 2, 3], [A, B], {}) == {0: A, 1: A, 2: B, 3: B}
    assert deal([4, 5, 6], [A, B, C], {A: 3, B: 1}) == {4: B, 5: C, 6: C}
    assert deal([1, 0], [B], {B: 7}) == {0: B, 1: B}
    assert deal([], [A], {}) == {}


@given(st.sets(st.integers(0, 99)), st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_outputs_are_dealt_so_that_no_worker_could_give_one_away(outputs: set[int], owned: list[int]) -> None:
    workers = [f"tcp://{at}" for at in range(len(owned))]
    before = dict(zip(workers, owned, strict=True))
    dealt = deal(outputs, workers, before)
    assert dealt.keys() == outputs
    given_ = Counter(dealt.values())
    after = {worker: before[worker] + given_[worker] for worker in workers}
    assert all(after[worker] <= min(after.values()) + 1 for worker in given_)


def test_a_worker_that_joins_takes_outputs_from_the_owners_with_the_most() -> None:
    owners = {0: A, 1: A, 2: A, 3: A, 4: B, 5: B}
    assert fair_share(owners, 3) == {2, 3}
    assert len(fair_share(owners, 2)) == 3
    assert fair_share({0: B, 1: A, 2: A, 3: A}, 2) == {2, 3}
    assert fair_share(owners, 7) == set()
    assert fair_share({}, 2) == set()
