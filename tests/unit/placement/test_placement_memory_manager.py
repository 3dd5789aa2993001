"""Run Dask's active memory manager with our choices: on bare states, and on running clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from distributed.active_memory_manager import (
    ActiveMemoryManagerExtension,
    ActiveMemoryManagerPolicy,
    ReduceReplicas,
    Suggestion,
)
from distributed.core import Status
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement import decisions as bare
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import Placement
from tests.helpers.placed_cluster import GB, Rooms

WORKERS = 12


class Suggest(ActiveMemoryManagerPolicy):
    """Make the suggestion of a test, as a policy."""

    def __init__(self, *suggestions: Suggestion):
        self.suggestions = suggestions
        self.answers: list[Any] = []

    def run(self) -> Iterator[Suggestion]:
        for suggestion in self.suggestions:
            self.answers.append((yield suggestion))


class Bare(bare.BareState):  # type: ignore[name-defined, misc]
    """Hold a state with an active memory manager, and record its requests to workers."""

    def __init__(self, workers: int = WORKERS):
        super().__init__(workers)
        self.addresses = list(self.workers)
        self.rooms, self.metrics = Rooms(), Metrics()
        for ws in self.workers.values():  # values that Dask's manager reads from heartbeats
            ws.metrics = {"memory": 0, "spilled_bytes": {"memory": 0, "disk": 0}}
        self.manager = ActiveMemoryManagerExtension(
            self, policies=set(), measure="managed", register=False, start=False
        )
        self.extensions["amm"] = self.manager
        self.placement = Placement(self, bare.topology_of(self), self.rooms, self.metrics)

    def data(self, key: str, *numbers: int, nbytes: int = GB) -> Any:
        ts = self.new_task(key, None, "released")
        ts.state = "memory"
        ts.set_nbytes(nbytes)
        for number in numbers:
            self.add_replica(ts, self.ws(number))
        return ts

    def ws(self, number: int) -> Any:
        return self.workers[self.addresses[number]]

    def pause(self, number: int) -> None:
        self.ws(number).status = Status.paused
        self.running.discard(self.ws(number))

    def suggest(self, *suggestions: tuple[Any, ...]) -> list[int | None]:
        """Return the workers that the manager chooses for several suggestions of one run."""
        policy = Suggest(*(Suggestion(*each) for each in suggestions))
        self.manager.policies = {policy}
        policy.manager = self.manager
        self.manager.run_once()
        return [ws and self.addresses.index(ws.address) for ws in policy.answers]

    def fallbacks(self) -> dict[str, Any]:
        return dict(self.metrics.snapshot()["fallbacks"])

    def request_acquire_replicas(self, address: str, keys: Any, *, stimulus_id: str) -> None:
        pass  # it has not arrived yet

    def request_remove_replicas(self, address: str, keys: Any, *, stimulus_id: str) -> None:
        for key in keys:
            self.remove_replica(self.tasks[key], self.workers[address])


@pytest.fixture
def state() -> Bare:
    """Make workers: 0 to 7 form one NVLink domain, the rest are on another host with RDMA."""
    state = Bare()
    state.placement.bind()
    return state


def test_replicas_go_where_there_is_room_over_the_cheapest_link(state: Bare) -> None:
    x = state.data("x", 2)
    state.rooms.free.update(dict.fromkeys(state.addresses[:8], 0.0))
    assert state.suggest(("replicate", x)) == [8]
    state.rooms.free[state.addresses[5]] = 2 * GB
    assert state.suggest(("replicate", x)) == [8]  # it was requested already
    assert state.suggest(("replicate", state.data("y", 2))) == [5]
    assert not state.fallbacks()


def test_what_is_handed_out_in_one_run_takes_room(state: Bare) -> None:
    inputs = [state.data(f"x{i}", 2) for i in range(8)]
    state.rooms.free.update(dict.fromkeys(state.addresses, 0.0))
    state.rooms.free.update({state.addresses[3]: 2.5 * GB, state.addresses[9]: 3.5 * GB})
    found = state.suggest(*(("replicate", ts) for ts in inputs))
    assert found == [3, 3, 9, 9, 9, None, None, None]
    assert state.metrics.snapshot()["counters"]["placement.replicas.refused"] == 3


def test_the_same_worker_is_asked_until_it_has_it(state: Bare) -> None:
    inputs = [state.data(f"x{i}", 2) for i in range(20)]
    first = state.suggest(*(("replicate", ts) for ts in inputs))
    for number in first[:3]:
        state.rooms.free[state.addresses[number]] = 40 * GB
    assert state.suggest(*(("replicate", ts) for ts in reversed(inputs))) == first[::-1]


def test_a_live_replica_on_a_full_device_goes_before_a_spilled_one(state: Bare) -> None:
    x = state.data("x", 1, 2)
    state.rooms.free.update(dict.fromkeys(state.addresses[:3], 0.0))
    state.rooms.tiers[state.addresses[1], "x"] = Tier.PINNED
    state.manager.policies = {ReduceReplicas()}
    next(iter(state.manager.policies)).manager = state.manager
    state.manager.run_once()
    assert x.who_has == {state.ws(1)}
    assert not state.fallbacks()


def test_room_that_is_made_in_a_run_counts(state: Bare) -> None:
    inputs = [state.data(f"x{i}", 1, 2) for i in range(6)]
    state.rooms.free.update({state.addresses[1]: 0.0, state.addresses[2]: 0.2 * GB})
    found = state.suggest(*(("drop", ts) for ts in inputs))
    assert sorted(found) == [1, 1, 1, 2, 2, 2]  # type: ignore[type-var]


def test_a_replica_beside_a_task_that_reads_it_stays(state: Bare) -> None:
    x = state.data("x", 1, 2)
    reader = state.new_task("reader", lambda: None, "processing")
    reader.add_dependency(x)
    x.waiters = {reader}
    reader.processing_on = state.ws(1)
    state.rooms.free[state.addresses[1]] = 0.0
    assert state.suggest(("drop", x)) == [2]


def test_the_replica_near_a_task_that_reads_it_elsewhere_stays(state: Bare) -> None:
    x = state.data("x", 1, 9)
    reader = state.new_task("reader", lambda: None, "processing")
    x.waiters = {reader}
    for number, expected in ((2, 9), (10, 1)):
        reader.processing_on = state.ws(number)
        assert state.suggest(("drop", x)) == [expected]
        state.add_replica(x, state.ws(expected))


def test_of_thousands_of_workers_a_few_are_looked_at_and_the_roomy_are_found() -> None:
    from time import process_time

    state = Bare(2048)
    state.placement.bind()
    state.rooms.free.update(dict.fromkeys(state.addresses, 0.0))
    state.rooms.free[state.addresses[1500]] = 3.5 * GB
    inputs = [state.data(f"x{i}", 2) for i in range(200)]
    began = process_time()
    found = state.suggest(*(("replicate", ts) for ts in inputs))
    assert process_time() - began < 2
    assert found == [1500] * 3 + [None] * 197
    everywhere = state.data("everywhere", *range(2048))
    began = process_time()
    assert None not in state.suggest(*[("drop", everywhere)] * 100)
    assert process_time() - began < 2
    assert not state.fallbacks()


def test_a_worker_that_has_not_told_spills_as_dask_does(state: Bare) -> None:
    x = state.data("x", 2)
    state.rooms.free.update(dict.fromkeys(state.addresses, 0.0))
    assert state.suggest(("replicate", x)) == [None]
    state.rooms.has_reported = lambda worker: worker != state.addresses[4]  # type: ignore[method-assign]
    assert state.suggest(("replicate", x)) == [4]


def test_an_exception_leaves_replicas_to_dask(state: Bare) -> None:
    x = state.data("x", 1, 2)
    state.rooms.tier = None  # type: ignore[method-assign, assignment]
    assert state.suggest(("drop", x)) != [None]
    assert state.suggest(("replicate", x)) != [None]
    known = state.fallbacks()
    assert known["placement._find_dropper"]["count"] == known["placement._find_recipient"]["count"] == 1


def test_a_signature_that_is_not_known_stays_with_dask() -> None:
    class Newer(ActiveMemoryManagerExtension):
        def _find_recipient(self, ts: Any, candidates: Any, pending_repl: Any, hint: Any = None) -> Any:
            return super()._find_recipient(ts, candidates, pending_repl)

    state = Bare()
    state.extensions["amm"] = manager = Newer(
        state, policies=set(), measure="managed", register=False, start=False
    )
    state.placement.bind()
    assert "_find_recipient" not in manager.__dict__
    assert "_find_dropper" in manager.__dict__
    assert "hint" in state.fallbacks()["placement._find_recipient"]["reason"]


numbers = st.sets(st.integers(0, WORKERS - 1), max_size=WORKERS - 1)
some = numbers.filter(bool)
kinds = st.sampled_from([Tier.DEVICE, Tier.PINNED, Tier.DISK])
situations = {
    "holders": some,
    "full": numbers,
    "paused": numbers,
    "candidates": st.none() | numbers,
    "tiers": st.lists(kinds, min_size=WORKERS, max_size=WORKERS),
    "drops": st.integers(0, WORKERS),
}


def made(holders: set[int], full: set[int], paused: set[int], tiers: list[Tier]) -> tuple[Bare, Any]:
    state = Bare()
    x = state.data("x", *holders)
    for number in paused:
        state.pause(number)
    for number, tier in enumerate(tiers):
        state.rooms.tiers[state.addresses[number], "x"] = tier
    state.rooms.free.update(dict.fromkeys((state.addresses[number] for number in full), 0.0))
    return state, x


@settings(max_examples=100, deadline=None)
@given(**situations)
def test_no_forbidden_worker_none_without_room_and_never_the_last_replica(
    holders: set[int],
    full: set[int],
    paused: set[int],
    candidates: set[int] | None,
    tiers: list[Tier],
    drops: int,
) -> None:
    def run() -> tuple[list[int | None], set[int]]:
        state, x = made(holders, full, paused, tiers)
        state.placement.bind()
        some = None if candidates is None else {state.ws(number) for number in candidates}
        found = state.suggest(("replicate", x, some), *[("drop", x, some)] * drops)
        assert not state.fallbacks()
        return found, {state.addresses.index(ws.address) for ws in x.who_has}

    (taker, *dropped), left = run()
    allowed = set(range(WORKERS)) if candidates is None else candidates
    able = allowed - paused - holders - full
    assert (taker in able) if able else taker is None
    gone = {number for number in dropped if number is not None}
    assert gone <= allowed & holders
    assert left == holders - gone
    assert left
    assert run() == ([taker, *dropped], left)


@settings(max_examples=50, deadline=None)
@given(**situations)
def test_switched_off_again_dask_chooses_replicas_as_shipped(
    holders: set[int],
    full: set[int],
    paused: set[int],
    candidates: set[int] | None,
    tiers: list[Tier],
    drops: int,
) -> None:
    def run(touch: Callable[[Bare], None]) -> list[int | None]:
        state, x = made(holders, full, paused, tiers)
        touch(state)
        assert not {"_find_recipient", "_find_dropper"} & state.manager.__dict__.keys()
        some = None if candidates is None else {state.ws(number) for number in candidates}
        return state.suggest(("replicate", x, some), *[("drop", x, some)] * drops)

    def on_and_off(state: Bare) -> None:
        state.placement.bind()
        assert "_find_recipient" in state.manager.__dict__
        state.placement.unbind()

    assert run(on_and_off) == run(lambda state: None)


# ---- on clusters -------------------------------------------------------------------------
