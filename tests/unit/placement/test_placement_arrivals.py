"""Place the tasks of one graph: tasks about to be placed count as load where their inputs are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dask._task_spec import Task, TaskRef
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.placed_cluster import GB, Cluster


def graph_on(cluster: Cluster, homes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Place the tasks of a graph, each with one input; takes the inputs' workers and sizes."""
    graph: dict[Any, Task] = {}
    for i, (home, nbytes) in enumerate(zip(homes, sizes, strict=True)):
        cluster.data(f"data-{i}", home, nbytes=nbytes)
        graph["use", i] = Task(("use", i), tuple, TaskRef(f"data-{i}"))
    cluster.state.submit(graph, list(graph))
    assert not cluster.fallbacks()
    sent = {key: cluster.addresses.index(address) for address, key in cluster.state.sent}
    return [sent[key] for key in graph]


@settings(max_examples=30, deadline=None)
@given(st.permutations([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]))
def test_no_worker_looks_idle_whose_tasks_are_about_to_be_placed(homes: list[int]) -> None:
    cluster = Cluster(4)
    cluster.takes("use", 1.0)
    assert graph_on(cluster, homes, [GB // 100] * 12) == homes


@settings(max_examples=30, deadline=None)
@given(st.permutations([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]))
def test_of_more_tasks_than_others_have_only_those_go_that_are_too_many(homes: list[int]) -> None:
    cluster = Cluster(4)
    cluster.takes("use", 1.0)
    chosen = graph_on(cluster, homes, [GB // 100] * 12)
    assert Counter(chosen) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert sum(was != now for was, now in zip(homes, chosen, strict=True)) <= 8  # six at least


def test_what_was_expected_and_is_gone_counts_no_more() -> None:
    cluster = Cluster(2)
    cluster.data("x", 0)
    cluster.data("y", 1)
    for i in range(4):
        cluster.task(f"use-y{i}", "y")
    cluster.placement.on_graph([f"use-y{i}" for i in range(4)])
    cluster.busy(0, 2)
    assert cluster.place("early", "x") == 0
    cluster.state.stimulus_queue_slots_maybe_opened(stimulus_id="an event later")
    assert cluster.place("late", "x") == 1


def test_a_worker_with_few_large_inputs_hands_over_small_ones() -> None:
    cluster = Cluster(2)
    for i in range(20):  # durations are proportional to the inputs' sizes
        cluster.data(f"seen-{i}", 0, nbytes=(1 + i) * GB // 1000)
        cluster.task(f"use-seen{i}", f"seen-{i}", duration=0.01)
        cluster.state.transitions({f"use-seen{i}": "waiting"}, "test")
        cluster.placement.on_task_ended(f"use-seen{i}", cluster.addresses[0], 0.001 * (1 + i))
    cluster.state.sent.clear()
    for i in range(20):
        cluster.state.transitions({f"use-seen{i}": "released"}, "test")
    sizes = [GB, *[GB // 20] * 10]
    chosen = graph_on(cluster, [0] * 2 + [1] * 9, sizes)
    assert chosen == [0] + [1] * 10
