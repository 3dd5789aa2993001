"""Look up links: which link joins two workers, its speed, and what it learns from transfers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.topology import SHIPPED, Link, Place, Topology
from dask_gpurt.topology.model import (
    WINDOW_S,
)

MIB = 2**20


def picture(**places: Place) -> Topology:
    topology = Topology()
    for worker, place in places.items():
        topology.add(worker, place)
    return topology


def gpu(host: str, index: int, **more: Any) -> Place:
    return Place(host, f"GPU-{host}-{index}", **more)


# ---- which link ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "link"),
    [
        (gpu("a", 0), gpu("a", 0), Link.SAME_DEVICE),
        (gpu("a", 0), gpu("a", 1), Link.PCIE),
        (Place("a"), gpu("a", 1), Link.SHARED_MEMORY),
        (Place("a"), Place("a"), Link.SHARED_MEMORY),
        (Place("a", rdma=True), Place("b", rdma=True), Link.RDMA),
        (gpu("a", 0, rdma=True), gpu("b", 0), Link.TCP),
        (Place("a", "same name"), Place("b", "same name"), Link.TCP),
    ],
)
def test_the_link_between_two_places(here: Place, there: Place, link: Link) -> None:
    topology = picture(x=here, y=there)
    assert topology.link("x", "y") == topology.link("y", "x") == link
    assert topology.way("x", "y")[1] == SHIPPED[link]
    assert topology.way("x", "y")[1].seconds(MIB) == SHIPPED[link].seconds(MIB)


@pytest.mark.parametrize("by_tcp", [False, True])
def test_dependencies_go_by_tcp_where_dasks_comms_do(by_tcp: bool) -> None:
    near, far = gpu("a", 0, rdma=True, by_tcp=by_tcp), gpu("b", 0, rdma=True, by_tcp=by_tcp)
    topology = picture(x=near, y=gpu("a", 1, by_tcp=by_tcp), z=far)
    for other, fast, slow in (("y", Link.PCIE, Link.LOOPBACK), ("z", Link.RDMA, Link.TCP)):
        assert topology.link("x", other) == fast
        assert topology.link("x", other, by_comms=True) == (slow if by_tcp else fast)
        bandwidth = SHIPPED[slow if by_tcp else fast].bandwidth
        assert topology.way("x", other, by_comms=True)[1].seconds(10**12) == pytest.approx(
            10**12 / bandwidth, rel=0.1
        )
    assert topology.link("x", "x", by_comms=True) == Link.SAME_DEVICE


def test_unknown_workers_are_reached_by_tcp() -> None:
    topology = picture(x=Place("a", rdma=True))
    assert topology.link("x", "unknown") == topology.link("unknown", "other") == Link.TCP


def test_the_report_of_a_host_counts_before_the_places_of_devices() -> None:
    topology = picture(x=gpu("a", 0), y=gpu("a", 1), z=gpu("a", 2))
    pair = frozenset(("GPU-a-0", "GPU-a-1"))
    topology.describe("a", {pair: Link.SHARED_MEMORY})
    assert topology.link("x", "y") == topology.link("y", "x") == Link.SHARED_MEMORY
    assert topology.link("x", "z") == Link.PCIE


# ---- near and far --------------------------------------------------------------------


places = st.builds(
    Place,
    host=st.sampled_from("abc"),
    device=st.sampled_from([None, "0", "1"]),
    rdma=st.booleans(),
)
workers = st.sampled_from([f"w{i}" for i in range(6)])


@given(st.lists(st.tuples(workers, st.none() | places)))
def test_workers_that_come_move_and_go_leave_nothing_behind(moves: list[tuple[str, Place | None]]) -> None:
    topology, there = Topology(), dict[str, Place]()
    for worker, place in moves:
        if place is None:
            topology.remove(worker)
            there.pop(worker, None)
        else:
            topology.add(worker, place)
            there[worker] = place
            topology.describe(place.host, {})
    fresh = picture(**there)
    assert {host: set(topology.on_host(host)) for host in topology.hosts} == {
        host: set(fresh.on_host(host)) for host in fresh.hosts
    }
    for one in there:
        for other in there:
            assert topology.link(one, other) == topology.link(other, one) == fresh.link(one, other)
    assert set(topology.hosts) == {place.host for place in there.values()}


def test_what_a_host_has_is_forgotten_with_its_last_worker() -> None:
    topology, pair = Topology(), {"one": Place("a", "x"), "other": Place("a", "y")}
    for described, link in ((True, Link.SHARED_MEMORY), (False, Link.PCIE)):
        for worker, place in pair.items():
            topology.add(worker, place)
        if described:
            topology.describe("a", {frozenset("xy"): Link.SHARED_MEMORY})
        assert topology.link("one", "other") is link
        for worker in pair:
            topology.remove(worker)


# ---- learning from transfers ---------------------------------------------------------


def hosts(count: int) -> Topology:
    return picture(**{f"w{i}": Place(f"h{i}") for i in range(count)})


def test_a_class_learns_its_bandwidth_from_all_its_pairs() -> None:
    topology = hosts(9)
    for i in range(1, 9):
        for _ in range(40):
            topology.observe("w0", f"w{i}", 100 * MIB, 100 * MIB / 5e9)
    for pair in (("w0", "w1"), ("w7", "w8")):
        assert topology.way(*pair)[1].bandwidth == pytest.approx(5e9, rel=0.1)
    assert topology.way("w0", "w1")[1].latency == SHIPPED[Link.TCP].latency
    assert topology.learned()[Link.RDMA] == SHIPPED[Link.RDMA]


def test_small_transfers_tell_the_latency() -> None:
    topology = hosts(2)
    for _ in range(100_000 // 100):
        topology.observe("w0", "w1", 100 * 1000, 100 * 0.2e-3, transfers=100)
    assert topology.way("w1", "w0")[1].latency == pytest.approx(0.2e-3, rel=0.1)
    assert topology.way("w1", "w0")[1].bandwidth == SHIPPED[Link.TCP].bandwidth


@pytest.mark.parametrize(
    ("nbytes", "seconds", "transfers"), [(1, 0, 1), (1, -1, 1), (0, 1, 1), (-1, 1, 1), (1, 1, 0)]
)
def test_impossible_measurements_are_ignored(nbytes: int, seconds: float, transfers: int) -> None:
    topology = hosts(2)
    topology.observe("w0", "w1", nbytes, seconds, transfers)
    assert topology.learned() == dict(SHIPPED)


def test_an_old_speed_is_forgotten_after_a_window() -> None:
    topology = hosts(2)
    for bandwidth in (1e8, 4e9):
        for _ in range(round(5 * WINDOW_S)):
            topology.observe("w0", "w1", round(bandwidth), 1.0)
        assert topology.learned()[Link.TCP].bandwidth == pytest.approx(bandwidth, rel=0.05)
