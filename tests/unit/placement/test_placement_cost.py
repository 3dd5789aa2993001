"""Compute the cost of a task on a worker, and compare choices with those made by hand."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.ledger import FreeMemory
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import LOCAL_ROUTE, Candidate, Route, Terms
from dask_gpurt.placement.history import History
from dask_gpurt.placement.queueing import LoadIndex
from dask_gpurt.placement.routes import Routes
from dask_gpurt.topology import SHIPPED, Link, Place, Speed, Topology

GB = 10**9
NVLINK, RDMA, TCP = (Route.over(SHIPPED[link]) for link in (Link.NVLINK, Link.RDMA, Link.TCP))
ROOMY = FreeMemory(80 * GB)
DISK, PINNED = Route.over(SHIPPED[Link.DISK]), Route.over(SHIPPED[Link.PINNED])


def candidate(
    worker: str,
    *,
    work: float = 0,
    tasks: int = 0,
    threads: int = 1,
    slowdown: float = 1,
    running: float = 1,
    inputs: list[tuple[float, list[Route]]] | None = None,
    need: float = 0,
    memory: FreeMemory = ROOMY,
    spill: Route = LOCAL_ROUTE,
) -> Candidate:
    moving = sum(cost.moving(nbytes, routes) for nbytes, routes in inputs or [])
    room, fits = cost.room(need, memory, spill)
    waiting = cost.waiting(work, tasks, threads, slowdown)
    return Candidate(worker, Terms(waiting, running * slowdown, moving, room, fits))


SITUATIONS = {
    "data stays where it is": [candidate("a"), candidate("b", inputs=[(GB, [NVLINK])])],
    "NVLink is worth it when the holder is busy": [
        candidate("a", inputs=[(GB, [NVLINK])]),
        candidate("b", work=2, tasks=2),
    ],
    "TCP is not": [candidate("a", work=2, tasks=2), candidate("b", inputs=[(8 * GB, [TCP])])],
    "the same domain before another host": [
        candidate("a", inputs=[(GB, [NVLINK])]),
        candidate("b", inputs=[(GB, [RDMA])]),
    ],
    "a far replica in memory before a near one on disk": [
        candidate("a", inputs=[(GB, [RDMA])]),
        candidate("b", inputs=[(GB, [DISK])]),
    ],
    "the best replica counts": [
        candidate("a", inputs=[(GB, [DISK.then(NVLINK), NVLINK])]),
        candidate("b", inputs=[(GB, [RDMA])]),
    ],
    "room before time": [
        candidate("a", need=GB, inputs=[(8 * GB, [TCP])]),
        candidate("b", need=GB, memory=FreeMemory(GB / 2)),
    ],
    "to spill a little before to move much": [
        candidate("a", need=2 * GB, memory=FreeMemory(GB, 100 * GB), spill=PINNED),
        candidate("b", need=2 * GB, inputs=[(2 * GB, [TCP])]),
    ],
    "a free thread before a queue": [
        candidate("a", work=3, tasks=3, threads=4),
        candidate("b", work=1, tasks=1),
    ],
    "a fast worker before a slow one": [candidate("a"), candidate("b", slowdown=2)],
    "a fast worker that is busy for a moment": [
        candidate("a", work=0.5, tasks=1),
        candidate("b", slowdown=2),
    ],
}


@pytest.mark.parametrize("candidates", SITUATIONS.values(), ids=SITUATIONS)
def test_the_worker_that_a_person_would_pick(candidates: list[Candidate]) -> None:
    assert cost.best(candidates).worker == "a"
    assert cost.best(reversed(candidates)).worker == "a"


def test_what_others_lack_is_not_for_the_next_task_to_pay() -> None:
    deep, _ = cost.room(GB, FreeMemory(-50 * GB, 100 * GB), PINNED)
    shallow, _ = cost.room(GB, FreeMemory(0, 100 * GB), PINNED)
    assert deep == shallow == pytest.approx(PINNED.latency + GB * PINNED.seconds_per_byte)


seconds = st.floats(0, 1e4)
amounts = st.floats(0, 1e12, allow_subnormal=False)
all_terms = st.builds(Terms, seconds, seconds, seconds, seconds, st.booleans())
candidates = st.lists(
    st.builds(Candidate, st.text("abcdef", min_size=1), all_terms, st.floats(0, 100), amounts),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.worker,
)


@given(candidates, st.randoms())
def test_equal_states_agree_in_whatever_order(found: list[Candidate], random: object) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert cost.best(shuffled) == cost.best(found)


@given(candidates)
def test_no_worker_without_room_while_one_has_room(found: list[Candidate]) -> None:
    assert cost.best(found).terms.fits == any(one.terms.fits for one in found)


@given(
    st.lists(st.tuples(amounts, st.sampled_from([NVLINK, RDMA, TCP, DISK])), min_size=1, max_size=4),
    amounts,
    st.floats(-1e12, 1e12, allow_subnormal=False),
    amounts,
    st.sampled_from([2.0**k for k in range(-10, 31)]),
)
def test_the_unit_of_bytes_does_not_matter(
    inputs: list[tuple[float, Route]], need: float, free: float, below: float, unit: float
) -> None:
    def measured(scale: float) -> tuple[float, float, bool]:
        def scaled(route: Route) -> Route:
            return Route(route.latency, route.seconds_per_byte / scale)

        moving = sum(cost.moving(nbytes * scale, [scaled(route)]) for nbytes, route in inputs)
        return moving, *cost.room(need * scale, FreeMemory(free * scale, below * scale), scaled(PINNED))

    here, there = measured(1), measured(unit)
    assert here[:2] == pytest.approx(there[:2])
    assert here[2] == there[2]


@given(seconds, st.integers(0, 50), st.integers(1, 8), st.floats(0.1, 10))
def test_more_work_never_means_less_waiting(work: float, tasks: int, threads: int, slowdown: float) -> None:
    waiting = cost.waiting(work, tasks, threads, slowdown)
    assert (waiting == 0) >= (tasks < threads)
    assert waiting <= cost.waiting(work * 2, tasks, threads, slowdown)
    assert waiting <= work * slowdown * (1 + 1e-9)


places = [("host", "1"), ("host", "2"), ("everywhere",)]
steps = st.lists(
    st.tuples(
        st.sampled_from("abcdefgh"),
        st.sampled_from(["put", "change", "change", "discard", "look"]),
        st.integers(0, 4),
    ),
    max_size=60,
)


@given(steps, st.integers(1, 8))
def test_the_least_loaded_are_those_that_a_scan_would_find(
    taken: list[tuple[str, str, int]], number: int
) -> None:
    loads: LoadIndex[str] = LoadIndex()
    known: dict[str, int] = {}  # in the order in which workers received their loads

    def compare() -> None:
        for place in places:
            inside = [w for w in known if place == places[2] or places[ord(w) % 2] == place]
            assert list(loads.least(place, number)) == sorted(inside, key=known.__getitem__)[:number]
            assert loads.lowest(place) == min((known[w] for w in inside), default=None)

    for worker, step, load in taken:
        home = places[ord(worker) % 2], places[2]
        if step == "look":
            compare()
        elif step == "discard":
            loads.discard(worker)
            known.pop(worker, None)
        elif step == "put":
            loads.put(worker, load, home)
        elif not loads.change(worker, load):
            continue
        if step in ("put", "change") and known.get(worker) != load:
            known.pop(worker, None)
            known[worker] = load
    compare()


def test_the_history_keeps_the_last_decision_of_the_last_keys() -> None:
    history = History(max_keys=2)
    slow, fast = candidate("slow", slowdown=2), candidate("fast")
    for key in ("x", "y", "x", "z"):
        history.add(key, "slow", [slow, fast])
    assert history.explain("y") == []
    assert [(row["worker"], row["chosen"], row["seconds"]) for row in history.explain("x")] == [
        ("fast", False, 1.0),
        ("slow", True, 2.0),
    ]


def terms(waiting: float = 1.0, moving: float = 1.0, fits: bool = True) -> Terms:
    return Terms(waiting, 1.0, moving, 0.0, fits)


@pytest.mark.parametrize(
    ("chosen", "next_best", "why"),
    [
        (terms(moving=0.5), terms(), "less to move than the next best, by 0.5 s"),
        (terms(waiting=0.0, moving=1.5), terms(), "shorter wait than the next best, by 1 s"),
        (terms(), terms(fits=False), "the only candidate with enough memory"),
        (terms(), terms(), "as good as the next best, with less load"),
        (terms(), None, "the only candidate"),
    ],
)
def test_the_last_decisions_say_what_told_the_worker_from_the_next(
    chosen: Terms, next_best: Terms | None, why: str
) -> None:
    history = History()
    others = [Candidate("other", next_best, load=1)] if next_best else []
    history.add("before", "a", [Candidate("a", terms())])
    history.add(("x", 1), "a", [*others, Candidate("a", chosen)])
    (row,) = history.latest(1)
    assert (row["key"], row["worker"], row["why"]) == ("('x', 1)", "a", why)
    assert (row["seconds"], row["candidates"]) == (chosen.seconds, 1 + len(others))
    assert [row["key"] for row in history.latest(5)] == ["('x', 1)", "before"]


# ---- routes ----------------------------------------------------------------------------


def test_what_transfers_show_counts_soon_where_there_are_few_workers() -> None:
    topology = Topology()
    for worker in "xyz":
        topology.add(worker, Place("host", by_tcp=True))
    routes = Routes(topology)
    for source, target in permutations("xyz", 2):
        before = routes.between(source, Tier.DEVICE, target)
    topology.observe("x", "y", 10**9, 10.0, by_comms=True)
    found = [routes.between("x", Tier.DEVICE, "y") for _ in range(400)]
    assert found[0] == before
    assert found[-1].seconds_per_byte > 5 * before.seconds_per_byte


class Asked(Topology):
    """Record the pairs of workers whose link is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    def way(self, source: str, target: str, by_comms: bool = False) -> tuple[Link, Speed]:
        self.asked.append((source, target))
        return super().way(source, target, by_comms)


