"""Verify the rows of benchmarks: lost, changed or misordered rows are errors."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.rows import check, fingerprint, make_random, totals

FRAME = make_random(0, 100, 50, "pandas")
SORTED = FRAME.sort_values("key", ignore_index=True)
WHOLE = totals([fingerprint(FRAME)])


def cut(frame: pd.DataFrame, *at: int) -> list[pd.DataFrame]:
    ends = [0, *sorted(at), len(frame)]
    return [frame.iloc[begin:end] for begin, end in itertools.pairwise(ends)]


@given(st.lists(st.integers(0, 100), max_size=5), st.integers(0, 2**32 - 1))
def test_rows_are_the_same_in_any_order_and_partitions(at: list[int], seed: int) -> None:
    shuffled = FRAME.sample(frac=1, random_state=seed)
    check([fingerprint(part) for part in cut(shuffled, *at)], WHOLE, sorts=False)


@given(st.lists(st.integers(0, 100), max_size=5))
def test_sorted_rows_are_in_order_however_they_are_cut(at: list[int]) -> None:
    check([fingerprint(part) for part in cut(SORTED, *at)], WHOLE, sorts=True)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (cut(SORTED.iloc[1:], 50), "rows and checksums"),
        (cut(SORTED.assign(payload=SORTED["payload"] + 1), 50), "rows and checksums"),
        (cut(SORTED, 50)[::-1], "order"),
        ([SORTED.iloc[:50], SORTED.iloc[50:][::-1]], "order"),
    ],
)
def test_invalid_rows_are_reported(parts: list[pd.DataFrame], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check([fingerprint(part) for part in parts], WHOLE, sorts=True)
