"""Estimate ratios over a window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.topology.model import WindowedRatio

WINDOW = 5
amounts = st.floats(1e-3, 1e6)


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