def test_the_topology_is_asked_seldom_for_workers_whose_place_is_unknown() -> None:
    topology = Asked()
    routes = Routes(topology)
    for number in range(50_000):
        routes.between(f"a{number % 97}", Tier.DEVICE, f"b{number % 89}")
    assert len(topology.asked) < 50_000 / 4


def test_the_topology_is_asked_seldom_for_pairs_of_many_hosts() -> None:
    """A random graph on 512 workers needs a route for each pair about once."""
    topology, rng = Asked(), random.Random(0)
    workers = [f"w{number}" for number in range(512)]
    for number, worker in enumerate(workers):
        topology.add(worker, Place(f"host{number // 8}", f"gpu{number}", nvlink=f"host{number // 8}"))
    routes = Routes(topology)
    for _ in range(50_000):
        routes.between(rng.choice(workers), Tier.DEVICE, rng.choice(workers))
    assert len(topology.asked) < 50_000 / 20


@given(st.randoms(use_true_random=False), st.booleans())
def test_a_cached_route_is_that_of_its_pair(rng: random.Random, by_comms: bool) -> None:
    topology = Topology()
    for host in range(6):
        for number in range(rng.randint(1, 3)):
            topology.add(
                f"{host}-{number}",
                Place(
                    f"host{host}",
                    rng.choice([None, f"gpu{number}"]),
                    nvlink=rng.choice([None, "a", "b"]),
                    rdma=rng.random() < 0.5,
                    by_tcp=rng.random() < 0.5,
                ),
            )
    workers = [worker for host in range(6) for worker in topology.on_host(f"host{host}")]
    for one, other in (rng.sample(workers, 2) for _ in range(5)):
        topology.observe(one, other, 10**9, rng.choice([0.01, 10.0]), by_comms=by_comms)
    cached = Routes(topology, by_comms)
    for _ in range(60):
        one, other = rng.sample(workers, 2)
        assert cached.between(one, Tier.DEVICE, other) == Routes(topology, by_comms).between(
            one, Tier.DEVICE, other
        )
