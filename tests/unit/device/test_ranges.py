"""Compare ranges with sets of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.device.pool import Ranges

END = 40
RANGE = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))


def numbers(ranges: list[tuple[int, int]]) -> list[int]:
    return [number for start, stop in ranges for number in range(start, stop)]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), RANGE)), RANGE)
def test_ranges_are_a_set(steps: list[tuple[str, tuple[int, int]]], asked: tuple[int, int]) -> None:
    ranges, model = Ranges(), set[int]()
    for step, (start, stop) in steps:
        getattr(ranges, step)(start, stop)
        model = model | set(range(start, stop)) if step == "add" else model - set(range(start, stop))
    found = list(ranges)
    assert numbers(found) == sorted(model)
    assert ranges.total == len(model)
    assert all(left[1] < right[0] for left, right in pairwise(found))  # merged
    asked_for = range(*asked)
    assert numbers(ranges.within(*asked)) == [number for number in asked_for if number in model]
    assert numbers(ranges.gaps(*asked)) == [number for number in asked_for if number not in model]
    length = max(1, asked[0])
    starts = [start for start, stop in found if stop - start >= length]
    assert ranges.first(length) == (starts[0] if starts else None)
