"""Who takes a replica, and who drops one: the rules, and a person's choice in some situations."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.cost import NO_WAY, Route, Space
from dask_gpurt.placement.replicas import Recipient, Replica, dropped, recipient
from dask_gpurt.topology import SHIPPED, Link

GB = 10**9
NBYTES = 2 * GB
PINNED, DISK = (Route.over(SHIPPED[link]) for link in (Link.PINNED, Link.DISK))


def over(*links: Link) -> float:
    """Seconds that the data take over some links."""
    return sum(SHIPPED[link].seconds(NBYTES) for link in links)


def space(free: float, below: float = 100, spill: Route = PINNED) -> Space:
    return Space(free * GB, below * GB, spill)


ROOMY, SHORT, FULL = space(40), space(1), space(1, below=0, spill=NO_WAY)

#: In each the first one is who takes it.
TAKING = {
    "over NVLink before TCP": [
        Recipient("b", over(Link.NVLINK), ROOMY),
        Recipient("a", over(Link.TCP), ROOMY),
    ],
    "over NVLink though there is more room behind TCP": [
        Recipient("b", over(Link.NVLINK), space(4)),
        Recipient("a", over(Link.TCP), space(80)),
    ],
    "who has most room of those with like links": [
        Recipient("b", over(Link.NVLINK), space(40)),
        Recipient("a", 0.9 * over(Link.NVLINK), space(20)),
    ],
    "behind TCP where others would have to spill": [
        Recipient("b", over(Link.TCP), ROOMY),
        Recipient("a", over(Link.NVLINK), SHORT),
    ],
    "nearby where everybody has to spill": [
        Recipient("b", over(Link.NVLINK), SHORT),
        Recipient("a", over(Link.TCP), SHORT),
    ],
    "far away where only there is room": [
        Recipient("b", over(Link.TCP), SHORT),
        Recipient("a", over(Link.NVLINK), FULL),
    ],
    "who was asked and has not got it yet": [
        Recipient("b", over(Link.TCP), SHORT, asked=True),
        Recipient("a", over(Link.NVLINK), ROOMY),
    ],
    "another where who was asked has no room any more": [
        Recipient("b", over(Link.TCP), SHORT),
        Recipient("a", over(Link.NVLINK), FULL, asked=True),
    ],
    "who holds less where memory has no limit": [
        Recipient("b", over(Link.TCP), Space(math.inf), held=1),
        Recipient("a", over(Link.TCP), Space(math.inf), held=2),
    ],
}

#: In each the first one goes.
GOING = {
    "the live one that is in the way, where another lies live with room": [
        Replica("a", 0, SHORT),
        Replica("b", 0, ROOMY),
    ],
    "the live one that is in the way, where another is spilled": [
        Replica("a", 0, SHORT),
        Replica("b", over(Link.PINNED), SHORT, live=False),
    ],
    "the spilled one where the live one is in nobody's way": [
        Replica("a", over(Link.PINNED), SHORT, live=False),
        Replica("b", 0, ROOMY),
    ],
    "the one on disk, where the live one goes to pinned memory and comes back sooner": [
        Replica("a", over(Link.DISK), ROOMY, live=False),
        Replica("b", 0, SHORT),
    ],
    "the live one in the way that could only go to disk": [
        Replica("a", 0, space(1, spill=DISK)),
        Replica("b", over(Link.DISK), ROOMY, live=False),
    ],
    "the live one that could go nowhere": [
        Replica("a", 0, FULL),
        Replica("b", over(Link.DISK, Link.TCP), SHORT, live=False),
    ],
    "the one far from who needs it": [
        Replica("a", over(Link.TCP), ROOMY),
        Replica("b", over(Link.NVLINK), ROOMY),
    ],
    "the one with less room beside it": [Replica("a", 0, space(20)), Replica("b", 0, space(40))],
    "the one where most is short": [Replica("a", 0, space(-3)), Replica("b", 0, space(1))],
    "the one of a worker that leaves": [
        Replica("a", 0, ROOMY, leaving=True),
        Replica("b", over(Link.DISK), FULL, live=False),
    ],
    "not the one that a task reads": [
        Replica("a", 0, ROOMY),
        Replica("b", over(Link.DISK), FULL, live=False, kept=True),
    ],
    "the one of who holds more where memory has no limit": [
        Replica("a", 0, Space(math.inf), held=2),
        Replica("b", 0, Space(math.inf), held=1),
    ],
}


@pytest.mark.parametrize("candidates", TAKING.values(), ids=TAKING)
def test_the_recipient_that_a_person_would_pick(candidates: list[Recipient]) -> None:
    assert recipient(candidates, NBYTES) == candidates[0]


@pytest.mark.parametrize("replicas", GOING.values(), ids=GOING)
def test_the_replica_that_a_person_would_drop(replicas: list[Replica]) -> None:
    assert dropped(replicas, NBYTES) == replicas[0]


def test_nobody_takes_what_there_is_no_room_for() -> None:
    assert recipient([Recipient("a", 0, FULL), Recipient("b", 0, space(-200))], NBYTES) is None
    assert recipient([], NBYTES) is None


seconds, amounts = st.floats(0, 1e3), st.floats(0, 1e12)
routes = st.builds(Route, st.floats(0, 1), st.floats(1e-13, 1e-6))
spaces = st.builds(Space, st.floats(-1e12, 1e12), amounts, routes)
some_recipients = st.lists(
    st.builds(Recipient, st.uuids().map(str), seconds, spaces, amounts, st.booleans()),
    max_size=12,
    unique_by=lambda each: each.worker,
)
flags = (st.booleans(), st.booleans(), st.booleans())
some_replicas = st.lists(
    st.builds(Replica, st.uuids().map(str), seconds, spaces, *flags, amounts),
    max_size=12,
    unique_by=lambda each: each.worker,
)
shuffled: Any = st.randoms(use_true_random=False)


def fits(each: Recipient | Replica, nbytes: float) -> bool:
    return nbytes <= each.space.free or nbytes <= each.space.free + each.space.below


@given(some_recipients, amounts)
def test_a_recipient_has_room_and_there_is_one_if_anybody_has(found: list[Recipient], nbytes: float) -> None:
    able = [each for each in found if fits(each, nbytes)]
    chosen = recipient(found, nbytes)
    assert (chosen in able) if able else chosen is None


@given(some_recipients, amounts)
def test_nothing_is_spilled_for_a_replica_while_one_has_live_room(
    found: list[Recipient], nbytes: float
) -> None:
    new = [each._replace(asked=False) for each in found]
    chosen = recipient(new, nbytes)
    if chosen is not None and any(nbytes <= each.space.free for each in new):
        assert nbytes <= chosen.space.free


@given(some_replicas, amounts)
def test_the_last_replica_stays_and_so_does_what_must(found: list[Replica], nbytes: float) -> None:
    chosen = dropped(found, nbytes)
    free = [each for each in found if not each.kept]
    if len(found) < 2 or not free:
        assert chosen is None
    else:
        assert chosen in free
        assert chosen.leaving or not any(each.leaving for each in free)


@given(some_replicas, amounts)
def test_dropping_all_that_may_go_leaves_one(found: list[Replica], nbytes: float) -> None:
    left = [each._replace(kept=False) for each in found]
    while (chosen := dropped(left, nbytes)) is not None:
        left.remove(chosen)
    assert len(left) == min(1, len(found))


@given(some_recipients, some_replicas, amounts, shuffled)
def test_the_order_in_which_they_are_looked_at_does_not_matter(
    takers: list[Recipient], holders: list[Replica], nbytes: float, order: Any
) -> None:
    taker, goes = recipient(takers, nbytes), dropped(holders, nbytes)
    order.shuffle(takers)
    order.shuffle(holders)
    assert recipient(takers, nbytes) == taker
    assert dropped(holders, nbytes) == goes


@given(some_recipients, some_replicas, amounts, st.sampled_from([2.0**k for k in range(1, 21)]))
def test_the_unit_of_bytes_does_not_matter(
    takers: list[Recipient], holders: list[Replica], nbytes: float, unit: float
) -> None:
    def scaled(each: Any) -> Any:
        free, below, (latency, pace) = each.space
        return each._replace(
            space=Space(free * unit, below * unit, Route(latency, pace / unit)), held=each.held * unit
        )

    def name(each: Any) -> str | None:
        return None if each is None else each.worker

    assert name(recipient(map(scaled, takers), nbytes * unit)) == name(recipient(takers, nbytes))
    assert name(dropped([*map(scaled, holders)], nbytes * unit)) == name(dropped(holders, nbytes))
