"""Choose the worker of a task with inputs, and check the invariants of every choice."""

from __future__ import annotations

import random
from typing import Any

import pytest
from dask._task_spec import Alias
from distributed.core import Status
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.placement import decisions as bare
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import Placement
from dask_gpurt.topology import Topology
from tests.helpers.examples import examples
from tests.helpers.placed_cluster import GB, Cluster, Rooms, run


def test_a_task_runs_where_its_input_is() -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    assert cluster.place("y", "x") == 5


def test_a_decision_is_logged_at_debug_with_what_was_rejected(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    cluster.data("y", 6)
    cluster.busy(5, 3)
    with caplog.at_level("DEBUG", logger="dask_gpurt.placement"):
        chosen = cluster.place("z", "x", "y")
    (said,) = [record.getMessage() for record in caplog.records if "placement" in record.name]
    placed, rejected = said.split("rejected:")
    assert placed.startswith("'z' is placed on")
    assert cluster.addresses[chosen] in placed
    assert f"missing={GB}" in placed
    assert cluster.addresses[5] in rejected
    assert "waiting=3" in rejected
    assert f"missing={GB}" in rejected


@pytest.mark.parametrize("free", [GB / 2, -GB])
def test_an_alias_stays_where_its_data_are_however_full_that_is(free: float) -> None:
    cluster = Cluster(2)
    cluster.data("made-0", 1)
    cluster.data("made-1", 0)
    cluster.busy(0, 20)
    cluster.rooms.free[cluster.addresses[0]] = free
    alias = cluster.task("made-2", "made-1")
    alias.run_spec = Alias("made-2", "made-1")
    alias.prefix.nbytes_total, alias.prefix.states["memory"] = 2 * GB, 2
    cluster.state.transitions({"made-2": "waiting"}, "test")
    assert alias.processing_on.address == cluster.addresses[0]


def test_what_is_on_its_way_is_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.data("x", 1, nbytes=GB)
    cluster.data("big", 2, nbytes=4 * GB)
    assert cluster.place("one", "x", "big") == 2
    with caplog.at_level("DEBUG", logger="dask_gpurt.placement"):
        cluster.place("two", "x", "big")
    (said,) = [record.getMessage() for record in caplog.records if "placement" in record.name]
    near = said.partition(cluster.addresses[2])[2].partition(")")[0]
    assert "missing=0" in near
    assert "moving=0.0," not in near  # until it has arrived


def test_restrictions_hold_and_loose_ones_give_way() -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    assert cluster.place("y", "x", worker_restrictions={cluster.addresses[12]}) == 12
    assert cluster.place("gone", "x", worker_restrictions={"tcp://unknown:1"}) is None
    loose = {"worker_restrictions": {"tcp://unknown:1"}, "loose_restrictions": True}
    assert cluster.place("loose", "x", **loose) == 5


def test_a_worker_leaves_between_its_report_and_the_decision() -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    cluster.busy(5, 3)
    for number in (0, 1, 2):  # Dask sends no event for workers that pause
        cluster.ws(number).status = Status.paused
        cluster.state.running.discard(cluster.ws(number))
        cluster.state.idle_task_count.discard(cluster.ws(number))
    chosen = cluster.place("y", "x")
    assert chosen not in (0, 1, 2, None)
    cluster.placement.on_worker_removed(cluster.addresses[15])
    cluster.placement.on_place_changed("tcp://unknown:1")
    assert not cluster.fallbacks()


def test_an_exception_falls_back_to_dask_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    cluster.rooms.free_memory = None  # type: ignore[method-assign, assignment]
    for name in "abc":
        assert cluster.place(name, "x") == 5
    fallback = cluster.fallbacks()["placement.decide_worker_non_rootish"]
    assert fallback["count"] == 3
    assert "TypeError" in fallback["reason"]
    logged = [record for record in caplog.records if "placement" in record.message]
    assert len(logged) == len(cluster.fallbacks())  # each method once


def test_a_signature_that_we_do_not_know_stays_with_dask() -> None:
    class Newer(bare.BareState):
        def decide_worker_non_rootish(self, ts: Any, hint: Any = None) -> Any:
            return super().decide_worker_non_rootish(ts)

    state, metrics = Newer(4), Metrics()
    Placement(state, Topology(), Rooms(), metrics).bind()
    assert "decide_worker_non_rootish" not in state.__dict__
    assert "is_rootish" in state.__dict__
    assert "hint" in metrics.snapshot()["fallbacks"]["placement.decide_worker_non_rootish"]["reason"]


# ---- invariants of every choice -------------------------------------------------------


def graphs(seed: int) -> dict[Any, list[Any]]:
    """Draw a random graph, with a group of root tasks."""
    rng = random.Random(seed)
    graph: dict[Any, list[Any]] = {("root", i): [] for i in range(rng.randrange(1, 60))}
    for i in range(rng.randrange(60)):
        graph[f"layer{i % 5}", i] = rng.sample(list(graph), min(len(graph), rng.randrange(1, 4)))
    return graph


@examples(10)
@given(st.integers(0, 10**6))
def test_switched_off_again_dask_chooses_as_shipped(seed: int) -> None:
    stock = bare.BareState(12)
    again = bare.BareState(12)
    placement = Placement(again, bare.topology_of(again), bare.Roomy(), Metrics())
    placement.bind()
    placement.unbind()
    assert again.__dict__.keys() == stock.__dict__.keys()
    assert run(again, graphs(seed)) == run(stock, graphs(seed))


numbers = st.sets(st.integers(0, 11), max_size=11)


@given(full=numbers, holders=numbers.filter(bool), allowed=numbers.filter(bool), tasks=st.integers(0, 4))
def test_never_a_forbidden_worker_nor_one_without_room(
    full: set[int], holders: set[int], allowed: set[int], tasks: int
) -> None:
    cluster = Cluster(12)
    for number in full:
        cluster.rooms.free[cluster.addresses[number]] = -1.0
        cluster.placement.on_place_changed(cluster.addresses[number])
    cluster.data("x", *holders)
    cluster.busy(min(holders), tasks)
    assert cluster.place("anywhere", "x") not in full
    chosen = cluster.place("here", "x", worker_restrictions={cluster.addresses[number] for number in allowed})
    assert chosen in (allowed - full or allowed)
    assert not cluster.fallbacks()


@given(
    live=st.lists(st.integers(1, 40), min_size=12, max_size=12),
    inputs=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 11)), min_size=1, max_size=4),
    result=st.integers(0, 12),
)
def test_never_a_live_tier_too_small_for_a_task_while_another_holds_it(
    live: list[int], inputs: list[tuple[int, int]], result: int
) -> None:
    cluster = Cluster(12)
    for number, size in enumerate(live):
        cluster.rooms.live[cluster.addresses[number]] = size * GB
        cluster.placement.on_memory_reported(cluster.addresses[number])
    for i, (size, holder) in enumerate(inputs):
        cluster.data(f"x{i}", holder, nbytes=size * GB)
    cluster.data("y-1", nbytes=result * GB)  # teaches the size of the prefix's results
    chosen = cluster.place("y-2", *[f"x{i}" for i in range(len(inputs))])
    together = sum(size for size, _ in inputs) + result
    assert chosen is not None
    assert live[chosen] >= min(together, max(live))
    assert not cluster.fallbacks()
