"""Ranges, and the free parts of an arena, against sets of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.device.arena import ALIGNMENT, Arena
from dask_gpurt.device.ranges import Ranges

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


@given(st.lists(st.integers(0, 9)), RANGE)
def test_free_ranges_are_where_no_block_is(steps: list[int], asked: tuple[int, int]) -> None:
    """A step cuts a block of so many units, or frees the oldest."""
    arena, blocks = Arena(END * ALIGNMENT), list[tuple[int, int]]()
    for units in steps:
        if units:
            offset = arena.allocate(units * ALIGNMENT)
            blocks += [] if offset is None else [(offset // ALIGNMENT, offset // ALIGNMENT + units)]
        elif blocks:
            arena.free(blocks.pop(0)[0] * ALIGNMENT)
    taken = set(numbers(blocks))
    free = [(start // ALIGNMENT, stop // ALIGNMENT) for start, stop in arena.free_ranges()]
    assert numbers(free) == [number for number in range(END) if number not in taken]
    if asked[0] < asked[1]:
        expected = taken.isdisjoint(range(*asked))
        assert arena.is_free(asked[0] * ALIGNMENT, asked[1] * ALIGNMENT) == expected
