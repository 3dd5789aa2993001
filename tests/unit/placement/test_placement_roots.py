"""Place root tasks where there is memory."""

from __future__ import annotations

from typing import Any

from benchmarks.placement import decisions as bare
from tests.helpers.placed_cluster import Cluster, run


def loads(tasks: int) -> dict[Any, list[Any]]:
    """Make a graph of root tasks only."""
    return {("load", i): [] for i in range(tasks)}


def test_a_root_task_goes_where_there_is_room() -> None:
    cluster = Cluster(4)
    for address in cluster.addresses[:3]:
        cluster.rooms.free[address] = 0.0
        cluster.placement.on_place_changed(address)
    cluster.state.submit(*bare.graph_of(loads(1)))
    assert {address for address, _ in cluster.state.sent} == {cluster.addresses[3]}


def test_the_queue_moves_when_no_worker_has_room() -> None:
    cluster = Cluster(4)
    cluster.rooms.free.update(dict.fromkeys(cluster.addresses, 0.0))
    for address in cluster.addresses:
        cluster.placement.on_place_changed(address)
    assert len(run(cluster.state, loads(50))) == 50
