"""Retry work that runs out of memory, then split it: the rule alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.shuffle.splitting import MAX_HALVINGS, split_and_retry

Rows = range


def halves(rows: Rows) -> Sequence[Rows]:
    middle = len(rows) // 2
    return (rows[:middle], rows[middle:]) if middle else ()


class Worker:
    """Record the rule's calls; ``fits`` takes the number of the attempt and its rows."""

    def __init__(self, fits: Callable[[int, Rows], bool]):
        self._fits = fits
        self.attempts: list[Rows] = []
        self.rooms = 0
        self.splits = 0

    def work(self, rows: Rows) -> list[int]:
        self.attempts.append(rows)
        if not self._fits(len(self.attempts) - 1, rows):
            raise MemoryError(f"{len(rows)} rows")
        return list(rows)

    def make_room(self) -> None:
        self.rooms += 1

    def on_split(self, error: MemoryError) -> None:
        self.splits += 1

    def run(self, rows: Rows) -> list[list[int]]:
        how = {"halve": halves, "make_room": self.make_room, "on_split": self.on_split}
        return list(split_and_retry(self.work, rows, **how))


@given(rows=st.integers(0, 3000), capacity=st.integers(0, 3000))
def test_parts_are_no_smaller_than_needed_and_in_order(rows: int, capacity: int) -> None:
    worker = Worker(lambda _, part: len(part) <= capacity)
    smallest = rows >> MAX_HALVINGS  # or one more, since halves of odd numbers differ
    if capacity < max(1, smallest):
        with pytest.raises(MemoryError):
            worker.run(Rows(max(1, rows)))
        assert len(worker.attempts) <= MAX_HALVINGS + 2
        return
    if smallest <= capacity <= smallest + 1 and rows > capacity:
        return  # depends on the position of odd halves
    parts = worker.run(Rows(rows))
    assert [row for part in parts for row in part] == list(range(rows))
    assert all(len(part) <= capacity for part in parts)
    assert worker.splits == len(parts) - 1
    assert len(parts) == 1 or all(2 * len(part) + 1 > capacity // 2 for part in parts)


@given(rows=st.integers(1, 500), failing=st.sets(st.integers(0, 12)))
def test_whatever_attempts_fail_all_is_done_once_or_it_is_given_up(rows: int, failing: set[int]) -> None:
    worker = Worker(lambda attempt, _: attempt not in failing)
    try:
        parts = worker.run(Rows(rows))
    except MemoryError:
        assert len(failing) > 1, "room is made before anything is given up"
        return
    assert [row for part in parts for row in part] == list(range(rows))
    assert worker.splits == len(parts) - 1
    assert (worker.rooms > 0) == (not failing.isdisjoint(range(len(worker.attempts))))


class Held:
    """Hold memory, as work does."""


def test_a_failed_attempt_holds_nothing_when_room_is_made() -> None:
    held: list[weakref.ref[Held]] = []
    alive: list[bool] = []

    def work(rows: Rows) -> int:
        mine = Held()
        held.append(weakref.ref(mine))
        try:
            raise ValueError("as of a library that has its own errors")
        except ValueError as error:
            raise MemoryError from error

    def make_room() -> None:
        alive.append(any(each() for each in held))

    with pytest.raises(MemoryError):
        list(split_and_retry(work, Rows(4), halve=halves, make_room=make_room, on_split=lambda _: None))
    assert alive == [False] * len(alive)
    assert len(alive) == len(held) - 1 == 3


def test_a_part_is_begun_when_the_one_before_has_been_used() -> None:
    worker = Worker(lambda _, part: len(part) <= 2)
    how = {"halve": halves, "make_room": worker.make_room, "on_split": worker.on_split}
    parts = split_and_retry(worker.work, Rows(4), **how)
    assert next(parts) == [0, 1]
    assert worker.attempts == [Rows(4), Rows(4), Rows(2)]
    assert list(parts) == [[2, 3]]


class TooLarge(Exception):
    """Fail in a way that freeing memory cannot cure."""


def test_work_that_is_too_large_is_split_until_it_fits() -> None:
    attempts: list[Rows] = []

    def work(rows: Rows) -> list[int]:
        attempts.append(rows)
        if len(rows) > 1:
            raise TooLarge
        return list(rows)

    def never(*_: object) -> None:
        raise AssertionError("memory was not short")

    rows = Rows(2 << MAX_HALVINGS)
    how = {"halve": halves, "make_room": never, "on_split": never}
    assert list(split_and_retry(work, rows, **how, too_large=(TooLarge,))) == [[row] for row in rows]
    assert len(attempts) == 2 * len(rows) - 1


class ChangedNothing(MemoryError):
    """Fail without side effects, so that work can be retried."""


@pytest.mark.parametrize("error", [MemoryError, ChangedNothing])
def test_work_that_may_have_changed_something_is_not_tried_again(error: type[MemoryError]) -> None:
    attempts: list[Rows] = []

    def work(rows: Rows) -> int:
        attempts.append(rows)
        raise error

    how = {"halve": lambda _: (), "make_room": lambda: None, "on_split": print}
    with pytest.raises(error):
        list(split_and_retry(work, Rows(4), **how, short=ChangedNothing))
    assert len(attempts) == (2 if error is ChangedNothing else 1)
