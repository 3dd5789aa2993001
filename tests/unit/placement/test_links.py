"""Have Dask reckon with slow links between hosts, and give neighbouring root tasks to workers of one host."""

from __future__ import annotations

from typing import Any

import pytest
from dask._task_spec import Task

from benchmarks.placement.decisions import PER_HOST, BareState
from benchmarks.simulate import build_cluster, build_workload
from benchmarks.simulate.placements import simulate
from dask_gpurt.observe import Metrics
from dask_gpurt.placement.links import FEW, SlowLinks
from dask_gpurt.topology import SHIPPED, Link, Place, Topology

#: A worker's share of a link between hosts with eight workers.
SHARE = round(SHIPPED[Link.TCP].bandwidth / PER_HOST)


def placed(workers: int, **place: Any) -> tuple[BareState, SlowLinks, Topology]:
    """Return a scheduler whose workers have a GPU each, joined by NVLink on a host."""
    state, topology, metrics = BareState(workers), Topology(), Metrics()
    for number, worker in enumerate(state.workers):
        host = worker.rpartition(":")[0]
        topology.add(worker, Place(host, f"gpu-{number}", **place))
    links = SlowLinks(state, topology, metrics)
    links.on_places_changed()
    return state, links, topology


def is_dasks(state: BareState) -> bool:
    return "decide_worker_rootish_queuing_enabled" not in vars(state)


@pytest.mark.parametrize(
    ("workers", "place"), [(8, {}), (16, {"rdma": True}), (1, {})], ids=["one host", "RDMA", "one worker"]
)
def test_dask_is_left_alone_where_links_are_alike_or_fast(workers: int, place: dict[str, Any]) -> None:
    state, links, _ = placed(workers, **place)
    before = state.bandwidth
    links.on_heartbeat()
    assert (links.is_on, state.bandwidth, is_dasks(state)) == (False, before, True)


def test_a_worker_alone_on_its_host_has_no_faster_link() -> None:
    state, _, topology = placed(16)
    for worker in list(state.workers)[1:8] + list(state.workers)[9:]:
        topology.remove(worker)
    links = SlowLinks(state, topology, Metrics())
    links.on_places_changed()
    assert not links.is_on


def test_the_bandwidth_is_a_share_of_a_slow_link_after_each_heartbeat() -> None:
    state, links, topology = placed(16)
    assert links.is_on
    assert state.bandwidth == SHARE
    state.bandwidth = 400 * 10**9  # transfers over NVLink
    links.on_heartbeat()
    assert state.bandwidth == SHARE
    one, *_, other = state.workers
    for _ in range(100):
        topology.observe(one, other, 10**9, 0.01, by_comms=True)
    state.bandwidth = 1
    links.on_heartbeat()
    assert SHARE < state.bandwidth < 10**12


def test_it_goes_off_as_workers_leave_and_comes_back_with_them() -> None:
    state, links, topology = placed(16)
    first, last = list(state.workers)[:8], list(state.workers)[8:]
    for worker in last:
        topology.remove(worker)
        links.on_places_changed()
    assert not links.is_on
    assert is_dasks(state)
    for worker in last:
        topology.add(worker, Place("another", worker))
        links.on_places_changed()
    assert links.is_on
    links.unbind()
    assert is_dasks(state)
    assert first


@pytest.mark.parametrize("hosts", [4, 2 + FEW // PER_HOST], ids=["few", "many"])
def test_neighbouring_root_tasks_run_on_one_host(hosts: int) -> None:
    def share(state: BareState) -> float:
        """Return the share of neighbours among the first tasks that are on one host."""
        numbers = range(3 * len(state.workers))
        graph = {("root", number): Task(("root", number), tuple, _data_producer=True) for number in numbers}
        state.submit(graph, set(graph))
        host_of = {number: worker.rpartition(":")[0] for worker, (_, number) in state.sent}
        pairs = [
            (host_of[number], host_of[number + 1])
            for number in numbers
            if {number, number + 1} <= host_of.keys()
        ]
        assert len(state.run()) == len(numbers)
        return sum(one == other for one, other in pairs) / len(pairs)

    state, links, _ = placed(hosts * PER_HOST)
    assert share(state) > 0.7
    dasks, links, _ = placed(hosts * PER_HOST)
    links.unbind()
    assert share(dasks) < 0.4


def test_dask_chooses_if_a_choice_fails() -> None:
    state, links, _ = placed(16)
    links._positions = None  # type: ignore[assignment]
    graph = {("root", number): Task(("root", number), tuple, _data_producer=True) for number in range(40)}
    state.submit(graph, set(graph))
    assert len(state.run()) == 40
    fallbacks = links._metrics.snapshot()["fallbacks"]
    assert [known["count"] for known in fallbacks.values()] == [40]


def test_a_persisted_collection_is_read_again_where_it_is() -> None:
    cluster = build_cluster("tcp", 16, seed=1000)
    workload = build_workload("persisted-reuse", cluster, seed=1000)
    tiers, gpurt = (simulate(cluster, workload, side).result for side in ("tiers", "gpurt"))
    assert gpurt.between_hosts < 0.7 * tiers.between_hosts
    assert gpurt.makespan < 0.9 * tiers.makespan
