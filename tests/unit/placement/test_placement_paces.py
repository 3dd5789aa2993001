"""How much slower than others a worker is, told from chance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.placement.paces import FASTEST, SHORT, SLOWEST, Paces


def after(ratios: list[float], usual: float = 1.0) -> float:
    paces = Paces()
    for ratio in ratios:
        paces.observe("a", ratio * usual, usual)
    return paces.of("a")


def test_who_has_done_nothing_is_like_the_others() -> None:
    assert Paces().of("a") == 1
    assert after([3.0]) == 1  # nobody knows whether that was the worker or the task


@pytest.mark.parametrize("pace", [0.5, 2.0, 4.0])
def test_a_worker_of_another_speed_is_soon_known(pace: float) -> None:
    chance = random.Random(0)
    assert after([pace * chance.uniform(0.95, 1.05) for _ in range(20)]) == pytest.approx(pace, rel=0.1)


def test_of_workers_that_are_alike_the_luckier_is_seldom_preferred() -> None:
    chance = random.Random(0)
    paces = [after([chance.lognormvariate(0, 0.5) for _ in range(30)]) for _ in range(200)]
    assert sum(pace != 1 for pace in paces) < 30
    assert all(0.75 < pace < 1.35 for pace in paces)


def test_short_tasks_say_nothing_of_a_worker() -> None:
    assert after([4.0] * 20, usual=SHORT / 2) == 1


def test_who_is_forgotten_starts_anew() -> None:
    paces = Paces()
    for _ in range(5):
        paces.observe("a", 2.0, 1.0)
    assert paces.of("a") > 1
    paces.forget("a")
    assert paces.of("a") == 1


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), max_size=40), st.floats(0.02, 100))
def test_units_do_not_matter_and_slow_is_the_opposite_of_fast(ratios: list[float], usual: float) -> None:
    pace = after(ratios)
    assert after(ratios, usual) == pytest.approx(pace)
    assert after([1 / ratio for ratio in ratios]) == pytest.approx(1 / pace)
    assert pace == pytest.approx(min(max(pace, FASTEST), SLOWEST))
