"""Place root tasks near the data that their dependents also need, and where there is memory."""

from __future__ import annotations

from typing import Any

import dask
import pytest
from dask._task_spec import Task, TaskRef

from benchmarks.placement import decisions as bare
from tests.helpers.placed_cluster import GB, Cluster, run


def loads(tasks: int) -> dict[Any, list[Any]]:
    """Make a graph of root tasks only."""
    return {("load", i): [] for i in range(tasks)}


def test_the_queue_respects_headroom_and_moves_on_when_room_comes() -> None:
    cluster = Cluster(4)
    full = cluster.addresses[:3]
    cluster.rooms.free.update(dict.fromkeys(full, 0.0))
    for address in full:
        cluster.placement.on_place_changed(address)
    cluster.state.submit(*bare.graph_of(loads(50)))
    assert {address for address, _ in cluster.state.sent} == {cluster.addresses[3]}
    cluster.rooms.free[full[0]] = 80 * GB
    cluster.placement.on_place_changed(full[0])
    assert {address for address, _ in cluster.state.sent} == {cluster.addresses[3], full[0]}


def test_the_queue_moves_when_no_worker_has_room() -> None:
    cluster = Cluster(4)
    cluster.rooms.free.update(dict.fromkeys(cluster.addresses, 0.0))
    for address in cluster.addresses:
        cluster.placement.on_place_changed(address)
    assert len(run(cluster.state, loads(50))) == 50


def submit_roots(cluster: Cluster, homes: dict[int, int]) -> list[int]:
    """Submit root tasks of 10 s, given the workers of their siblings; returns their workers."""
    graph: dict[Any, Task] = {}
    for i, home in homes.items():
        cluster.data(f"kept-{i}", home)
        graph["root", i] = Task(("root", i), tuple, _data_producer=True)
        graph["use", i] = Task(("use", i), tuple, TaskRef(("root", i)), TaskRef(f"kept-{i}"))
    cluster.state.submit(graph, [("use", i) for i in homes])
    assert not cluster.fallbacks()
    sent = {key: cluster.addresses.index(address) for address, key in cluster.state.sent}
    return [sent["root", i] for i in homes]


def roots_with_kept_siblings(homes: list[int]) -> list[int]:
    """Place root tasks of 10 s on four workers with two slots each, given the workers of their siblings."""
    cluster = Cluster(4)
    cluster.takes("root", 10.0)
    return submit_roots(cluster, dict(enumerate(homes)))


@pytest.mark.parametrize("homes", [[3, 2, 1, 0], [1, 3, 0, 2]])
def test_a_root_starts_where_its_sibling_is_while_a_thread_is_free_there(homes: list[int]) -> None:
    assert roots_with_kept_siblings(homes) == homes


def test_without_a_queue_no_root_task_waits_near_a_sibling() -> None:
    with dask.config.set({"distributed.scheduler.worker-saturation": "inf"}):
        chosen = roots_with_kept_siblings([3] * 8)
    assert {*chosen} == {0, 1, 2, 3}


@pytest.mark.parametrize("number", [4, 6])
def test_roots_that_leave_slots_do_not_wait_near_a_sibling(number: int) -> None:
    chosen = roots_with_kept_siblings([3] * number)
    assert sorted(chosen[:4]) == [0, 1, 2, 3]
