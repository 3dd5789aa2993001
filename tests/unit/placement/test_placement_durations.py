"""Predict the durations of tasks from earlier ones, and track pending work on workers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.durations import MIN_TASKS, DurationModel
from dask_gpurt.placement.estimates import PendingWork

sizes = st.lists(st.floats(1, 1e9), min_size=MIN_TASKS, max_size=40)


def trained(pairs: list[tuple[float, float]]) -> DurationModel:
    model = DurationModel()
    for nbytes, seconds in pairs:
        model.observe("x", nbytes, seconds)
    return model


def test_lengths_in_proportion_to_inputs_are_found() -> None:
    model = trained([(2.0**i, 3.0 * 2**i) for i in range(MIN_TASKS)])
    assert model.predict("x", 1000.0) == pytest.approx(3000)
    assert model.mean("x") == pytest.approx(3 * (2**MIN_TASKS - 1) / MIN_TASKS)


def test_a_part_that_is_the_same_for_all_stays() -> None:
    model = trained([(i, 10.0 + i) for i in range(1, 3 * MIN_TASKS)])
    assert model.predict("x", 0.0) == pytest.approx(10, rel=0.01)
    assert model.predict("x", 100.0) == pytest.approx(110, rel=0.01)


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
    model = trained(pairs)
    assert model.mean("x") is None
    assert model.predict("x", 50.0) is None


def test_chance_is_seldom_taken_for_a_rule() -> None:
    rng = random.Random(1)
    chance = [
        trained([(rng.lognormvariate(0, 1), rng.lognormvariate(0, 1)) for _ in range(20)]) for _ in range(500)
    ]
    assert sum(model.mean("x") is not None for model in chance) < 10


@given(sizes, st.floats(0, 10), st.floats(0, 1), st.integers(0, 10**6), st.integers(0, 10**10))
def test_no_length_is_farther_from_the_mean_than_its_inputs(
    nbytes: list[float], constant: float, noise: float, seed: int, asked: int
) -> None:
    rng = random.Random(seed)
    model = trained([(size, constant + size * rng.uniform(1 - noise, 1)) for size in nbytes])
    found, mean = model.predict("x", asked), model.mean("x")
    assert (found is None) == (mean is None)
    if found is not None and mean is not None:
        proportional = mean * asked / model._prefixes["x"].x.mean
        assert min(mean, proportional) * 0.999 <= found <= max(mean, proportional) * 1.001


keys = st.integers(0, 5)
amounts = st.dictionaries(st.sampled_from("pq"), st.floats(-10, 10))
steps = st.lists(st.one_of(st.tuples(keys, st.sampled_from("ab"), amounts, st.floats(-1, 10)), keys))


@given(steps)
def test_pending_work_is_the_sum_of_its_entries(steps: list[object]) -> None:
    pending, model = PendingWork(), dict[object, tuple[str, dict[str, float], float]]()
    for step in steps:
        if isinstance(step, tuple):
            pending.add(*step)
            model[step[0]] = step[1:]
        else:
            known = model.pop(step, None)
            assert pending.remove(step) == (known[0] if known else None)
    assert bool(pending) == bool(model)
    for worker in "ab":
        here = [known for known in model.values() if known[0] == worker]
        found = pending.by_prefix(worker)
        for prefix in "pq":
            wanted = sum(by_prefix.get(prefix, 0.0) for _, by_prefix, _ in here)
            assert found.get(prefix, 0.0) == pytest.approx(wanted, abs=1e-6)
        assert pending.count(worker) == len(here)
        assert pending.tasks(worker) == pytest.approx(sum(tasks for _, _, tasks in here), abs=1e-6)
    assert pending.clear() == {known[0] for known in model.values()}
    assert not pending
    assert not any(pending.count(worker) or pending.by_prefix(worker) for worker in "ab")
