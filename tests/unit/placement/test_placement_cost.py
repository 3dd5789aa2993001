"""Compute the cost of a task on a worker, and compare choices with those made by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement import cost
from dask_gpurt.placement.cost import Candidate, Route, Routes
from dask_gpurt.placement.strategy import LoadIndex
from dask_gpurt.topology import SHIPPED, Link, Place, Speed, Topology

GB = 10**9


def candidate(
    worker: str,
    *,
    work: float = 0,
    tasks: int = 0,
    threads: int = 1,
    running: float = 1,
    moves: float = 0,
    over: Link | None = None,
    fits: bool = True,
) -> Candidate:
    moving = SHIPPED[over].seconds(moves) if over is not None else 0.0
    return Candidate(worker, cost.waiting(work, tasks, threads), moving, running, fits, tasks / threads)


SITUATIONS = {
    "data stays where it is": [candidate("a"), candidate("b", moves=GB, over=Link.NVLINK)],
    "NVLink is worth it when the holder is busy": [
        candidate("a", moves=GB, over=Link.NVLINK),
        candidate("b", work=2, tasks=2),
    ],
    "TCP is not": [candidate("a", work=2, tasks=2), candidate("b", moves=8 * GB, over=Link.TCP)],
    "the same domain before another host": [
        candidate("a", moves=GB, over=Link.NVLINK),
        candidate("b", moves=GB, over=Link.RDMA),
    ],
    "room before time": [candidate("a", moves=8 * GB, over=Link.TCP), candidate("b", fits=False)],
    "a free thread before a queue": [
        candidate("a", work=3, tasks=3, threads=4),
        candidate("b", work=1, tasks=1),
    ],
}


@pytest.mark.parametrize("candidates", SITUATIONS.values(), ids=SITUATIONS)
def test_the_worker_that_a_person_would_pick(candidates: list[Candidate]) -> None:
    assert cost.best(candidates).worker == "a"
    assert cost.best(reversed(candidates)).worker == "a"


seconds = st.floats(0, 1e4)
amounts = st.floats(0, 1e12, allow_subnormal=False)
candidates = st.lists(
    st.builds(
        Candidate,
        st.text("abcdef", min_size=1),
        seconds,
        seconds,
        seconds,
        st.booleans(),
        st.floats(0, 100),
        amounts,
    ),
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
    assert cost.best(found).fits == any(one.fits for one in found)


steps = st.lists(
    st.tuples(
        st.sampled_from("abcdefgh"),
        st.sampled_from(["put", "put", "put", "discard", "look"]),
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
        assert list(loads.least(number)) == sorted(known, key=known.__getitem__)[:number]

    for worker, step, load in taken:
        if step == "look":
            compare()
        elif step == "discard":
            loads.discard(worker)
            known.pop(worker, None)
        elif known.get(worker) != load:
            loads.put(worker, load)
            known.pop(worker, None)
            known[worker] = load
    compare()


# ---- routes ----------------------------------------------------------------------------


def between(routes: Routes, source: str, target: str) -> Route:
    return routes.between(routes.end(source), routes.end(target))


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
        between(routes, f"a{number % 97}", f"b{number % 89}")
    assert len(topology.asked) < 50_000 / 4


@given(st.randoms(use_true_random=False))
def test_a_cached_route_is_that_of_its_pair(rng: random.Random) -> None:
    topology = Topology()
    for host in range(6):
        for number in range(rng.randint(1, 3)):
            topology.add(
                f"{host}-{number}",
                Place(
                    f"host{host}",
                    rng.choice([None, f"gpu{number}"]),
                    rdma=rng.random() < 0.5,
                    by_tcp=rng.random() < 0.5,
                ),
            )
    workers = [worker for host in range(6) for worker in topology.on_host(f"host{host}")]
    for one, other in (rng.sample(workers, 2) for _ in range(5)):
        topology.observe(one, other, 10**9, rng.choice([0.01, 10.0]), by_comms=True)
    cached = Routes(topology)
    for _ in range(20):
        one, other = rng.sample(workers, 2)
        assert between(cached, one, other) == between(Routes(topology), one, other)
