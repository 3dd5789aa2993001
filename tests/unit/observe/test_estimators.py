"""Estimate moments, lines and ratios over a window; change detection is tested with the governor."""

from __future__ import annotations

from statistics import fmean, pvariance, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.observe.estimators import (
    WINDOW_SAMPLES,
    MeanEstimate,
    RunningMoments,
    WindowedRatio,
)

WINDOW = 5
amounts = st.floats(1e-3, 1e6)
values = st.floats(-1e3, 1e3)


def moments(samples: list[float], window: int = WINDOW) -> RunningMoments:
    found = RunningMoments(window)
    for sample in samples:
        found.observe(sample)
    return found


@given(st.lists(values, min_size=1, max_size=WINDOW))
def test_within_the_window_moments_are_those_of_the_samples(samples: list[float]) -> None:
    found = moments(samples)
    assert (found.count, found.weight) == (len(samples), 1 / len(samples))
    assert found.mean == pytest.approx(fmean(samples), abs=1e-9)
    assert found.variance == pytest.approx(pvariance(samples), abs=1e-6)
    if len(samples) > 1:
        expected = (variance(samples) / len(samples)) ** 0.5
        assert found.standard_error == pytest.approx(expected, abs=1e-3)


@given(st.lists(values, min_size=WINDOW, max_size=4 * WINDOW), values)
def test_beyond_it_the_last_sample_keeps_its_weight(samples: list[float], last: float) -> None:
    found = moments(samples)
    before = found.mean
    assert found.observe(last) == last - before
    assert (found.count, found.weight) == (WINDOW, 1 / WINDOW)
    assert found.mean == pytest.approx(before + (last - before) / WINDOW)


@given(st.lists(amounts, min_size=1, max_size=3 * WINDOW))
def test_an_estimate_of_a_mean_has_the_same_moments(samples: list[float]) -> None:
    estimate, found = MeanEstimate(), moments(samples, WINDOW_SAMPLES)
    for sample in samples:
        estimate.add(sample)
    assert (estimate.count, estimate.mean) == (found.count, found.mean)
    assert estimate.scatter == found.variance * found.count
    again = MeanEstimate.of(estimate.plain())
    assert again.plain() == pytest.approx(estimate.plain(), rel=1e-15)


@given(st.lists(st.tuples(amounts, amounts), max_size=20), amounts, amounts)
def test_within_the_window_it_is_the_ratio_of_the_sums(
    pairs: list[tuple[float, float]], amount: float, measure: float
) -> None:
    estimate = WindowedRatio(amount, measure, 1e9)
    for pair in pairs:
        estimate.observe(*pair)
    sums = [sum(column) for column in zip((amount, measure), *pairs, strict=True)]
    assert estimate.ratio == pytest.approx(sums[0] / sums[1])
    assert estimate.ratio * estimate.inverse == pytest.approx(1.0)


@given(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=50))
def test_it_stays_among_the_ratios_that_were_seen(pairs: list[tuple[float, float]]) -> None:
    estimate = WindowedRatio(1.0, 1.0, 10.0)
    for pair in pairs:
        estimate.observe(*pair)
    seen = [1.0, *(amount / measure for amount, measure in pairs)]
    assert min(seen) * (1 - 1e-9) <= estimate.ratio <= max(seen) * (1 + 1e-9)


@pytest.mark.parametrize("piece", [0.1, 1.0])
def test_the_past_is_forgotten_by_size_and_not_by_number(piece: float) -> None:
    estimate = WindowedRatio(1.0 * 10.0, 10.0, 10.0)
    for _ in range(round(50 / piece)):
        estimate.observe(2.0 * piece, piece)
    # After five windows less than a hundredth of the difference is left, however it was split.
    assert 1.99 < estimate.ratio < 2.0
