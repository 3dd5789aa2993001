"""Take turns in running user code: by a state machine, and on threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import data, integers

from dask_gpurt.observe import Metrics
from dask_gpurt.reads.turns import ClosedError, ComputeSlots, Turn
from tests.helpers.examples import examples
from tests.helpers.waiting import LIMIT_S, until


class Tasks(RuleBasedStateMachine):
    """Start, end, secede and rejoin tasks, beside a model: Dask's slots, filled in order of start."""

    def __init__(self) -> None:
        super().__init__()
        self.left: set[Any] = set()
        self.started = 0
        #: The tasks in their order, and those that run user code, which are the first ones.
        self.order: list[Turn] = []
        self.seceded: list[Turn] = []

    @initialize(count=integers(1, 3))
    def begin(self, count: int) -> None:
        self.count = count
        self.turns = ComputeSlots(count, self.left.__contains__, Metrics())

    @rule()
    def start(self) -> None:
        self.started += 1
        turn = Turn(self.started)
        self.turns.queue(turn)
        self.order.append(turn)

    @precondition(lambda self: self.order)
    @rule(data=data())
    def end(self, data: Any) -> None:
        """End any task: it has run, or was cancelled before."""
        turn = data.draw(integers(0, len(self.order) - 1))
        self.turns.end(self.order.pop(turn))

    @precondition(lambda self: self.order)
    @rule(data=data())
    def secede(self, data: Any) -> None:
        """Leave the pool, which nobody is notified of."""
        turn = self.order.pop(data.draw(integers(0, min(self.count, len(self.order)) - 1)))
        turn.thread, turn.was_held = threading.Thread(), True
        self.left.add(turn.thread)
        self.seceded.append(turn)
        self.turns.end(Turn("anyone"))  # looks

    @precondition(lambda self: self.seceded)
    @rule()
    def rejoin(self) -> None:
        """Rejoin the pool: behind those that run, before those that have not."""
        turn = self.seceded.pop()
        turn.thread = None
        self.turns.queue(turn)
        self.order.insert(min(self.count, len(self.order)), turn)

    @precondition(lambda self: self.order)
    @rule(data=data())
    def queue_twice(self, data: Any) -> None:
        self.turns.queue(self.order[data.draw(integers(0, len(self.order) - 1))])

    @invariant()
    def those_hold_a_turn_that_dask_would_run(self) -> None:
        if self.order:
            held = [turn.key for turn in self.order if self.turns.is_held(turn)]
            assert held == [turn.key for turn in self.order[: self.count]]


TestTasks = Tasks.TestCase
TestTasks.settings = examples(30, steps=40)


class Crew:
    """Run threads that take turns, each at the test's command."""

    def __init__(self, turns: int):
        self.metrics = Metrics()
        self.left: set[threading.Thread] = set()
        self.turns = ComputeSlots(turns, self.left.__contains__, self.metrics)
        self.pool = ThreadPoolExecutor(8)

    def compute(self, key: str) -> tuple[Turn, threading.Event, Any]:
        """Have a thread wait for a turn; return the turn, the event that it has it, and its end."""
        turn, begun = Turn(key), threading.Event()
        self.turns.queue(turn)

        def run() -> None:
            self.turns.wait(turn)
            begun.set()

        return turn, begun, self.pool.submit(run)


def test_a_task_waits_for_its_turn_until_an_earlier_one_ends() -> None:
    crew = Crew(1)
    first, begun, _ = crew.compute("first")
    assert begun.wait(LIMIT_S)
    _, second_begun, end = crew.compute("second")
    until(lambda: bool(crew.pool._work_queue.empty()))
    assert not second_begun.is_set()
    crew.turns.end(first)
    end.result(LIMIT_S)
    assert crew.metrics.snapshot()["counters"]["reads.seconds.waiting"] > 0


def test_a_task_keeps_the_turn_that_it_gets_while_it_reads() -> None:
    crew, reader = Crew(1), Turn("reader")
    crew.turns.queue(reader)
    with crew.turns.reading(reader):
        other, begun, end = crew.compute("other")
        assert crew.turns.is_held(reader)
    crew.turns.wait(reader)
    assert not begun.is_set()
    crew.turns.end(reader)
    end.result(LIMIT_S)
    assert crew.turns.is_held(other)


def test_reads_beside_a_task_that_computes_are_counted_also_if_they_fail() -> None:
    crew, reader = Crew(1), Turn("reader")
    _, begun, _ = crew.compute("computing")
    assert begun.wait(LIMIT_S)
    crew.turns.queue(reader)
    with pytest.raises(OSError, match="gone"), crew.turns.reading(reader):
        raise OSError("gone")
    counters = crew.metrics.snapshot()["counters"]
    assert counters["reads.seconds.beside"] > 0
    assert counters["reads.seconds.reading"] > 0
    assert not crew.turns._reading


def test_a_thread_that_leaves_the_pool_holds_nobody_up() -> None:
    crew = Crew(1)
    first, begun, _ = crew.compute("first")
    assert begun.wait(LIMIT_S)
    until(lambda: first.thread is not None)
    _, _, end = crew.compute("second")
    assert first.thread is not None
    crew.left.add(first.thread)
    end.result(LIMIT_S)


def test_who_waits_is_told_that_the_worker_closes() -> None:
    crew = Crew(1)
    first, begun, _ = crew.compute("first")
    assert begun.wait(LIMIT_S)
    _, second_begun, end = crew.compute("second")
    crew.turns.close()
    with pytest.raises(ClosedError, match="'second' was waiting"):
        end.result(LIMIT_S)
    assert not second_begun.is_set()
    assert crew.turns.is_held(first)
