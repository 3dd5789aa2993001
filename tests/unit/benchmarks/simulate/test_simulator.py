"""Simulate graphs: modelled durations match hand calculations, and Dask makes all decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate import (
    WORKLOADS,
    Capacity,
    Cluster,
    Machine,
    Overheads,
    Result,
    Simulation,
    Submission,
    Work,
    Workload,
    build_cluster,
    build_workload,
)
from benchmarks.simulate.clock import Clock, Name
from benchmarks.simulate.links import Link, Place, Speed, Topology
from benchmarks.simulate.network import Network
from benchmarks.simulate.sides import SIDES, simulate
from benchmarks.simulate.tiers import RuntimeTiers, TierLink, Tiers
from benchmarks.simulate.worker import TieredWorker, VirtualWorker
from dask_gpurt.memory.ledger import Tier

# ---- small clusters, in round figures --------------------------------------------------------------

NO_OVERHEADS = Overheads(message=0, scheduler=0, task=0, transfer=0)
GB = 10**9
#: Bandwidth of shared memory, in bytes per second.
SPEED = 1e9


def machines(
    workers: int, *, per_host: int = 64, threads: int = 1, speed: float = 1.0, memory: int = 100 * GB
) -> list[Machine]:
    """Return workers without devices."""
    return [
        Machine(Place(f"host{index // per_host}"), Capacity(0, 0, memory), threads, speed)
        for index in range(workers)
    ]


def on_one_host(workers: int) -> Cluster:
    """Return workers on one host, connected by shared memory without latency."""
    return Cluster("one-host", machines(workers), speeds={Link.SHARED_MEMORY: Speed(SPEED, 0.0)})


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


SPEEDS = {Link.SHARED_MEMORY: Speed(100.0, 0.0), Link.TCP: Speed(10.0, 0.0), Link.RDMA: Speed(50.0, 0.5)}


class Wire:
    """Simulate a network of workers a0, a1, …, b0, …: letters are hosts."""

    def __init__(self, *, rdma: bool = False, **options: object):
        self.clock = Clock()
        topology = Topology(SPEEDS)
        for host in "abcd":
            for number in range(4):
                topology.add(f"{host}{number}", Place(host, rdma=rdma))
        self.network = Network(self.clock, topology, **options)  # type: ignore[arg-type]
        self.ends: dict[str, float] = {}
        self.asked = 0

    def send(self, name: str, source: str, target: str, nbytes: int, at: float = 0.0) -> None:
        self.asked += 1

        def note() -> None:
            self.ends[name] = self.clock.now

        self.clock.at(at, self.network.send, source, target, nbytes, note)

    def run(self) -> dict[str, float]:
        self.clock.run(until=lambda: len(self.ends) == self.asked)
        return self.ends


# ---- links ---------------------------------------------------------------------------


RACKS = {"racks": {"a": "r0", "b": "r0", "c": "r1", "d": "r1"}, "uplink": 10.0}


@pytest.mark.parametrize(
    ("options", "sends", "ends"),
    [
        pytest.param({"rdma": True}, [("a0", "b0", 100)], [2.5], id="latency and bandwidth"),
        # Half the bandwidth each until the first is done at 2 s; then the other has 100 bytes left.
        pytest.param({}, [("a0", "a1", 100), ("a0", "a2", 200)], [2, 3], id="one port of a worker"),
        # 100 bytes alone, then half the rate for a second, then the last 50 alone.
        pytest.param({}, [("a0", "a1", 200), ("a2", "a1", 50, 1.0)], [2.5, 2], id="one comes later"),
        pytest.param({}, [("a0", "a1", 100), ("a2", "a3", 100)], [1, 1], id="other pairs"),
        pytest.param({}, [("a0", "b0", 10), ("a1", "c0", 10)], [2, 2], id="TCP of a host"),
        pytest.param({"rdma": True}, [("a0", "b0", 50), ("a1", "b1", 50)], [1.5, 1.5], id="RDMA of each"),
        # The uplink gives five bytes a second to each of two; a's NIC is shared as well.
        pytest.param(RACKS, [("a0", "b0", 20), ("b1", "c0", 20), ("a1", "d0", 20)], [4, 4, 4], id="racks"),
    ],
)
def test_transfers_share_the_ports_that_they_pass(
    options: dict[str, Any], sends: list[Any], ends: list[float]
) -> None:
    wire = Wire(**options)
    for number, send in enumerate(sends):
        wire.send(str(number), *send)
    assert wire.run() == {str(number): pytest.approx(end) for number, end in enumerate(ends)}


# ---- tiers ---------------------------------------------------------------------------


def tiers(device: int = 100, pinned: int = 50, host: int = 100) -> Tiers:
    return Tiers(Capacity(device, pinned, host), lambda link: Speed(10.0, 1.0))


def runtime_tiers(next_use: Mapping[Any, int], pinned: int = 50) -> RuntimeTiers:
    """Make tiers of at most 100 bytes, with the priorities at which keys are needed next."""

    def soonest(key: Any) -> tuple[int, ...] | None:
        return (next_use[key],) if key in next_use else None

    return RuntimeTiers(Capacity(100, pinned, 100), lambda link: Speed(10.0, 1.0), soonest)


def test_the_runtime_spills_what_is_needed_last() -> None:
    mine = runtime_tiers({"a": 1, "b": 3, "c": 2})
    for key in "abc":
        mine[key] = 40
    assert [mine.tier(key) for key in "abc"] == [Tier.DEVICE, Tier.PINNED, Tier.DEVICE]
    # No task needs d, so it is evicted before a and c; the pinned tier has no room for it.
    mine["d"] = 30
    assert [mine.tier(key) for key in "abcd"] == [Tier.DEVICE, Tier.PINNED, Tier.DEVICE, Tier.HOST]


either_tiers = pytest.mark.parametrize(
    "make",
    [tiers, lambda: runtime_tiers({f"k{number}": number for number in range(5)})],
    ids=["Dask", "runtime"],
)


# ---- workers with the runtime's tiers ----------------------------------------------------


def joins(pairs: list[tuple[int, int]], nbytes: int) -> Workload:
    """Make kept data, then tasks that each take two of them and produce as much."""
    kept = [Work(Name(f"('kept', {i})"), (), 0.1, nbytes) for i in range(12)]
    made = [
        Work(Name(f"('join', {i})"), (kept[a].key, kept[b].key), 1.0, 2 * nbytes)
        for i, (a, b) in enumerate(pairs)
    ]
    first = Submission(kept, frozenset(one.key for one in kept), keep=True)
    return Workload("joins", [first, Submission(made, frozenset(one.key for one in made))])


def joined(pairs: list[tuple[int, int]], worker: type[VirtualWorker], workers: int = 3) -> Result:
    machines = [Machine(Place("host0", device=f"gpu{i}"), Capacity(100, 0, 100_000)) for i in range(workers)]
    cluster = Cluster("small", machines, speeds=dict.fromkeys([*Link, *TierLink], Speed(10.0, 0.0)))
    # One key per message: several keys would exceed a worker's memory.
    with dask.config.set({"distributed.worker.transfer.message-bytes-limit": 24}):
        return Simulation(cluster, joins(pairs, 24), worker=worker).run()


some_pairs = st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(lambda pair: pair[0] != pair[1])


@given(st.lists(some_pairs, min_size=1, max_size=30), st.integers(1, 5))
def test_with_the_tiers_of_the_runtime_no_worker_waits_for_ever_or_is_over(
    pairs: list[tuple[int, int]], workers: int
) -> None:
    """Each task needs 96 of 100 bytes: beside one no data may arrive, and no live data may be evicted."""
    result = joined(pairs, TieredWorker, workers)
    assert result.runs == result.tasks
    assert result.over_memory == 0


@either_tiers
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "drop", "hold", "go"]), st.integers(0, 9), st.integers(0, 80)),
        max_size=80,
    )
)
def test_tiers_add_up_and_are_over_only_by_what_is_held(
    make: Callable[[], Tiers], steps: list[tuple[str, int, int]]
) -> None:
    mine = make()
    held: list[tuple[str, int]] = []
    for what, number, nbytes in steps:
        key = f"k{number}"
        if what == "put":
            mine[key] = nbytes
        elif what == "drop":
            mine.pop(key, None)
        elif what == "hold":
            mine.hold([key], nbytes)
            held.append((key, nbytes))
        elif held:
            key, reserved = held.pop(0)
            mine.release([key], reserved)
        pinned = {key for key, _ in held if mine.tier(key) is mine.live}
        reserved_now = sum(reserved for _, reserved in held)
        total = sum(mine[key] for key in mine)
        assert total == mine.live_bytes - reserved_now + mine.spilled_bytes
        if what in ("put", "hold"):
            limit = max(mine.capacity.live, sum(mine[key] for key in pinned) + reserved_now)
            assert mine.live_bytes <= limit


def test_a_spilled_input_delays_its_task() -> None:
    """Two results of 80 bytes do not fit 100: one has to be read back for the task that needs both."""
    machine = Machine(Place("host0", device="gpu0"), Capacity(100, 0, 1000))
    cluster = Cluster("one", [machine], speeds={TierLink.PAGEABLE: Speed(10.0, 0.0)})
    a, b = (Work(Name(f"('{name}', 0)"), (), 1.0, 80) for name in "ab")
    c = Work(Name("('c', 0)"), (a.key, b.key), 1.0, 0)
    workload = Workload("spills", [Submission([a, b, c], frozenset([c.key]))])
    result = Simulation(cluster, workload, overheads=NO_OVERHEADS).run()
    # Once before the second task, and once when the third is over.
    assert result.spilled == 160
    assert result.over_memory == 1
    assert result.worst_memory == pytest.approx(1.6)
    # 8 s to spill before the second task, and 8 s to read before the third.
    assert result.makespan == pytest.approx(3 + 16)
