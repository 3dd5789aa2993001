"""Choose the owners of a shuffle's outputs by memory and by links, on bare states and on clusters."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.ledger import FreeMemory
from dask_gpurt.placement.outputs import Owner, assign, shares
from dask_gpurt.topology import Place, Topology
from tests.helpers.placed_cluster import Cluster


def owner(worker: str, seconds_per_byte: float, free: float = math.inf, below: float = 0) -> Owner:
    return Owner(worker, seconds_per_byte, FreeMemory(free, below))


SITUATIONS = {
    "all alike share alike": ([owner("a", 1), owner("b", 1), owner("c", 1)], {"a": 4, "b": 4, "c": 4}),
    "a worker that gets bytes at half the rate gets half": ([owner("a", 1), owner("b", 2)], {"a": 8, "b": 4}),
    "none for one without room": ([owner("a", 1, 0), owner("b", 9, 99)], {"b": 12}),
    "what one has no room for goes to the others": (
        [owner("a", 1, 1), owner("b", 1, 99), owner("c", 1, 99)],
        {"a": 1, "b": 5, "c": 6},
    ),
    "live before spilled": ([owner("a", 1, 12), owner("b", 1, 0, 99)], {"a": 12}),
    "spilled before overfull": ([owner("a", 1, 3), owner("b", 1, 0, 99)], {"a": 3, "b": 9}),
    "overfull all alike": ([owner("a", 1, 2), owner("b", 1, 4)], {"a": 4, "b": 8}),
    "none has room, so all take turns": ([owner("a", 1, -1), owner("b", 1, 0)], {"a": 6, "b": 6}),
}


@pytest.mark.parametrize(("sites", "expected"), SITUATIONS.values(), ids=SITUATIONS)
def test_the_owners_that_a_person_would_pick(sites: list[Owner], expected: dict[str, int]) -> None:
    assert Counter(assign(range(12), sites, 12).values()) == expected


amounts = st.floats(0, 1e12)
some_sites = st.lists(
    st.builds(owner, st.uuids().map(str), st.floats(1e-12, 1e-3), st.floats(-1e12, 1e12), amounts),
    min_size=1,
    max_size=20,
    unique_by=lambda site: site.worker,
)
outputs = st.sets(st.integers(0, 500), min_size=1, max_size=100)


@given(outputs, some_sites, amounts)
def test_each_output_has_an_owner_and_neighbours_share_theirs(
    wanted: set[int], sites: list[Owner], nbytes: float
) -> None:
    owners = assign(wanted, sites, nbytes)
    assert set(owners) == wanted
    in_order = [owners[output] for output in sorted(wanted)]
    changes = sum(one != other for one, other in itertools.pairwise(in_order))
    assert changes == len(set(in_order)) - 1
    assert owners == assign(sorted(wanted, reverse=True), sites, nbytes)


@given(outputs, some_sites, amounts)
def test_no_worker_without_room_owns_while_one_has_room(
    wanted: set[int], sites: list[Owner], nbytes: float
) -> None:
    able = {site.worker for site in sites if site.memory.free > 0 or site.memory.free + site.memory.below > 0}
    assert set(assign(wanted, sites, nbytes).values()) <= (able or {site.worker for site in sites})


@given(outputs, some_sites, st.floats(1, 1e12))
def test_no_worker_is_overfull_while_others_have_room(
    wanted: set[int], sites: list[Owner], nbytes: float
) -> None:
    rooms = [max(0.0, site.memory.free + site.memory.below) for site in sites]
    if sum(rooms) < nbytes:
        return
    parts = shares(sites, nbytes)
    assert sum(parts) == pytest.approx(1)
    counts = Counter(assign(wanted, sites, nbytes).values())
    for site, room, part in zip(sites, rooms, parts, strict=True):
        assert part * nbytes <= room * (1 + 1e-6) + 1e-6 * nbytes
        assert abs(counts[site.worker] - part * len(wanted)) <= 1 + 1e-6  # outputs are indivisible


@given(outputs, some_sites, st.floats(1, 1e12), st.sampled_from([2.0**k for k in range(21)]))
def test_the_unit_of_bytes_does_not_matter(
    wanted: set[int], sites: list[Owner], nbytes: float, unit: float
) -> None:
    scaled = [
        owner(each.worker, each.seconds_per_byte / unit, each.memory.free * unit, each.memory.below * unit)
        for each in sites
    ]
    assert assign(wanted, scaled, nbytes * unit) == assign(wanted, sites, nbytes)


# ---- on the state of Dask's scheduler ----------------------------------------------------


def two_hosts(state: Cluster) -> Topology:
    """Make two hosts of four workers, and TCP between them."""
    topology = Topology()
    for number, address in enumerate(state.addresses):
        topology.add(address, Place(f"host{number // 4}", f"gpu{number}", 0, f"host{number // 4}"))
    return topology


def owned(on: Cluster, inputs: dict[int, int], **attributes: Any) -> Counter[int]:
    """Count how many of 80 outputs each worker owns, given the number of 1 GB inputs on each worker."""
    names = []
    for number, count in inputs.items():
        for i in range(count):
            on.data(f"in{number}-{i}", number)
            names.append(on.task(f"transfer{number}-{i}", f"in{number}-{i}").key)
    barrier = on.task("barrier", *names, **attributes)
    chosen = {output: on.addresses[output * 8 // 80] for output in range(80)}
    found = on.placement.owners(barrier, chosen)
    assert not on.fallbacks()
    return Counter(on.addresses.index(worker) for worker in found.values())


def on_two_hosts() -> Cluster:
    return Cluster(8, topology=two_hosts(Cluster(8)))


def test_inputs_that_are_everywhere_make_owners_of_all() -> None:
    assert owned(on_two_hosts(), dict.fromkeys(range(8), 2)) == dict.fromkeys(range(8), 10)


def test_outputs_stay_on_the_host_of_the_inputs_where_the_way_out_is_slow() -> None:
    found = owned(on_two_hosts(), {0: 4, 1: 4})
    here, there = (sum(found[number] for number in host) for host in (range(4), range(4, 8)))
    assert here > 2 * there
    assert max(found[number] for number in range(4)) - min(found[number] for number in range(4)) <= 1


def test_inputs_that_go_make_room_for_outputs() -> None:
    on = on_two_hosts()
    on.rooms.free.update(dict.fromkeys(on.addresses, 0.0))
    found = owned(on, {2: 4, 3: 4})
    assert set(found) == {2, 3}


def test_outputs_are_only_owned_where_the_barrier_may_run() -> None:
    on = on_two_hosts()
    allowed = {on.addresses[number] for number in (1, 6)}
    assert set(owned(on, {0: 8}, worker_restrictions=allowed)) == {1, 6}


def test_an_exception_leaves_the_owners_to_dask() -> None:
    on = Cluster(2)
    on.rooms.free_memory = None  # type: ignore[method-assign, assignment]
    chosen = {0: on.addresses[1], 1: on.addresses[0]}
    assert on.placement.owners(on.task("barrier"), chosen) == chosen
    assert on.fallbacks()["placement.owners"]["count"] == 1


# ---- on clusters -------------------------------------------------------------------------


def test_owners_are_chosen_in_time_for_thousands_of_workers() -> None:
    from time import process_time

    on = Cluster(2048)
    for number in range(0, 2048, 8):
        on.data(f"in{number}", number)
    barrier = on.task("barrier", *(on.task(f"t{n}", f"in{n}").key for n in range(0, 2048, 8)))
    chosen = {output: on.addresses[output // 2] for output in range(4096)}
    began = process_time()
    found = on.placement.owners(barrier, chosen)
    assert process_time() - began < 2
    assert set(Counter(found.values()).values()) <= {1, 2, 3}
    assert not on.fallbacks()
