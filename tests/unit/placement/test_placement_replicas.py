"""Choose the workers that receive or drop a replica: the rules, and situations decided by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.ledger import FreeMemory
from dask_gpurt.placement.cost import Route
from dask_gpurt.placement.replicas import Recipient, Replica, choose_dropped, choose_recipient
from dask_gpurt.topology import SHIPPED, Link

GB = 10**9
NBYTES = 2 * GB
PINNED, DISK = (Route.over(SHIPPED[link]) for link in (Link.PINNED, Link.DISK))


def over(*links: Link) -> float:
    """Return the seconds that the data take over several links."""
    return sum(SHIPPED[link].seconds(NBYTES) for link in links)


def space(free: float, below: float = 100) -> FreeMemory:
    return FreeMemory(free * GB, below * GB)


def replica(worker: str, reach: float, memory: FreeMemory, spill: Route = PINNED, **options: Any) -> Replica:
    return Replica(worker, reach, memory, spill, **options)


ROOMY, SHORT, FULL = space(40), space(1), space(1, below=0)

#: In each situation the first worker receives the replica.
TAKING = {
    "over NVLink before TCP": [
        Recipient("b", over(Link.NVLINK), ROOMY),
        Recipient("a", over(Link.TCP), ROOMY),
    ],
    "over NVLink though there is more room behind TCP": [
        Recipient("b", over(Link.NVLINK), space(4)),
        Recipient("a", over(Link.TCP), space(80)),
    ],
    "the one with most room of those with like links": [
        Recipient("b", over(Link.NVLINK), space(40)),
        Recipient("a", 0.9 * over(Link.NVLINK), space(20)),
    ],
    "behind TCP where others would have to spill": [
        Recipient("b", over(Link.TCP), ROOMY),
        Recipient("a", over(Link.NVLINK), SHORT),
    ],
    "nearby where all have to spill": [
        Recipient("b", over(Link.NVLINK), SHORT),
        Recipient("a", over(Link.TCP), SHORT),
    ],
    "far away where only there is room": [
        Recipient("b", over(Link.TCP), SHORT),
        Recipient("a", over(Link.NVLINK), FULL),
    ],
    "one that was asked and has not got it yet": [
        Recipient("b", over(Link.TCP), SHORT, asked=True),
        Recipient("a", over(Link.NVLINK), ROOMY),
    ],
    "another where the one asked has no room any more": [
        Recipient("b", over(Link.TCP), SHORT),
        Recipient("a", over(Link.NVLINK), FULL, asked=True),
    ],
    "the one that holds less where memory has no limit": [
        Recipient("b", over(Link.TCP), FreeMemory(math.inf), held=1),
        Recipient("a", over(Link.TCP), FreeMemory(math.inf), held=2),
    ],
}

#: In each situation the first worker drops the replica.
GOING = {
    "the live one that is in the way, where another lies live with room": [
        replica("a", 0, SHORT),
        replica("b", 0, ROOMY),
    ],
    "the live one that is in the way, where another is spilled": [
        replica("a", 0, SHORT),
        replica("b", over(Link.PINNED), SHORT, live=False),
    ],
    "the spilled one where the live one is not in the way": [
        replica("a", over(Link.PINNED), SHORT, live=False),
        replica("b", 0, ROOMY),
    ],
    "the one on disk, where the live one goes to pinned memory and comes back sooner": [
        replica("a", over(Link.DISK), ROOMY, live=False),
        replica("b", 0, SHORT),
    ],
    "the live one in the way that could only go to disk": [
        replica("a", 0, SHORT, spill=DISK),
        replica("b", over(Link.DISK), ROOMY, live=False),
    ],
    "the live one that could go nowhere": [
        replica("a", 0, FULL),
        replica("b", over(Link.DISK, Link.TCP), SHORT, live=False),
    ],
    "the one far from the one that needs it": [
        replica("a", over(Link.TCP), ROOMY),
        replica("b", over(Link.NVLINK), ROOMY),
    ],
    "the one with less room beside it": [replica("a", 0, space(20)), replica("b", 0, space(40))],
    "the one where most is short": [replica("a", 0, space(-3)), replica("b", 0, space(1))],
    "the one of a worker that leaves": [
        replica("a", 0, ROOMY, leaving=True),
        replica("b", over(Link.DISK), FULL, live=False),
    ],
    "not the one that a task reads": [
        replica("a", 0, ROOMY),
        replica("b", over(Link.DISK), FULL, live=False, kept=True),
    ],
    "the one of the worker that holds more where memory has no limit": [
        replica("a", 0, FreeMemory(math.inf), held=2),
        replica("b", 0, FreeMemory(math.inf), held=1),
    ],
}


@pytest.mark.parametrize("candidates", TAKING.values(), ids=TAKING)
def test_the_recipient_that_a_person_would_pick(candidates: list[Recipient]) -> None:
    assert choose_recipient(candidates, NBYTES) == candidates[0]


@pytest.mark.parametrize("replicas", GOING.values(), ids=GOING)
def test_the_replica_that_a_person_would_drop(replicas: list[Replica]) -> None:
    assert choose_dropped(replicas, NBYTES) == replicas[0]


def test_no_worker_takes_what_there_is_no_room_for() -> None:
    assert choose_recipient([Recipient("a", 0, FULL), Recipient("b", 0, space(-200))], NBYTES) is None
    assert choose_recipient([], NBYTES) is None


seconds, amounts = st.floats(0, 1e3), st.floats(0, 1e12)
routes = st.builds(Route, st.floats(0, 1), st.floats(1e-13, 1e-6))
memories = st.builds(FreeMemory, st.floats(-1e12, 1e12), amounts)
some_recipients = st.lists(
    st.builds(Recipient, st.uuids().map(str), seconds, memories, amounts, st.booleans()),
    max_size=12,
    unique_by=lambda each: each.worker,
)
flags = (st.booleans(), st.booleans(), st.booleans())
some_replicas = st.lists(
    st.builds(Replica, st.uuids().map(str), seconds, memories, routes, *flags, amounts),
    max_size=12,
    unique_by=lambda each: each.worker,
)
shuffled: Any = st.randoms(use_true_random=False)


def fits(each: Recipient | Replica, nbytes: float) -> bool:
    return nbytes <= each.memory.free or nbytes <= each.memory.free + each.memory.below


@given(some_recipients, amounts)
def test_a_recipient_has_room_and_there_is_one_if_any_worker_has(
    found: list[Recipient], nbytes: float
) -> None:
    able = [each for each in found if fits(each, nbytes)]
    chosen = choose_recipient(found, nbytes)
    assert (chosen in able) if able else chosen is None


@given(some_recipients, amounts)
def test_nothing_is_spilled_for_a_replica_while_one_has_live_room(
    found: list[Recipient], nbytes: float
) -> None:
    new = [each._replace(asked=False) for each in found]
    chosen = choose_recipient(new, nbytes)
    if chosen is not None and any(nbytes <= each.memory.free for each in new):
        assert nbytes <= chosen.memory.free


@given(some_replicas, amounts)
def test_the_last_replica_stays_and_so_does_what_must(found: list[Replica], nbytes: float) -> None:
    chosen = choose_dropped(found, nbytes)
    free = [each for each in found if not each.kept]
    if len(found) < 2 or not free:
        assert chosen is None
    else:
        assert chosen in free
        assert chosen.leaving or not any(each.leaving for each in free)


@given(some_replicas, amounts)
def test_dropping_all_that_may_go_leaves_one(found: list[Replica], nbytes: float) -> None:
    left = [each._replace(kept=False) for each in found]
    while (chosen := choose_dropped(left, nbytes)) is not None:
        left.remove(chosen)
    assert len(left) == min(1, len(found))


@given(some_recipients, some_replicas, amounts, shuffled)
def test_the_order_in_which_they_are_looked_at_does_not_matter(
    takers: list[Recipient], holders: list[Replica], nbytes: float, order: Any
) -> None:
    taker, goes = choose_recipient(takers, nbytes), choose_dropped(holders, nbytes)
    order.shuffle(takers)
    order.shuffle(holders)
    assert choose_recipient(takers, nbytes) == taker
    assert choose_dropped(holders, nbytes) == goes


@given(some_recipients, some_replicas, amounts, st.sampled_from([2.0**k for k in range(1, 21)]))
def test_the_unit_of_bytes_does_not_matter(
    takers: list[Recipient], holders: list[Replica], nbytes: float, unit: float
) -> None:
    def scaled(each: Any) -> Any:
        memory = FreeMemory(each.memory.free * unit, each.memory.below * unit)
        each = each._replace(memory=memory, held=each.held * unit)
        if isinstance(each, Recipient):
            return each
        latency, seconds_per_byte = each.spill
        return each._replace(spill=Route(latency, seconds_per_byte / unit))

    def name(each: Any) -> str | None:
        return None if each is None else each.worker

    assert name(choose_recipient(map(scaled, takers), nbytes * unit)) == name(
        choose_recipient(takers, nbytes)
    )
    assert name(choose_dropped([*map(scaled, holders)], nbytes * unit)) == name(
        choose_dropped(holders, nbytes)
    )
