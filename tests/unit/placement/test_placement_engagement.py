"""Engage placement only while links between workers differ; Dask chooses otherwise."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from benchmarks.common.faults import differing_links
from benchmarks.placement import decisions as bare
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import GatedPlacement, Placement
from dask_gpurt.placement.gate import HOLD_S, RECHECK_S, links_differ
from dask_gpurt.topology import Place, Topology
from tests.helpers.placed_cluster import GB, Rooms

MB = 10**6


# ---- the rule --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "differ"),
    [([], False), ([0.1], False), ([0.1, 0.19], False), ([0.1, 0.2], True), ([0.0, 0.0], False)],
)
def test_links_differ_from_twice_as_slow_on(seconds: list[float], differ: bool) -> None:
    assert links_differ(seconds, None) is differ


# ---- on a scheduler --------------------------------------------------------------------


class Gated:
    """Hold a bare scheduler with a gate, and a clock that the test advances."""

    def __init__(self, workers: int = 4, *, hosts: int = 1):
        self.state = bare.BareState(workers)
        self.addresses = list(self.state.workers)
        self.rooms, self.metrics, self.now = Rooms(), Metrics(), 0.0
        for address in self.addresses:
            self.rooms.live[address] = 80 * GB
        self.topology = Topology()
        for number, address in enumerate(self.addresses):
            self.topology.add(address, Place(f"host{number % hosts}", by_tcp=True))
        placement = Placement(self.state, self.topology, self.rooms, self.metrics)
        self.gate = GatedPlacement(placement, self.state, self.topology, self.metrics, lambda: self.now)
        self.gate.bind()

    @property
    def is_bound(self) -> bool:
        return "decide_worker_non_rootish" in vars(self.state)

    def later(self, seconds: float = RECHECK_S) -> None:
        self.now += seconds
        self.gate.on_graph()

    def transfers(self, nbytes: int, seconds: float) -> None:
        """Report transfers that show the bandwidth of the link between the first two workers."""
        for _ in range(20):
            self.topology.observe(self.addresses[0], self.addresses[1], nbytes, seconds, by_comms=True)

    def waits(self, seconds: float, nbytes: int) -> None:
        """Have a task wait of whose kind one has run, with the given duration and size of its result."""
        self.state.submit(*bare.graph_of({("work", 0): []}))
        self.state.run()
        self.state.tasks["work", 0].set_nbytes(nbytes)
        self.state.task_prefixes["work"].duration_average = seconds
        self.state.submit(*bare.graph_of({("work", 1): []}))


def times_engaged(gated: Gated) -> float:
    return float(gated.metrics.snapshot()["counters"].get("placement.engaged", 0))


def test_on_equal_workers_dasks_own_methods_stay() -> None:
    gated = Gated()
    before = dict(vars(gated.state))
    for _ in range(5):
        gated.later()
        for address in gated.addresses:
            gated.gate.on_memory_reported(address)
    assert not gated.gate.is_open
    assert not gated.is_bound
    assert vars(gated.state).keys() == before.keys()
    assert not times_engaged(gated)


def test_a_link_that_is_found_to_be_slow_engages_it() -> None:
    gated = Gated(hosts=2)
    gated.later()
    assert not gated.gate.is_open  # 1.1 GB/s between hosts, shared by two workers, beside 1 within
    gated.transfers(10 * MB, 1.0)
    gated.later()
    assert gated.gate.is_open
    assert gated.is_bound
    assert times_engaged(gated) == 1


def test_a_slow_link_does_not_matter_for_long_tasks_with_small_results() -> None:
    gated = Gated(hosts=2)
    gated.waits(seconds=1.0, nbytes=1000)
    gated.transfers(10 * MB, 1.0)
    gated.later()
    assert not gated.gate.is_open


def test_a_memory_report_has_links_checked_between_graphs() -> None:
    gated = Gated(hosts=2)
    gated.transfers(10 * MB, 1.0)
    gated.gate.on_memory_reported(gated.addresses[0])
    assert not gated.gate.is_open, "too soon after the last check"
    gated.now += RECHECK_S
    gated.gate.on_memory_reported(gated.addresses[0])
    assert gated.gate.is_open


def test_a_worker_on_a_slow_host_is_noticed_with_the_next_graph() -> None:
    gated = Gated()
    gated.later()
    gated.topology.add(gated.addresses[3], Place("far", by_tcp=True))
    for _ in range(20):
        gated.topology.observe(gated.addresses[0], gated.addresses[3], 10 * MB, 20.0, by_comms=True)
    gated.gate.on_place_changed(gated.addresses[3])
    gated.later(0)
    assert gated.gate.is_open


def test_it_goes_on_for_a_while_after_nothing_differs_and_then_leaves_everything_to_dask() -> None:
    gated = Gated()
    before = vars(gated.state).keys()
    with differing_links():
        gated.later()
    gated.later()
    assert gated.is_bound
    gated.later(HOLD_S)
    assert not gated.is_bound
    assert vars(gated.state).keys() == before
    with differing_links():
        gated.later()
    assert gated.is_bound
    assert times_engaged(gated) == 2


def test_graphs_run_while_it_engages_and_leaves() -> None:
    gated = Gated(hosts=2)
    done = 0
    for turn in range(4):
        with differing_links() if turn % 2 else nullcontext():
            gated.later(HOLD_S)
        assert gated.is_bound is bool(turn % 2)
        keys = {
            (f"{kind}{turn}", i): [(f"load{turn}", i)] if kind == "add" else []
            for kind in ("load", "add")
            for i in range(40)
        }
        gated.state.submit(*bare.graph_of(keys))
        done += len(gated.state.run())
    assert done == 4 * 80
    assert not gated.metrics.snapshot()["fallbacks"]
