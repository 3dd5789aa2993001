"""Take turns in computing on threads of this process, ordered by events only."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

import pytest

from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.reads import turns as module
from dask_gpurt.reads.turns import Turns
from tests.helpers.waiting import LIMIT_S, until


class Crew:
    """Run threads that take turns, each at the test's command."""

    def __init__(self, turns: int):
        self.metrics = Metrics()
        self.left: set[threading.Thread] = set()
        self.turns = Turns(turns, self.left.__contains__, self.metrics)
        self.pool = ThreadPoolExecutor(8)

    def compute(self, ends: threading.Event) -> tuple[threading.Event, Future[None]]:
        """Make a thread take a turn until an event; returns the event that it has begun, and its end."""
        begun = threading.Event()

        def run() -> None:
            self.turns.take()
            begun.set()
            assert ends.wait(LIMIT_S)
            self.turns.give()

        return begun, self.pool.submit(run)

    def queue(self, length: int) -> None:
        """Wait until this many threads are queued."""
        until(lambda: len(self.turns._waiting) == length)


@pytest.mark.parametrize("turns", [1, 2])
def test_as_many_compute_as_there_are_turns_in_the_order_in_which_they_asked(turns: int) -> None:
    crew, go_on = Crew(turns), [threading.Event() for _ in range(4)]
    begun: list[tuple[threading.Event, Future[None]]] = []
    for number, event in enumerate(go_on):
        begun.append(crew.compute(event))
        if number < turns:
            assert begun[-1][0].wait(LIMIT_S)
        else:
            crew.queue(number + 1 - turns)
    for number in range(4 - turns):
        assert [one.is_set() for one, _ in begun] == [n < turns + number for n in range(4)]
        go_on[number].set()
        assert begun[turns + number][0].wait(LIMIT_S)
    for event in go_on:
        event.set()
    for _, end in begun:
        end.result(LIMIT_S)
    assert crew.metrics.snapshot()["counters"]["reads.seconds.waiting"] > 0


def test_a_thread_that_reads_has_no_turn_and_waits_for_one_afterwards() -> None:
    crew, read, done = Crew(1), threading.Event(), threading.Event()
    reading, other_ends = threading.Event(), threading.Event()

    def reader() -> None:
        crew.turns.take()
        with crew.turns.reading():
            reading.set()
            assert read.wait(LIMIT_S)
        done.set()
        crew.turns.give()

    end = crew.pool.submit(reader)
    assert reading.wait(LIMIT_S)
    begun, other = crew.compute(other_ends)
    assert begun.wait(LIMIT_S)
    read.set()
    crew.queue(1)
    assert not done.is_set()
    other_ends.set()
    end.result(LIMIT_S)
    other.result(LIMIT_S)
    counters = crew.metrics.snapshot()["counters"]
    assert 0 < counters["reads.seconds.beside"] <= counters["reads.seconds.reading"]


def test_a_read_that_fails_leaves_no_reader_behind() -> None:
    crew = Crew(1)
    crew.turns.take()
    with pytest.raises(OSError, match="gone"), crew.turns.reading():
        raise OSError("gone")
    assert threading.current_thread() in crew.turns._computing
    assert crew.turns._reading == 0
    crew.turns.give()
    assert not crew.turns._computing


def test_a_thread_that_has_left_the_pool_holds_nobody_up() -> None:
    crew, ends = Crew(1), threading.Event()
    begun, left = crew.compute(ends)
    assert begun.wait(LIMIT_S)
    next_ends = threading.Event()
    next_begun, following = crew.compute(next_ends)
    crew.queue(1)
    crew.left |= set(crew.turns._computing)
    assert next_begun.wait(LIMIT_S)
    ends.set()
    next_ends.set()
    left.result(LIMIT_S)
    following.result(LIMIT_S)


def test_nobody_waits_once_they_are_closed() -> None:
    crew, ends = Crew(1), threading.Event()
    begun, first = crew.compute(ends)
    assert begun.wait(LIMIT_S)
    next_begun, second = crew.compute(ends)
    crew.queue(1)
    crew.turns.close()
    assert next_begun.wait(LIMIT_S)
    ends.set()
    first.result(LIMIT_S)
    second.result(LIMIT_S)


@pytest.mark.parametrize("busy", [True, False])
def test_a_turn_of_which_nobody_makes_use_is_not_waited_for(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder computes, or waits; the next thread polls it several times."""
    monkeypatch.setattr(module, "TURN_PATIENCE_S", 1.0)
    crew, ends, begun, looked = Crew(1), threading.Event(), threading.Event(), threading.Event()
    look, looks = crew.turns._processor_seconds, count()

    def counted() -> dict[threading.Thread, float]:
        if next(looks) * module.LOOK_INTERVAL_S > 2 * module.TURN_PATIENCE_S:
            looked.set()
        return look()

    monkeypatch.setattr(crew.turns, "_processor_seconds", counted)

    def holder() -> None:
        crew.turns.take()
        begun.set()
        while busy and not ends.is_set():
            sum(range(10_000))
        assert ends.wait(LIMIT_S)
        crew.turns.give()

    first = crew.pool.submit(holder)
    assert begun.wait(LIMIT_S)
    next_begun, second = crew.compute(ends)
    if busy:
        assert looked.wait(LIMIT_S)
        assert not next_begun.is_set()
    else:
        assert next_begun.wait(LIMIT_S)
    ends.set()
    first.result(LIMIT_S)
    second.result(LIMIT_S)
    assert (Fallback.READS_OVERDUE.id in crew.metrics.snapshot()["fallbacks"]) is not busy
