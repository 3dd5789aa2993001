"""Simulate graphs: modelled durations match hand calculations, and Dask makes all decisions."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import dask
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate import (
    WORKLOADS,
    Cluster,
    Simulation,
    Submission,
    Work,
    Workload,
    build_cluster,
    build_workload,
)
from benchmarks.simulate.clock import Name
from benchmarks.simulate.sides import SIDES, simulate
from benchmarks.simulate.workloads import Scale
from tests.helpers.clusters_of_machines import NO_OVERHEADS, SPEED, machines, on_one_host

MB = 10**6

each_side = pytest.mark.parametrize("side", SIDES)


def work(name: str, *needs: Work, seconds: float = 1.0, nbytes: int = 0) -> Work:
    return Work(Name(f"('{name}', 0)"), tuple(need.key for need in needs), seconds, nbytes)


def workload(*works: Work, wanted: Sequence[Work] = ()) -> Workload:
    """Return a workload of one graph, whose results are the tasks without dependents."""
    needed = {need for one in works for need in one.needs}
    ends = [one.key for one in wanted] or [one.key for one in works if one.key not in needed]
    return Workload("made-up", [Submission(works, frozenset(ends))])


def run(cluster: Cluster, *works: Work, **options: Any) -> Simulation:
    simulation = Simulation(cluster, workload(*works), overheads=NO_OVERHEADS, **options)
    simulation.run()
    return simulation


# ---- the duration of decisions --------------------------------------------------------


def test_decisions_take_the_time_of_the_scheduler() -> None:
    slow = dataclasses.replace(NO_OVERHEADS, decision=0.5)
    chain = [work("a")]
    for letter in "bcd":
        chain.append(work(letter, chain[-1]))
    done = Simulation(on_one_host(2), workload(*chain), overheads=slow)
    assert done.run().makespan == pytest.approx(4 * 1.5)
    wide = Simulation(on_one_host(4), workload(*[work(letter) for letter in "abcd"]), overheads=slow)
    # The workers receive their tasks one after the other.
    assert wide.run().makespan == pytest.approx(4 * 0.5 + 1)


# ---- graphs that can be calculated by hand -------------------------------------------


def test_a_chain_takes_the_sum_of_its_tasks() -> None:
    a = work("a", seconds=1)
    b = work("b", a, seconds=2)
    done = run(on_one_host(3), a, b, work("c", b, seconds=3))
    assert done.result.makespan == pytest.approx(6)
    assert done.result.bytes == {}


def test_independent_tasks_run_beside_each_other() -> None:
    tasks = [work(f"{letter}", seconds=index + 1) for index, letter in enumerate("abcd")]
    assert run(on_one_host(4), *tasks).result.makespan == pytest.approx(4)
    assert run(on_one_host(1), *tasks).result.makespan == pytest.approx(10)


def test_a_worker_of_half_the_speed_takes_twice_as_long() -> None:
    assert run(Cluster("slow", machines(1, speed=0.5)), work("a")).result.makespan == pytest.approx(2)


def test_an_input_is_fetched_before_its_task_runs() -> None:
    small, large = work("a", nbytes=100 * MB), work("b", nbytes=500 * MB)
    done = run(on_one_host(2), small, large, work("c", small, large))
    # The task runs where the larger input is.
    assert done.result.bytes == {"shared-memory": 100 * MB}
    assert done.result.makespan == pytest.approx(2 + 100 * MB / SPEED, rel=1e-3)


def test_messages_and_overheads_take_their_time() -> None:
    alone = dataclasses.replace(NO_OVERHEADS, task=0.5, message=0.25)
    simulation = Simulation(on_one_host(1), workload(work("a")), overheads=alone)
    assert simulation.run().makespan == pytest.approx(0.25 + 0.5 + 1 + 0.25)


# ---- decisions by Dask ---------------------------------------------------------------


def imbalance() -> list[Work]:
    """Make many tasks, in groups too small to be queued, whose small input is on one worker."""
    origin = work("origin", nbytes=10, seconds=0.1)
    return [
        origin,
        *[Work(Name(f"('use{i // 8}-u', {i})"), (origin.key,), 1.0, 10) for i in range(40)],
    ]


def test_idle_workers_steal() -> None:
    done = run(on_one_host(4), *imbalance())
    assert done.result.steals > 0
    with dask.config.set({"distributed.scheduler.work-stealing": False}):
        without = run(on_one_host(4), *imbalance())
    assert without.result.steals == 0
    assert done.result.makespan < without.result.makespan


# ---- invariants ----------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> list[Work]:
    """Draw random graphs of up to 30 tasks."""
    made: list[Work] = []
    for index in range(draw(st.integers(1, 30))):
        needs = draw(st.lists(st.sampled_from(made), max_size=3, unique_by=lambda w: w.key)) if made else []
        made.append(
            Work(
                Name(f"('task{draw(st.integers(0, 3))}-t', {index})"),
                tuple(need.key for need in needs),
                draw(st.floats(0, 10)),
                draw(st.integers(0, 10**9)),
            )
        )
    return made


def critical_path(works: Sequence[Work]) -> float:
    ends: dict[str, float] = {}
    for one in works:
        ends[one.key] = one.seconds + max((ends[need] for need in one.needs), default=0.0)
    return max(ends.values())


@each_side
@given(works=graphs(), workers=st.integers(1, 6), per_host=st.integers(1, 4))
def test_no_graph_is_faster_than_it_can_be(side: str, works: list[Work], workers: int, per_host: int) -> None:
    cluster = Cluster("any", machines(workers, per_host=per_host))
    done = simulate(cluster, workload(*works), side, overheads=NO_OVERHEADS)
    assert done.result.makespan >= critical_path(works) * (1 - 1e-9)
    assert done.result.makespan >= sum(one.seconds for one in works) / workers * (1 - 1e-9)
    assert done.runs == {one.key: 1 for one in works}
    assert done.result.fallbacks == 0


@pytest.mark.parametrize("name", WORKLOADS)
@each_side
def test_each_task_of_a_workload_runs_once(name: str, side: str) -> None:
    cluster = build_cluster("mixed", 8)
    built = build_workload(name, cluster, partitions=8)
    done = simulate(cluster, built, side)
    assert done.runs == dict.fromkeys(built.works, 1)
    assert sum(done.result.bytes.values()) >= done.result.between_hosts
    assert done.result.fallbacks == 0


# ---- workloads and clusters ----------------------------------------------------------


@pytest.mark.parametrize("partitions", [2, 7, 32, 33, 100])
@pytest.mark.parametrize("name", ["shuffle-join", "skewed-join", "pipeline"])
def test_a_shuffle_loses_no_bytes(name: str, partitions: int) -> None:
    scale = Scale(partitions, memory=10**12, workers=4)
    works = WORKLOADS[name](scale, random.Random(0)).works
    needed = {need: one for one in works.values() for need in one.needs}
    pieces: dict[str, list[int]] = {}
    for one in works.values():
        if len(one.needs) == 1:
            pieces.setdefault(one.needs[0], []).append(one.nbytes)
    for key, one in works.items():
        if "'shuffle-group" in key:
            assert sum(pieces[key]) == pytest.approx(one.nbytes, rel=1e-6, abs=len(pieces[key]))
        if "split" in key:
            assert "shuffle-concat" in needed[key].key
