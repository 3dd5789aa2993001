"""Choices on the real state of Dask's scheduler, without a running one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import dask
import placement as bare
import pytest
from dask._task_spec import Alias, Task, TaskRef
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.memory.tiers import Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import Placement, Room
from dask_gpurt.topology import Place, Topology

GB = 10**9


class Rooms:
    """Room as a test says."""

    def __init__(self, **free: float):
        self.free: dict[str, float] = {}
        self.live: dict[str, float] = {}
        self.tiers: dict[tuple[str, Any], Tier] = {}

    def room(self, worker: str) -> Room:
        free = self.free.get(worker, 80 * GB)
        if worker not in self.live:
            return Room(free)
        return Room(min(free, self.live[worker]), 1000 * GB, Tier.HOST, self.live[worker])

    def told(self, worker: str) -> bool:
        return True

    def tier(self, worker: str, key: Any) -> Tier:
        return self.tiers.get((worker, key), Tier.DEVICE)


class Watch(SchedulerPlugin):
    """Tells a placement what our scheduler plugin tells it."""

    def __init__(self, placement: Placement):
        self.placement = placement

    def update_graph(self, scheduler: Any, *, tasks: Any, **_: Any) -> None:
        self.placement.submitted(tasks)

    def transition(self, key: Any, start: str, finish: str, *_: Any, **told: Any) -> None:
        if start == "processing":
            self.placement.ended(
                key, told["worker"] if finish == "memory" else None, told.get("seconds", 0.1)
            )


class Cluster:
    """A bare state with placement on it; workers are named by number, eight to a host."""

    def __init__(self, workers: int = 16, topology: Topology | None = None):
        self.state = bare.BareState(workers)
        self.addresses = list(self.state.workers)
        self.rooms, self.metrics = Rooms(), Metrics()
        known = bare.topology_of(self.state) if topology is None else topology
        self.placement = Placement(self.state, known, self.rooms, self.metrics)
        self.placement.bind()
        self.state.add_plugin(Watch(self.placement), name="watch")

    def ws(self, number: int) -> Any:
        return self.state.workers[self.addresses[number]]

    def data(self, key: str, *numbers: int, nbytes: int = GB) -> None:
        """A key that lies on some workers, as if it had been scattered."""
        ts = self.state.new_task(key, None, "released")
        ts.state = "memory"
        ts.set_nbytes(nbytes)
        for number in numbers:
            self.state.add_replica(ts, self.ws(number))

    def task(self, key: str, *inputs: str, duration: float = 1.0, **attributes: Any) -> Any:
        ts = self.state.new_task(key, lambda: None, "released")
        ts.run_spec, ts.priority = Task(key, tuple), (0, 0, len(self.state.tasks))
        ts.prefix.duration_average = duration
        ts.who_wants = {self.state.clients["fire-and-forget"]}
        for name in inputs:
            ts.add_dependency(self.state.tasks[name])
        for name, value in attributes.items():
            setattr(ts, name, value)
        return ts

    def place(self, key: str, *inputs: str, **options: Any) -> int | None:
        """Run a task; tell which worker got it."""
        ts = self.task(key, *inputs, **options)
        self.state.transitions({key: "waiting"}, "test")
        return self.addresses.index(ts.processing_on.address) if ts.processing_on else None

    def busy(self, number: int, tasks: int) -> None:
        for i in range(tasks):
            key = f"busy{number}-{i}"
            assert self.place(key, worker_restrictions={self.addresses[number]}) == number

    def fallbacks(self) -> dict[str, Any]:
        return dict(self.metrics.snapshot()["fallbacks"])


def test_a_task_runs_where_its_input_is() -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    assert cluster.place("y", "x") == 5


def test_a_busy_holder_hands_over_to_an_idle_neighbour_with_nvlink() -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    cluster.busy(5, 3)
    chosen = cluster.place("y", "x")
    assert chosen != 5
    assert chosen in range(8)
    terms = {row["worker"]: row for row in cluster.placement.explain("y")}
    assert terms[cluster.addresses[5]]["waiting"] == pytest.approx(3)
    assert terms[cluster.addresses[5]]["missing"] == 0
    assert terms[cluster.addresses[chosen]]["chosen"]
    assert terms[cluster.addresses[chosen]]["missing"] == GB


@pytest.mark.parametrize(("seconds", "moves"), [(0.01, True), (0.04, False), (4.0, True)])
def test_a_short_task_moves_only_where_it_gains_half_of_what_it_takes(seconds: float, moves: bool) -> None:
    cluster = Cluster()
    cluster.data("x", 5, nbytes=1000)
    cluster.busy(5, 1)
    cluster.state.task_prefixes["busy5"].duration_average = 0.01 if seconds < 1 else 1.0
    assert (cluster.place("y", "x", duration=seconds) != 5) == moves


def test_a_worker_with_aliases_has_what_waits_for_them_to_do() -> None:
    """Persisted data come as aliases, which take no time; as soon as they are there their readers run."""
    cluster = Cluster(2)
    cluster.data("x", 0)
    cluster.busy(0, 3)
    for number in range(4):
        cluster.data(f"data-{number}", 1)
        alias = cluster.task(f"made-{number}", f"data-{number}", duration=0.01)
        alias.run_spec = Alias(alias.key, f"data-{number}")
        cluster.task(f"read-{number}", alias.key)
        cluster.state.transitions({alias.key: "waiting"}, "test")
        assert alias.processing_on is cluster.ws(1)
    assert cluster.place("y", "x") == 0


def test_what_joins_the_gpus_does_not_count_where_dask_sends_by_tcp() -> None:
    topology = Topology()
    for address in bare.BareState(16).workers:
        host, _, device = address.rpartition(":")
        topology.add(address, Place(host, f"{host}/{device}", 0, host, by_tcp=True))
    cluster = Cluster(topology=topology)
    cluster.data("x", 5, nbytes=8 * GB)
    cluster.busy(5, 3)
    assert cluster.place("y", "x") == 5


def test_inputs_are_not_moved_for_a_guess() -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    cluster.busy(5, 3)
    assert cluster.place("y", "x", duration=-1) == 5


def test_tasks_whose_inputs_come_from_afar_share_the_way_whatever_their_length() -> None:
    cluster = Cluster()
    cluster.data("here", 5, nbytes=40 * GB)
    chosen = []
    for i in range(4):
        cluster.data(f"far{i}", 12, nbytes=4 * GB)
        chosen.append(cluster.place(f"both{i}", "here", f"far{i}", duration=-1))
    assert chosen[0] == 5
    assert len({*chosen}) == 4
    assert {*chosen} < {*range(8)}


def test_what_is_on_its_way_is_not_sent_again() -> None:
    cluster = Cluster()
    cluster.data("x", 1, nbytes=GB)
    cluster.data("big", 2, nbytes=4 * GB)
    assert cluster.place("one", "x", "big") == 2
    cluster.place("two", "x", "big")
    rows = {row["worker"]: row for row in cluster.placement.explain("two")}
    assert rows[cluster.addresses[2]]["missing"] == 0
    assert rows[cluster.addresses[2]]["moving"] > 0  # until it has come


def test_the_disk_is_slower_than_the_other_host() -> None:
    cluster = Cluster()
    cluster.data("x", 1, 9, nbytes=4 * GB)
    cluster.rooms.tiers[cluster.addresses[1], "x"] = Tier.DISK
    assert cluster.place("y", "x") == 9


def test_a_holder_without_room_is_passed_over() -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    cluster.data("other", 6)
    cluster.rooms.free[cluster.addresses[5]] = 0
    cluster.rooms.free[cluster.addresses[6]] = 0
    cluster.placement.changed(cluster.addresses[5])
    assert cluster.place("y", "x", "other") not in (5, 6, None)


@pytest.mark.parametrize(("told_again", "expected"), [(False, 6), (True, 5)])
def test_what_has_come_since_a_worker_told_its_room_is_in_it(told_again: bool, expected: int) -> None:
    cluster = Cluster()
    cluster.rooms.free[cluster.addresses[5]] = 10 * GB
    cluster.placement.told(cluster.addresses[5])
    cluster.data("x", 5, nbytes=9 * GB)
    cluster.data("other", 6, nbytes=2 * GB)
    if told_again:
        cluster.placement.told(cluster.addresses[5])
    assert cluster.place("y", "x", "other") == expected


def test_what_has_gone_since_a_worker_told_its_room_may_have_been_spilled() -> None:
    cluster = Cluster()
    cluster.data("x", 5, nbytes=GB)
    cluster.data("other", 6, nbytes=2 * GB)
    cluster.data("gone", 5, nbytes=20 * GB)
    cluster.rooms.free[cluster.addresses[5]] = GB
    cluster.placement.told(cluster.addresses[5])
    cluster.state.remove_replica(cluster.state.tasks["gone"], cluster.ws(5))
    assert cluster.place("y", "x", "other") == 6


def test_restrictions_hold_and_loose_ones_give_way() -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    assert cluster.place("y", "x", worker_restrictions={cluster.addresses[12]}) == 12
    assert cluster.place("gone", "x", worker_restrictions={"tcp://nobody:1"}) is None
    loose = {"worker_restrictions": {"tcp://nobody:1"}, "loose_restrictions": True}
    assert cluster.place("loose", "x", **loose) == 5


def test_a_worker_leaves_between_its_report_and_the_decision() -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    cluster.busy(5, 3)
    for number in (0, 1, 2):  # Dask says nothing of workers that pause
        cluster.ws(number).status = Status.paused
        cluster.state.running.discard(cluster.ws(number))
        cluster.state.idle_task_count.discard(cluster.ws(number))
    chosen = cluster.place("y", "x")
    assert chosen not in (0, 1, 2, None)
    cluster.placement.left(cluster.addresses[15])
    cluster.placement.changed("tcp://nobody:1")
    assert not cluster.fallbacks()


def test_workers_that_the_topology_does_not_know_yet() -> None:
    cluster = Cluster(topology=Topology())
    cluster.data("x", 5)
    assert cluster.place("y", "x") == 5
    assert not cluster.fallbacks()


def test_an_exception_falls_back_to_dask_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.data("x", 5)
    cluster.rooms.tier = None  # type: ignore[method-assign, assignment]
    for name in "abc":
        assert cluster.place(name, "x") == 5
    fallback = cluster.fallbacks()["placement.decide_worker_non_rootish"]
    assert fallback["count"] == 3
    assert "TypeError" in fallback["reason"]
    assert len([record for record in caplog.records if "placement" in record.message]) == 1


def test_a_signature_that_we_do_not_know_stays_with_dask() -> None:
    class Newer(bare.BareState):
        def decide_worker_non_rootish(self, ts: Any, hint: Any = None) -> Any:
            return super().decide_worker_non_rootish(ts)

    state, metrics = Newer(4), Metrics()
    Placement(state, Topology(), Rooms(), metrics).bind()
    assert "decide_worker_non_rootish" not in state.__dict__
    assert "is_rootish" in state.__dict__
    assert "hint" in metrics.snapshot()["fallbacks"]["placement.decide_worker_non_rootish"]["reason"]


# ---- tasks of one graph ----------------------------------------------------------------


def known_for(cluster: Cluster, prefix: str, seconds: float) -> None:
    cluster.state.new_task(f"{prefix}-0", None, "released").prefix.duration_average = seconds


def graph_on(cluster: Cluster, homes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Where the tasks of a graph go, each with one input, by where these are and how large."""
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
def test_nobody_looks_idle_whose_tasks_are_about_to_be_placed(homes: list[int]) -> None:
    cluster = Cluster(4)
    known_for(cluster, "use", 1.0)
    assert graph_on(cluster, homes, [GB // 100] * 12) == homes


@settings(max_examples=30, deadline=None)
@given(st.permutations([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]))
def test_of_more_tasks_than_others_have_only_those_go_that_are_too_many(homes: list[int]) -> None:
    cluster = Cluster(4)
    known_for(cluster, "use", 1.0)
    chosen = graph_on(cluster, homes, [GB // 100] * 12)
    assert Counter(chosen) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert sum(was != now for was, now in zip(homes, chosen, strict=True)) <= 8  # six at least


def test_what_was_expected_and_is_gone_counts_no_more() -> None:
    cluster = Cluster(2)
    cluster.data("x", 0)
    cluster.data("y", 1)
    for i in range(4):
        cluster.task(f"use-y{i}", "y")
    cluster.placement.submitted([f"use-y{i}" for i in range(4)])
    cluster.busy(0, 2)
    assert cluster.place("early", "x") == 0
    cluster.state.stimulus_queue_slots_maybe_opened(stimulus_id="an event later")
    assert cluster.place("late", "x") == 1


def test_a_worker_with_few_large_inputs_hands_over_small_ones() -> None:
    cluster = Cluster(2)
    for i in range(20):  # tasks take as long as their inputs are large
        cluster.data(f"seen-{i}", 0, nbytes=(1 + i) * GB // 1000)
        cluster.task(f"use-seen{i}", f"seen-{i}", duration=0.01)
        cluster.state.transitions({f"use-seen{i}": "waiting"}, "test")
        cluster.placement.ended(f"use-seen{i}", cluster.addresses[0], 0.001 * (1 + i))
    cluster.state.sent.clear()
    for i in range(20):
        cluster.state.transitions({f"use-seen{i}": "released"}, "test")
    sizes = [GB, *[GB // 20] * 10]
    chosen = graph_on(cluster, [0] * 2 + [1] * 9, sizes)
    assert chosen == [0] + [1] * 10


@pytest.mark.parametrize(("seconds", "moves"), [(0.001, False), (1.0, True)])
def test_inputs_move_only_for_tasks_that_take_longer(seconds: float, moves: bool) -> None:
    cluster = Cluster(4)
    known_for(cluster, "short", seconds)
    cluster.data("x", 0, nbytes=8 * GB)
    cluster.busy(0, 3)
    assert (cluster.place("short-1", "x", duration=seconds) != 0) == moves


# ---- root tasks ------------------------------------------------------------------------


def run(state: Any, graph: Any) -> list[tuple[Any, str]]:
    state.submit(*bare.graph_of(graph))
    done = state.run()
    assert len(done) == len(state.tasks)
    return list(done)


def loads(tasks: int) -> dict[Any, list[Any]]:
    """Root tasks, and nothing else."""
    return {("load", i): [] for i in range(tasks)}


def test_siblings_meet_on_one_host() -> None:
    def apart(ours: bool) -> float:
        state = bare.BareState(64)
        if ours:
            Placement(state, bare.topology_of(state), bare.Roomy(), Metrics()).bind()
        state.submit(*bare.graph_of(bare.tree(2048)))
        where: dict[Any, str] = {}
        order = random.Random(1)
        while state.sent:  # tasks finish in any order
            state.sent.rotate(order.randrange(len(state.sent)))
            address, key = state.sent.popleft()
            where[key] = address.rpartition(":")[0]
            state.finish(key, address)
        families = [{where["sum0", 8 * i + j] for j in range(8)} for i in range(224)]
        return sum(len(hosts) - 1 for hosts in families) / len(families)

    assert apart(ours=True) < apart(ours=False) / 3


def test_the_queue_respects_headroom_and_moves_on_when_room_comes() -> None:
    cluster = Cluster(4)
    full = cluster.addresses[:3]
    cluster.rooms.free.update(dict.fromkeys(full, 0.0))
    for address in full:
        cluster.placement.changed(address)
    cluster.state.submit(*bare.graph_of(loads(50)))
    assert {address for address, _ in cluster.state.sent} == {cluster.addresses[3]}
    cluster.rooms.free[full[0]] = 80 * GB
    cluster.placement.changed(full[0])
    assert {address for address, _ in cluster.state.sent} == {cluster.addresses[3], full[0]}


def test_the_queue_moves_when_nobody_has_room() -> None:
    cluster = Cluster(4)
    cluster.rooms.free.update(dict.fromkeys(cluster.addresses, 0.0))
    for address in cluster.addresses:
        cluster.placement.changed(address)
    assert len(run(cluster.state, loads(50))) == 50


def roots_with_kept_siblings(homes: list[int]) -> list[int]:
    """Where root tasks of 10 s go on four workers, two slots each, by where their only siblings are."""
    cluster = Cluster(4)
    cluster.state.new_task("root-0", None, "released").prefix.duration_average = 10.0
    graph: dict[Any, Task] = {}
    for i, home in enumerate(homes):
        cluster.data(f"kept-{i}", home)
        graph["root", i] = Task(("root", i), tuple, _data_producer=True)
        graph["use", i] = Task(("use", i), tuple, TaskRef(("root", i)), TaskRef(f"kept-{i}"))
    cluster.state.submit(graph, [("use", i) for i in range(len(homes))])
    assert not cluster.fallbacks()
    sent = {key: cluster.addresses.index(address) for address, key in cluster.state.sent}
    return [sent["root", i] for i in range(len(homes))]


@pytest.mark.parametrize("homes", [[3, 3, 2, 2, 1, 1, 0, 0], [0, 1, 2, 3, 3, 2, 1, 0]])
def test_roots_that_fill_all_slots_wait_near_their_siblings(homes: list[int]) -> None:
    assert roots_with_kept_siblings(homes) == homes


def test_without_a_queue_no_root_task_waits_near_a_sibling() -> None:
    with dask.config.set({"distributed.scheduler.worker-saturation": "inf"}):
        chosen = roots_with_kept_siblings([3] * 8)
    assert {*chosen} == {0, 1, 2, 3}


@pytest.mark.parametrize("number", [4, 6])
def test_roots_that_leave_slots_do_not_wait_near_a_sibling(number: int) -> None:
    chosen = roots_with_kept_siblings([3] * number)
    assert sorted(chosen[:4]) == [0, 1, 2, 3]


# ---- off -------------------------------------------------------------------------------


def graphs(seed: int) -> dict[Any, list[Any]]:
    """A random graph, with a group of root tasks."""
    rng = random.Random(seed)
    graph: dict[Any, list[Any]] = {("root", i): [] for i in range(rng.randrange(1, 60))}
    for i in range(rng.randrange(60)):
        graph[f"layer{i % 5}", i] = rng.sample(list(graph), min(len(graph), rng.randrange(1, 4)))
    return graph


@settings(max_examples=30, deadline=None)
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


@settings(max_examples=50, deadline=None)
@given(full=numbers, holders=numbers.filter(bool), allowed=numbers.filter(bool), tasks=st.integers(0, 4))
def test_never_a_forbidden_worker_nor_one_without_room(
    full: set[int], holders: set[int], allowed: set[int], tasks: int
) -> None:
    cluster = Cluster(12)
    for number in full:
        cluster.rooms.free[cluster.addresses[number]] = -1.0
        cluster.placement.changed(cluster.addresses[number])
    cluster.data("x", *holders)
    cluster.busy(min(holders), tasks)
    assert cluster.place("anywhere", "x") not in full
    chosen = cluster.place("here", "x", worker_restrictions={cluster.addresses[number] for number in allowed})
    assert chosen in (allowed - full or allowed)
    assert not cluster.fallbacks()


@settings(max_examples=50, deadline=None)
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
        cluster.placement.told(cluster.addresses[number])
    for i, (size, holder) in enumerate(inputs):
        cluster.data(f"x{i}", holder, nbytes=size * GB)
    cluster.data("y-1", nbytes=result * GB)  # what is known of the prefix
    chosen = cluster.place("y-2", *[f"x{i}" for i in range(len(inputs))])
    together = sum(size for size, _ in inputs) + result
    assert chosen is not None
    assert live[chosen] >= min(together, max(live))
    assert not cluster.fallbacks()


def test_a_result_grows_with_its_inputs_as_those_before_did() -> None:
    cluster = Cluster(12)
    cluster.rooms.live = dict.fromkeys(cluster.addresses, 24 * GB)
    cluster.rooms.live[cluster.addresses[3]] = 80 * GB
    for address in cluster.addresses:
        cluster.placement.told(address)
    for number, size in enumerate((1, 2, 14)):
        cluster.data(f"x-{number}", 5, nbytes=size * GB)
    for number in range(2):
        cluster.data(f"join-{number}", 5, nbytes=(number + 1) * GB)
        cluster.state.tasks[f"join-{number}"].add_dependency(cluster.state.tasks[f"x-{number}"])
        cluster.placement.ended(f"join-{number}", cluster.addresses[5], 1.0)
    assert cluster.place("join-2", "x-2") == 3  # 14 and 14 GB
    assert cluster.place("other-2", "x-2") == 5


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_equal_states_make_equal_choices(seed: int) -> None:
    first, second = Cluster(12), Cluster(12)
    assert run(first.state, graphs(seed)) == run(second.state, graphs(seed))
    assert not first.fallbacks()
