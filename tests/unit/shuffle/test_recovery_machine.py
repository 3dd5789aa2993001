"""Redo only what was lost, and deliver each row exactly once, under Dask's own scheduler.

In this state machine Dask's scheduler and the state machines of its workers run shuffles and joins, and
hypothesis draws what happens next: which message arrives, which task or thread goes on, which timer ends;
which message or answer is lost, and which call is given up; which allocations fail; which worker is killed,
replaced at the same address, closed, retired, cut off, or joins; which outputs move, are no longer wanted, or
are wanted again. In the end the results are computed without further faults: then every row has arrived once,
nothing is held, no task waits, and no result was made again that was not lost.

A failing example fails again with the same `PYTHONHASHSEED`, on which the order of Dask's sets depends.
"""

from __future__ import annotations

from typing import Any

from distributed.core import Status
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.helpers.allocations import nth_fails
from tests.helpers.computations import Computation
from tests.helpers.examples import examples
from tests.helpers.stepwise import StepwiseCluster

#: Bytes of a pool: room for some shards, or for all.
SMALL, LARGE = 2**12, 2**17
MOST_WORKERS = 4
#: The shuffles, and whether the tasks of outputs read both.
SHAPES = [(("left",), False), (("left", "right"), True), (("left", "right"), False)]
numbers = st.integers(0, 30)
#: What happens before a step: each number picks one of the events that are possible then.
events = st.lists(numbers, max_size=10)
outputs = st.sets(st.integers(0, Computation.OUTPUTS - 1), min_size=1)


def _may_break(self: Recovers) -> bool:
    """Return whether an example has faults left; those of messages do not count."""
    return self.faults > 0


class Recovers(RuleBasedStateMachine):
    """Drive a cluster whose every step is drawn by hypothesis."""

    @initialize(
        pool=st.sampled_from([SMALL, LARGE]),
        paths=st.sampled_from([("shared-memory", "comms"), ("comms",)]),
        shape=st.sampled_from(SHAPES),
        reduced=st.booleans(),
        workers=st.integers(2, 3),
        retries=st.sampled_from([1, 10]),
        faults=st.integers(0, 5),
    )
    def begins(
        self, pool: int, paths: Any, shape: Any, reduced: bool, workers: int, retries: int, faults: int
    ) -> None:
        computation = Computation(shape[0], joined=shape[1], reduced=reduced)
        self.cluster = StepwiseCluster(computation, workers=workers, retries=retries, pool=pool, paths=paths)
        self.faults = faults

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        try:
            self.cluster.finish()
        finally:
            self.cluster.close()

    def _go_on(self, picks: list[int]) -> None:
        for pick in picks:
            if possible := self.cluster.events():
                self.cluster.happen(possible[pick % len(possible)])

    def _break(self, before: list[int]) -> None:
        """Let events happen before a fault, and count it."""
        self._go_on(before)
        self.faults -= 1

    @rule(before=events)
    def go_on(self, before: list[int]) -> None:
        self._go_on(before)
        self.cluster.all_happen()

    # ---- messages --------------------------------------------------------------------

    @rule(before=events, which=numbers)
    def lose(self, before: list[int], which: int) -> None:
        self._go_on(before)
        if messages := self.cluster.unreliable_messages():
            self.cluster.lose(messages[which % len(messages)])

    @rule(before=events, which=numbers)
    def lose_answer(self, before: list[int], which: int) -> None:
        self._go_on(before)
        if messages := self.cluster.unreliable_messages():
            self.cluster.lose_answer(messages[which % len(messages)])

    @rule(before=events, which=numbers)
    def give_up(self, before: list[int], which: int) -> None:
        """End a call to a silent worker, which handles the message later."""
        self._go_on(before)
        if messages := self.cluster.awaited_messages():
            self.cluster.give_up(messages[which % len(messages)])

    # ---- memory ----------------------------------------------------------------------

    @rule(before=events, first=st.integers(0, 20), times=st.integers(1, 12))
    def transfer_with_little_memory(self, before: list[int], first: int, times: int) -> None:
        """Fail some allocations of the next transfer: it is split, or fails in the middle."""
        self._go_on(before)
        self.cluster.computation.fails = nth_fails(first, times)

    @precondition(_may_break)
    @rule(before=events, where=numbers)
    def owner_without_memory(self, before: list[int], where: int) -> None:
        """Let a worker run out of memory when it takes its next shard: the run fails at the producer."""
        self._break(before)
        if alive := self.cluster.alive():
            self.cluster.fail_next_offer(alive[where % len(alive)])

    # ---- workers ---------------------------------------------------------------------

    @precondition(_may_break)
    @rule(before=events, where=numbers)
    def kill(self, before: list[int], where: int) -> None:
        self._break(before)
        if len(alive := self.cluster.alive()) > 1:
            self.cluster.kill(alive[where % len(alive)])

    @precondition(lambda self: len(self.cluster.alive()) < MOST_WORKERS)
    @rule(before=events, replaces=st.booleans())
    def start(self, before: list[int], replaces: bool) -> None:
        """Start a worker, at the address of one that has left or at a new one."""
        self._go_on(before)
        self.cluster.start(replaces=replaces)

    @precondition(_may_break)
    @rule(before=events, where=numbers)
    def close(self, before: list[int], where: int) -> None:
        self._break(before)
        if len(workers := self.cluster.workers()) > 1:
            self.cluster.do(workers[where % len(workers)].close_down())

    @precondition(_may_break)
    @rule(before=events, where=numbers)
    def retire(self, before: list[int], where: int) -> None:
        self._break(before)
        if len(running := self.cluster.workers(Status.running)) > 1:
            self.cluster.call(self.cluster.scheduler.retire, running[where % len(running)])

    @precondition(_may_break)
    @rule(before=events, where=numbers)
    def cut_off(self, before: list[int], where: int) -> None:
        """Remove a worker that is alive: its connection to the scheduler has broken."""
        self._break(before)
        if len(workers := self.cluster.workers()) > 1:
            self.cluster.cut_off(workers[where % len(workers)])

    # ---- outputs ---------------------------------------------------------------------

    @rule(before=events, which=outputs, where=numbers)
    def balance(self, before: list[int], which: set[int], where: int) -> None:
        """Move outputs to another worker, as after their sizes are known."""
        self._go_on(before)
        self.cluster.call(self.cluster.scheduler.balance, which, where)

    @precondition(_may_break)
    @rule(before=events, which=st.sets(st.integers(0, 2 * Computation.OUTPUTS - 1)))
    def want(self, before: list[int], which: set[int]) -> None:
        """Release some results, and ask for all others again."""
        self._break(before)
        wanted = self.cluster.computation.wanted
        released = [wanted[number % len(wanted)] for number in sorted(which)]
        others = [key for key in wanted if key not in released]
        self.cluster.call(self.cluster.scheduler.want, self.cluster.computation.graph, others, released)


TestRecovers = Recovers.TestCase
TestRecovers.settings = examples(25, steps=40)
