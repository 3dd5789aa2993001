"""Compare an arena's blocks with sets of units: disjoint, merged when free, all returned."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.device.pool import ALIGNMENT, Arena, Extent, Ranges

UNITS = 40
ONE = st.tuples(st.just("one"), st.integers(0, 9))
PIECES = st.tuples(st.just("pieces"), st.integers(0, 25))
FREE = st.tuples(st.just("free"), st.integers(0, 100))
RANGE = st.tuples(st.integers(0, UNITS), st.integers(0, UNITS)).filter(lambda pair: pair[0] < pair[1])


class Checked:
    """Hold an arena and the units of its blocks, which are compared after each step."""

    def __init__(self, unit: int):
        self.unit = unit
        self.arena = Arena(UNITS * unit + unit - 1, unit)
        self.blocks: list[Extent] = []

    def take(self, blocks: list[Extent], asked: int) -> None:
        """Add new blocks with at least ``nbytes`` bytes in total, and less than a unit more."""
        before = self.taken()
        for offset, nbytes in blocks:
            assert self.arena.size(offset) == nbytes
            assert before.isdisjoint(range(offset // self.unit, (offset + nbytes) // self.unit))
        assert 0 <= sum(nbytes for _, nbytes in blocks) - asked < self.unit or asked == 0
        self.blocks += blocks

    def taken(self) -> set[int]:
        """Return the numbers of the units in blocks; asserts that each is in one block only."""
        units = [
            unit
            for offset, nbytes in self.blocks
            for unit in range(offset // self.unit, (offset + nbytes) // self.unit)
        ]
        assert len(units) == len(set(units))
        return set(units)

    def free_runs(self) -> list[tuple[int, int]]:
        return [(start // self.unit, stop // self.unit) for start, stop in self.arena.free_ranges()]

    def step(self, kind: str, number: int) -> None:
        nbytes, longest = number * self.unit, max((b - a for a, b in self.free_runs()), default=0)
        free = UNITS - len(self.taken())
        if kind == "one":
            offset = self.arena.allocate(nbytes)
            size = max(1, number)
            assert (offset is None) == (size > longest)
            if offset is not None:
                first = next(start for start, stop in self.free_before if stop - start >= size)
                assert offset == first * self.unit
                self.take([Extent(offset, size * self.unit)], nbytes)
        elif kind == "pieces":
            found = self.arena.allocate_pieces(nbytes)
            assert (found is None) == (number > free)
            if found is not None:
                assert len(found) == self.fewest(number)
                self.take(found, nbytes)
        elif self.blocks:
            self.arena.free(self.blocks.pop(number % len(self.blocks)).offset)

    def fewest(self, number: int) -> int:
        """Return the minimum number of free runs for this many units."""
        count = 0
        for length in sorted((stop - start for start, stop in self.free_before), reverse=True):
            if number <= 0:
                break
            number, count = number - length, count + 1
        return count

    def run(self, steps: list[tuple[str, int]]) -> None:
        for kind, number in steps:
            self.free_before = self.free_runs()
            self.step(kind, number)
            taken, free = self.taken(), self.free_runs()
            assert [unit for run in free for unit in range(*run)] == sorted(set(range(UNITS)) - taken)
            assert all(left[1] < right[0] for left, right in pairwise(free))  # merged
            assert self.arena.used == len(taken) * self.unit


units = st.sampled_from([ALIGNMENT, 7, 1])


@given(units, st.lists(st.one_of(ONE, PIECES, FREE), max_size=30), RANGE)
def test_blocks_never_overlap_and_all_of_them_come_back(
    unit: int, steps: list[tuple[str, int]], asked: tuple[int, int]
) -> None:
    checked = Checked(unit)
    arena = checked.arena
    assert arena.capacity == UNITS * unit
    checked.run(steps)
    expected = checked.taken().isdisjoint(range(*asked))
    assert arena.is_free(asked[0] * unit, asked[1] * unit) == expected
    for block in list(checked.blocks):
        arena.free(block.offset)
    assert (arena.used, list(arena.free_ranges())) == (0, [(0, arena.capacity)])
    assert arena.allocate_pieces(arena.capacity) == [(0, arena.capacity)]


def test_a_block_is_free_once() -> None:
    arena = Arena(4 * ALIGNMENT)
    offset = arena.allocate(1)
    assert offset == 0
    arena.free(offset)
    for missing in (offset, ALIGNMENT):
        with pytest.raises(KeyError):
            arena.free(missing)
        with pytest.raises(KeyError):
            arena.size(missing)


@pytest.mark.parametrize("capacity", [-1, 0, ALIGNMENT - 1])
def test_an_arena_of_less_than_a_unit_is_empty(capacity: int) -> None:
    arena = Arena(capacity)
    assert (arena.capacity, arena.allocate(1), arena.allocate_pieces(1)) == (0, None, None)
    assert (arena.allocate_pieces(0), list(arena.free_ranges()), arena.is_free(0, 1)) == ([], [], False)


# ---- ranges ------------------------------------------------------------------------------------------

END = 40
SPAN = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))


def numbers(ranges: list[tuple[int, int]]) -> list[int]:
    return [number for start, stop in ranges for number in range(start, stop)]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), SPAN)), SPAN)
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
