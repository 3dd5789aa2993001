"""Estimate how much slower than others a worker is, beyond noise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.placement.durations import FASTEST, MIN_DURATION_S, SLOWEST, WorkerSlowdown


def after(ratios: list[float], usual: float = 1.0) -> float:
    slowdown = WorkerSlowdown()
    for ratio in ratios:
        slowdown.observe("a", ratio * usual, usual)
    return slowdown.of("a")


def test_who_has_done_nothing_is_like_the_others() -> None:
    assert WorkerSlowdown().of("a") == 1
    assert after([3.0]) == 1  # one sample cannot tell a slow worker from a slow task


@pytest.mark.parametrize("slowdown", [0.5, 2.0, 4.0])
def test_a_worker_of_another_speed_is_soon_known(slowdown: float) -> None:
    chance = random.Random(0)
    assert after([slowdown * chance.uniform(0.95, 1.05) for _ in range(20)]) == pytest.approx(
        slowdown, rel=0.1
    )


def test_of_workers_that_are_alike_the_luckier_is_seldom_preferred() -> None:
    chance = random.Random(0)
    slowdowns = [after([chance.lognormvariate(0, 0.5) for _ in range(30)]) for _ in range(200)]
    assert sum(slowdown != 1 for slowdown in slowdowns) < 30
    assert all(0.75 < slowdown < 1.35 for slowdown in slowdowns)


def test_short_tasks_say_nothing_of_a_worker() -> None:
    assert after([4.0] * 20, usual=MIN_DURATION_S / 2) == 1


def test_who_is_forgotten_starts_anew() -> None:
    slowdown = WorkerSlowdown()
    for _ in range(5):
        slowdown.observe("a", 2.0, 1.0)
    assert slowdown.of("a") > 1
    slowdown.on_worker_removed("a")
    assert slowdown.of("a") == 1


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), max_size=40), st.floats(0.02, 100))
def test_units_do_not_matter_and_slow_is_the_opposite_of_fast(ratios: list[float], usual: float) -> None:
    slowdown = after(ratios)
    assert after(ratios, usual) == pytest.approx(slowdown)
    assert after([1 / ratio for ratio in ratios]) == pytest.approx(1 / slowdown)
    assert slowdown == pytest.approx(min(max(slowdown, FASTEST), SLOWEST))
