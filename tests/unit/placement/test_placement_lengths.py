"""How long tasks take, by what is known of others; and what is expected on workers."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.behind import Behind
from dask_gpurt.placement.expected import Expected
from dask_gpurt.placement.lengths import LEAST, Lengths

sizes = st.lists(st.floats(1, 1e9), min_size=LEAST, max_size=40)


def learned(pairs: list[tuple[float, float]]) -> Lengths:
    lengths = Lengths()
    for nbytes, seconds in pairs:
        lengths.observe("x", nbytes, seconds)
    return lengths


def test_lengths_in_proportion_to_inputs_are_found() -> None:
    lengths = learned([(2.0**i, 3.0 * 2**i) for i in range(LEAST)])
    assert lengths.seconds("x", 1000.0) == pytest.approx(3000)
    assert lengths.mean("x") == pytest.approx(3 * (2**LEAST - 1) / LEAST)


def test_a_part_that_is_the_same_for_all_stays() -> None:
    lengths = learned([(i, 10.0 + i) for i in range(1, 3 * LEAST)])
    assert lengths.seconds("x", 0.0) == pytest.approx(10, rel=0.01)
    assert lengths.seconds("x", 100.0) == pytest.approx(110, rel=0.01)


@pytest.mark.parametrize(
    "pairs",
    [
        [(1.0, 1.0), (100.0, 100.0)],
        [(5.0, float(i)) for i in range(20)],
        [(float(i), 5.0) for i in range(20)],
        [(float(i), 20.0 - i) for i in range(20)],
        [(0.0, 0.0)] * 20,
    ],
    ids=["too few", "equal inputs", "equal lengths", "larger is shorter", "nothing"],
)
def test_nothing_is_said_where_inputs_do_not_tell_lengths(pairs: list[tuple[float, float]]) -> None:
    lengths = learned(pairs)
    assert lengths.mean("x") is None
    assert lengths.seconds("x", 50.0) is None


def test_chance_is_seldom_taken_for_a_rule() -> None:
    rng = random.Random(1)
    chance = [
        learned([(rng.lognormvariate(0, 1), rng.lognormvariate(0, 1)) for _ in range(20)]) for _ in range(500)
    ]
    assert sum(lengths.mean("x") is not None for lengths in chance) < 10


@given(sizes, st.floats(0, 10), st.floats(0, 1), st.integers(0, 10**6), st.integers(0, 10**10))
def test_no_length_is_farther_from_the_mean_than_its_inputs(
    nbytes: list[float], constant: float, noise: float, seed: int, asked: int
) -> None:
    rng = random.Random(seed)
    lengths = learned([(size, constant + size * rng.uniform(1 - noise, 1)) for size in nbytes])
    found, mean = lengths.seconds("x", asked), lengths.mean("x")
    assert (found is None) == (mean is None)
    if found is not None and mean is not None:
        proportional = mean * asked / lengths._known["x"].nbytes
        assert min(mean, proportional) * 0.999 <= found <= max(mean, proportional) * 1.001


keys = st.integers(0, 5)
steps = st.lists(
    st.one_of(
        st.tuples(keys, st.sampled_from("ab"), st.sampled_from("pq"), st.floats(-10, 10), st.floats(-1, 10)),
        keys,
    )
)


@given(steps)
def test_what_is_expected_is_the_sum_of_the_tasks_that_are(steps: list[object]) -> None:
    expected, model = Expected(), dict[object, tuple[str, str, float, float]]()
    for step in steps:
        if isinstance(step, tuple):
            expected.add(*step)
            model[step[0]] = step[1:]
        else:
            known = model.pop(step, None)
            assert expected.remove(step) == (known[0] if known else None)
    assert bool(expected) == bool(model)
    for worker in "ab":
        here = [known for known in model.values() if known[0] == worker]
        seconds: defaultdict[str, float] = defaultdict(float)
        for _, prefix, each, _ in here:
            seconds[prefix] += each
        found = expected.seconds(worker)
        assert all(found.get(prefix, 0.0) == pytest.approx(seconds[prefix], abs=1e-6) for prefix in "pq")
        assert expected.number(worker) == len(here)
        assert expected.weight(worker) == pytest.approx(sum(known[3] for known in here), abs=1e-6)
    assert expected.clear() == {known[0] for known in model.values()}
    assert not expected


parts = st.dictionaries(st.sampled_from("pq"), st.floats(0.1, 1))


@given(st.lists(st.one_of(st.tuples(keys, st.sampled_from("ab"), parts), keys)))
def test_what_waits_is_the_sum_of_what_waits_for_each_task(steps: list[object]) -> None:
    behind, model = Behind(), dict[object, tuple[str, dict[str, float]]]()
    for step in steps:
        if isinstance(step, tuple):
            behind.add(*step)
            model[step[0]] = step[1:]
        else:
            known = model.pop(step, None)
            assert behind.remove(step) == (known[0] if known else None)
    assert bool(behind) == bool(model)
    for worker in "ab":
        here = [waiting for where, waiting in model.values() if where == worker]
        for prefix in "pq":
            wanted = sum(waiting.get(prefix, 0.0) for waiting in here)
            assert behind.parts(worker).get(prefix, 0.0) == pytest.approx(wanted, abs=1e-6)
        assert behind.number(worker) == pytest.approx(sum(sum(each.values()) for each in here), abs=1e-6)
