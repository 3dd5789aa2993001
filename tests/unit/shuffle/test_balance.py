"""Balance outputs: estimate their bytes from part of the inputs, and move as few as possible."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dask_gpurt.exchange.shard import Section
from dask_gpurt.shuffle.balance import (
    MAX_HEAVY,
    MIN_GAIN,
    MIN_GAIN_BYTES,
    InputSizes,
    OutputBytes,
    OwnerCapacity,
    WorkerSpeeds,
    balanced,
)

MIB = 2**20
WORKERS = ["a", "b", "c", "d"]


# ---- bytes of outputs ------------------------------------------------------------------


def input_of(sizes: dict[int, int], seconds: float = 1.0) -> InputSizes:
    """Return the sizes reported for an input that has these numbers of 8-byte rows for each output."""
    offsets = [0]
    for rows in sizes.values():
        offsets.append(offsets[-1] + rows)
    section = Section(tuple(sizes), tuple(offsets), 0, 8 * offsets[-1], b"")
    return InputSizes.of([section], len(sizes), seconds=seconds)


def test_an_input_tells_of_its_heavy_outputs_only() -> None:
    sizes = {output: 10 for output in range(100)} | {3: 500, 4: 12}
    told = input_of(sizes)
    assert told.nbytes == 8 * sum(sizes.values())
    assert told.heavy == {3: 4000}


def test_a_message_stays_small() -> None:
    told = input_of({output: 100 * (output < 100) for output in range(1000)})
    assert len(told.heavy) == MAX_HEAVY


def test_halves_of_an_input_count_together() -> None:
    half = Section((0, 1), (0, 30, 40), 0, 400, b"")
    told = InputSizes.of([half, half], 2)
    assert (told.nbytes, told.heavy) == (800, {0: 600})


def test_an_output_that_is_heavy_in_a_few_inputs_is_so_in_all() -> None:
    chance, outputs = random.Random(0), OutputBytes(range(32), 64)
    for source in range(8):
        rows = Counter(chance.choices(range(32), k=7000)) + Counter({5: 3000 + chance.randint(-50, 50)})
        outputs.add(source, input_of({output: rows[output] for output in range(32)}))
    found = outputs.estimate()
    whole = 64 * 8 * 10_000
    assert sum(found.values()) == pytest.approx(whole, rel=0.02)
    assert found[5] == pytest.approx((0.3 + 0.7 / 32) * whole, rel=0.05)
    assert found[6] == pytest.approx(0.7 / 32 * whole, rel=0.1)


def test_sorted_inputs_do_not_make_their_outputs_heavy() -> None:
    """Each output comes from one input: the first half of the inputs says nothing about later outputs."""
    outputs = OutputBytes(range(16), 16)
    for source in range(8):
        outputs.add(source, input_of({output: 1000 * (output == source) for output in range(16)}))
    found = outputs.estimate()
    assert max(found.values()) < 1.1 * min(found.values())


def test_once_all_inputs_are_known_nothing_is_estimated() -> None:
    outputs = OutputBytes(range(4), 2)
    for source, sizes in enumerate(({0: 70, 1: 10, 2: 10, 3: 10}, {0: 10, 1: 70, 2: 10, 3: 10})):
        outputs.add(source, input_of(sizes))
    assert outputs.estimate() == pytest.approx({0: 640, 1: 640, 2: 160, 3: 160})


def test_an_input_that_is_transferred_again_counts_once() -> None:
    outputs = OutputBytes(range(4), 2)
    for _ in range(3):
        outputs.add(0, input_of({0: 70, 1: 10, 2: 10, 3: 10}))
    outputs.add(1, input_of({0: 70, 1: 10, 2: 10, 3: 10}))
    assert len(outputs) == 2
    assert outputs.estimate()[0] == pytest.approx(2 * 8 * 70)


def test_of_nothing_nothing_is_known() -> None:
    outputs = OutputBytes(range(4), 2)
    assert outputs.estimate() == dict.fromkeys(range(4), 0.0)
    outputs.add(0, input_of(dict.fromkeys(range(4), 0)))
    assert outputs.estimate() == dict.fromkeys(range(4), 0.0)


# ---- speeds ----------------------------------------------------------------------------


def speed_after(seconds: list[float], usual: float = 0.02, before: Sequence[float] = ()) -> float:
    """Return the estimated speed in a run with transfers of these durations, after a previous run."""
    speeds = WorkerSpeeds()
    for run, each in [(0, each) for each in before] + [(1, each) for each in seconds]:
        speeds.observe("a", each, usual, run)
    return speeds.of("a", {1})


def test_a_worker_is_as_fast_as_usual_until_it_shows() -> None:
    assert WorkerSpeeds().of("a", {1}) == 1
    assert speed_after([0.04, 0.04]) == 1
    assert speed_after([0.04] * 4) == pytest.approx(0.5)
    assert speed_after([0.01] * 4) == pytest.approx(2.0)
    assert speed_after([0.0004] * 4, 0.0002) == 1, "so short transfers tell little"


def test_a_worker_that_is_stopped_half_of_the_time_is_found_slow() -> None:
    """For 20 ms of 40: a transfer of 12 ms takes 12 or 32."""
    chance = random.Random(0)
    speeds = [
        speed_after([chance.choice([0.012, 0.032, 0.032]) for _ in range(16)], 0.012) for _ in range(99)
    ]
    assert all(0.4 < speed < 0.9 for speed in speeds)


def test_of_equal_workers_none_is_preferred_by_chance() -> None:
    chance = random.Random(0)
    speeds = [speed_after([0.02 * chance.lognormvariate(0, 0.5) for _ in range(16)]) for _ in range(200)]
    assert all(0.7 < speed < 1 / 0.7 for speed in speeds)


def test_a_worker_that_has_left_is_forgotten() -> None:
    speeds = WorkerSpeeds()
    for _ in range(9):
        speeds.observe("a", 1.0, 0.1, 1)
    assert speeds.of("a", {1}) < 0.2
    speeds.on_worker_removed("a")
    assert speeds.of("a", {1}) == 1


def test_a_worker_that_was_slow_counts_as_slow_once_a_run_confirms_it() -> None:
    slow = [0.04] * 32
    assert speed_after([], before=slow) == 1
    assert speed_after([0.04, 0.04], before=slow) == 1, "too few to tell"
    assert speed_after([0.04] * 3, before=slow) == pytest.approx(0.5)
    assert speed_after([0.03] * 3, before=slow) == pytest.approx(2 / 3), "it is faster than it was"


def test_transfers_that_take_no_time_tell_nothing() -> None:
    assert speed_after([0.0] * 3, 0.0) == 1


def test_a_worker_that_becomes_slow_is_found_so_whatever_it_was_before() -> None:
    """Stopped for 20 ms of 40 after runs at full speed, which must not raise the estimate."""
    chance = random.Random(0)
    for _ in range(99):
        seconds = [chance.choice([0.012, 0.032, 0.032]) for _ in range(12)]
        assert speed_after(seconds, 0.012, before=[0.012] * 32) == speed_after(seconds, 0.012) < 0.95


@given(factor=st.floats(0.8, 1.0), number=st.integers(3, 8))
def test_a_worker_that_was_slow_and_is_not_any_more_keeps_its_outputs(factor: float, number: int) -> None:
    """Even right after it was slow, and with transfers slightly slower than the usual ones."""
    speed = speed_after([0.02 / factor] * number, before=[0.04] * 32)
    assert factor * 0.999 <= speed <= 1
    nbytes = dict.fromkeys(range(32), 10.0 * MIB)
    assert not balanced(nbytes, dealt(32), capacities(a=speed)).to


# ---- owners ----------------------------------------------------------------------------


def dealt(outputs: int, workers: list[str] = WORKERS) -> dict[int, str]:
    """Return the owners that a run begins with."""
    return {output: workers[output * len(workers) // outputs] for output in range(outputs)}


def loads(nbytes: dict[int, float], owners: dict[int, str]) -> dict[str, float]:
    found = defaultdict[str, float](float)
    for output, owner in owners.items():
        found[owner] += nbytes[output]
    return found


def capacities(**speeds: float) -> list[OwnerCapacity]:
    return [OwnerCapacity(worker, speed=speeds.get(worker, 1.0)) for worker in WORKERS]


@given(
    outputs=st.integers(1, 200),
    workers=st.integers(1, 12),
    size=st.floats(0, 1e12),
    spread=st.floats(0, 0.15),
    seed=st.integers(0, 99),
)
def test_even_outputs_never_move(outputs: int, workers: int, size: float, spread: float, seed: int) -> None:
    chance = random.Random(seed)
    outputs *= workers  # as many for each
    nbytes = {output: size * chance.uniform(1 - spread / 2, 1 + spread / 2) for output in range(outputs)}
    names = [str(worker) for worker in range(workers)]
    assert not balanced(nbytes, dealt(outputs, names), [OwnerCapacity(name) for name in names]).to


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[int, float], dict[int, str], list[OwnerCapacity]]:
    names = [str(worker) for worker in range(draw(st.integers(1, 6)))]
    sizes = draw(st.lists(st.floats(0, 100 * MIB), min_size=1, max_size=40))
    owners = {output: draw(st.sampled_from(names)) for output in range(len(sizes))}
    found = [
        OwnerCapacity(
            name,
            draw(st.sampled_from([1.0, 2.0, 4.0])),
            draw(st.sampled_from([0.25, 0.5, 1.0])),
            draw(st.sampled_from([0.0, 50.0 * MIB, float("inf")])),
        )
        for name in names
    ]
    return dict(enumerate(sizes)), owners, found


def end(nbytes: dict[int, float], owners: dict[int, str], workers: list[OwnerCapacity]) -> float:
    """Return when the last worker is done."""
    ends = []
    for worker in workers:
        mine = [nbytes[output] for output, owner in owners.items() if owner == worker.worker]
        ends.append(max([sum(mine) / worker.threads, *mine]) / worker.speed)
    return max(ends)


@given(cluster=clusters())
@settings(max_examples=300)
def test_a_move_makes_the_last_worker_earlier_and_none_overfull(
    cluster: tuple[dict[int, float], dict[int, str], list[OwnerCapacity]],
) -> None:
    nbytes, owners, workers = cluster
    moves = balanced(nbytes, owners, workers)
    assert all(owners[output] != worker for output, worker in moves.to.items())
    taken = loads(nbytes, moves.to)
    assert all(taken[worker.worker] <= worker.room * (1 + 1e-9) for worker in workers)
    if moves.to:
        before, after = end(nbytes, owners, workers), end(nbytes, {**owners, **moves.to}, workers)
        assert (moves.before, moves.after) == pytest.approx((before, after))
        assert before >= MIN_GAIN * after * (1 - 1e-9)
        assert before - after >= MIN_GAIN_BYTES * (1 - 1e-9)


@given(cluster=clusters())
def test_balanced_outputs_stay(
    cluster: tuple[dict[int, float], dict[int, str], list[OwnerCapacity]],
) -> None:
    """Giving away the largest outputs first is not optimal, but within a factor of two."""
    nbytes, owners, workers = cluster
    workers = [worker._replace(room=float("inf")) for worker in workers]
    moves = balanced(nbytes, owners, workers)
    assume(moves.to)
    assert not balanced(nbytes, {**owners, **moves.to}, workers, gain=2.0).to


def test_the_owner_of_a_heavy_output_gives_the_others_away() -> None:
    nbytes = {output: 10.0 * MIB for output in range(32)} | {5: 144.0 * MIB}
    owners = dealt(32)
    moves = balanced(nbytes, owners, capacities())
    assert 5 not in moves.to
    assert set(moves.to) <= {output for output, owner in owners.items() if owner == "a"}
    found = loads(nbytes, {**owners, **moves.to})
    assert found["a"] <= 1.04 * 144 * MIB
    assert max(found[worker] for worker in "bcd") <= 110 * MIB, "they share what it gives away"


def test_neighbours_stay_together() -> None:
    nbytes = {output: MIB * (10.0 if output < 25 else 1.0) for output in range(100)}
    moves = balanced(nbytes, dealt(100), capacities())
    order = [moves.to[output] for output in sorted(moves.to)]
    changes = sum(one != other for one, other in pairwise(order))
    assert changes <= len(set(order))


def test_a_slow_worker_has_fewer() -> None:
    nbytes = dict.fromkeys(range(32), 10.0 * MIB)
    moves = balanced(nbytes, dealt(32), capacities(a=0.5))
    found = loads(nbytes, {**dealt(32), **moves.to})
    assert found["a"] in (40 * MIB, 50 * MIB)
    assert max(found.values()) <= 100 * MIB
    assert len(moves.to) in (3, 4)


def test_a_heavy_output_leaves_a_slow_worker() -> None:
    nbytes = dict.fromkeys(range(8), 1.0 * MIB) | {0: 100.0 * MIB}
    moves = balanced(nbytes, dealt(8), capacities(a=0.5))
    assert set(moves.to) == {0}


def test_one_heavy_output_alone_can_not_be_helped() -> None:
    assert not balanced({0: 100.0 * MIB, 1: MIB, 2: MIB, 3: MIB}, dealt(4), capacities()).to


def test_threads_put_outputs_together_beside_each_other() -> None:
    """Four threads finish a heavy output and three light ones as soon as the heavy one alone."""
    nbytes = {0: 100.0 * MIB, 1: 50.0 * MIB, 2: 50.0 * MIB, 3: 50.0 * MIB, 4: MIB, 5: MIB, 6: MIB, 7: MIB}
    owners = dealt(8, ["a", "b"])
    assert not balanced(nbytes, owners, [OwnerCapacity("a", 4.0), OwnerCapacity("b", 4.0)]).to
    assert balanced(nbytes, owners, [OwnerCapacity("a"), OwnerCapacity("b")]).to


def test_little_is_not_worth_a_move() -> None:
    nbytes = {output: MIN_GAIN_BYTES / 100 for output in range(8)} | {0: MIN_GAIN_BYTES / 2}
    assert not balanced(nbytes, dealt(8), capacities()).to


def test_a_worker_without_room_takes_nothing() -> None:
    nbytes = {output: 10.0 * MIB for output in range(32)} | {5: 144.0 * MIB}
    rooms = {"a": math.inf, "b": 0.0, "c": 25.0 * MIB, "d": math.inf}
    workers = [OwnerCapacity(worker, room=room) for worker, room in rooms.items()]
    given_to = Counter(balanced(nbytes, dealt(32), workers).to.values())
    assert given_to["d"]
    assert not given_to["b"]
    assert given_to["c"] <= 2


def test_many_outputs_and_workers() -> None:
    chance = random.Random(0)
    names = [str(worker) for worker in range(128)]
    nbytes = {output: MIB * chance.lognormvariate(0, 1.2) for output in range(4096)}
    owners = dealt(4096, names)
    moves = balanced(nbytes, owners, [OwnerCapacity(name) for name in names])
    ideal = max(sum(nbytes.values()) / 128, max(nbytes.values()))
    assert moves.after <= 1.05 * ideal < moves.before
