"""Admit tasks when memory is short, and estimate their needs."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory import admission as admission_queue
from dask_gpurt.memory.admission import (
    FETCH,
    RUNS_REMEMBERED,
    SEND,
    TASK,
    Admission,
    AdmissionQueue,
    MemoryEstimator,
    MemoryRequest,
    reservation,
)
from dask_gpurt.memory.ledger import Limits
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.recording import Kind, Recording
from tests.helpers.tiered_buffers import KIB, new_tiered_buffer

# ---- needs -----------------------------------------------------------------------------


def test_a_prefix_that_has_not_run_may_leave_as_much_as_it_takes_and_work_with_as_much() -> None:
    assert MemoryEstimator().estimate("join", 100) == 200
    assert MemoryEstimator().estimate("read", 0) == 0


def test_programs_that_name_keys_themselves_take_bounded_memory() -> None:
    estimator = MemoryEstimator()
    for number in range(admission_queue.PREFIXES_REMEMBERED + 1):
        estimator.learn(f"load_{number}", 0, 1 + number)
    assert estimator.estimate("load_0", 0) == 0
    assert estimator.estimate("load_1", 0) == 2


def test_a_need_grows_with_the_inputs() -> None:
    estimator = MemoryEstimator()
    estimator.learn("join", 100, 250)
    assert estimator.estimate("join", 150) == 375
    assert estimator.estimate("sort", 150) == 300


def test_a_need_far_above_all_that_was_seen_is_a_mistake() -> None:
    estimator = MemoryEstimator()
    estimator.learn("read", 28, 10 * MIB)  # of a barrier, and of shards that are not inputs
    assert estimator.estimate("read", 100 * MIB) == 20 * MIB


def test_a_prefix_without_inputs_needs_what_it_needed() -> None:
    estimator = MemoryEstimator()
    estimator.learn("read", 0, 300)
    assert estimator.estimate("read", 0) == 300
    assert estimator.estimate("read", 10) == 20


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=3 * RUNS_REMEMBERED))
def test_most_of_the_last_runs_would_have_had_enough_and_none_is_overdone(peaks: list[int]) -> None:
    estimator = MemoryEstimator()
    for peak in peaks:
        estimator.learn("join", 1000, peak)
    last, need = peaks[-RUNS_REMEMBERED:], estimator.estimate("join", 1000)
    assert need <= max(last)
    assert sum(peak <= need + 1 for peak in last) >= 0.9 * len(last)


# ---- which request waits for which -----------------------------------------------------


MIB = 2**20

Step = tuple[str, MemoryRequest]
History = tuple[Step, ...]


class Explored:
    """Enumerate everything that can happen to a few requests that share memory, in any order."""

    def __init__(self, needs: dict[MemoryRequest, int], room: int):
        self.needs, self.room = needs, room

    def replay(self, history: History) -> tuple[Admission, set[MemoryRequest], set[MemoryRequest]]:
        """Return the state after a history, the requests that have begun, and those that have finished."""
        admission, began, done = Admission(), set[MemoryRequest](), set[MemoryRequest]()
        for what, who in history:
            if what == "ask":
                taken = sum(self.needs[other] for other in began - done)
                if admission.ask(who, who.kind == SEND or taken + self.needs[who] <= self.room, 0.0):
                    began.add(who)
            else:
                admission.leave(who, 0.0)
                if what == "finish":
                    done.add(who)
        return admission, began, done

    def steps(self, history: History) -> list[Step]:
        """Return the possible next steps. A seceded task may wait for tasks of its own: it ends last."""
        admission, began, done = self.replay(history)
        asks = [("ask", who) for who in self.needs if who not in began]
        running = [who for who in self.needs if who in admission.running]
        seceded = [who for who in began - done if who not in admission.running]
        # Only when no other step is left: all that it may wait for must have had its turn.
        ends = seceded if not asks and not running else []
        leaves = [("finish", who) for who in running]
        leaves += [("secede", who) for who in running if who.kind == TASK]
        return asks + leaves + [("finish", who) for who in ends]


def holders(tasks: tuple[int, ...], fetches: tuple[int, ...] = (), sends: tuple[int, ...] = ()) -> Any:
    kinds = ((TASK, tasks), (FETCH, fetches), (SEND, sends))
    return {MemoryRequest(kind, i): need for kind, needs in kinds for i, need in enumerate(needs)}


@pytest.mark.parametrize(
    ("needs", "room"),
    [
        (holders((5, 5, 5)), 10),
        (holders((9, 9, 9)), 3),
        (holders((1, 4, 9)), 8),
        (holders((3, 3, 3)), 3),
        (holders((0, 20, 0)), 5),
        (holders((5, 9), (3, 6)), 8),
        (holders((9,), (3, 3), (4,)), 8),
        (holders((2, 8), (9,), (5,)), 8),
    ],
)
def test_in_no_state_do_all_wait(needs: dict[MemoryRequest, int], room: int) -> None:
    """In every reachable state where requests wait, a task runs, or the first to ask is admitted."""
    explored = Explored(needs, room)
    states: set[Any] = set()
    histories: list[History] = [()]
    while histories:
        history = histories.pop()
        admission, began, done = explored.replay(history)
        state = (admission.running, admission.waiting, frozenset(began), frozenset(done))
        if state in states:
            continue
        states.add(state)
        if len(done) == len(needs):
            continue
        steps = explored.steps(history)
        moving = [
            step
            for step in steps
            if step[0] != "ask" or explored.replay((*history, step))[1] > began  # a request was admitted
        ]
        assert moving, f"stuck after {history}"
        histories += [(*history, step) for step in steps]
    assert len(states) > 20


A, B, C = (MemoryRequest(TASK, name) for name in "abc")


def test_a_task_that_ends_names_the_request_that_waits_longest() -> None:
    admission = Admission()
    assert admission.ask(A, True, 0)
    assert not admission.ask(B, False, 0)
    assert not admission.ask(C, False, 0)
    assert admission.waiting == (B, C)
    assert admission.leave(A, 0) == B
    assert admission.ask(B, False, 0)
    assert admission.leave(B, 0) == C
    assert admission.ask(C, False, 0)
    assert admission.leave(C, 0) is None


def test_a_task_waits_for_what_is_sent_and_nothing_more_comes_or_goes_meanwhile() -> None:
    admission, send, fetch = Admission(), MemoryRequest(SEND, 0), MemoryRequest(FETCH, 1)
    assert admission.ask(send, True, 0)
    assert not admission.short
    assert not admission.ask(A, False, 0)
    assert admission.short
    assert not admission.ask(fetch, True, 0), "there is room, but the task has waited longer"
    assert admission.ask(B, True, 0)
    assert not admission.short, "it waits for another task as well, and peers need not"
    assert admission.leave(B, 0) == admission.leave(send, 0) == A
    assert admission.ask(A, False, 0), "nothing is left to wait for"
    assert admission.ask(fetch, True, 0)


# ---- time runs out ---------------------------------------------------------------------


def test_the_oldest_request_is_admitted_without_room_once_its_time_has_run_out() -> None:
    admission = Admission(patience=10)
    assert admission.ask(A, True, 0)
    assert not admission.ask(B, False, 1)
    assert not admission.ask(C, False, 2)
    assert not admission.ask(B, False, 10.9)
    assert not admission.ask(C, False, 11), "another one has waited longer"
    assert admission.ask(B, False, 11)
    assert admission.overdue == 1
    assert not admission.ask(C, False, 20.9), "it has been the oldest since 11"
    assert admission.ask(C, False, 21)
    assert admission.overdue == 2


def test_a_request_that_gets_room_late_is_not_overdue() -> None:
    admission = Admission(patience=10)
    assert admission.ask(A, True, 0)
    assert not admission.ask(B, False, 0)
    assert admission.ask(B, True, 30)
    assert admission.overdue == 0


def test_the_time_of_the_next_request_begins_when_the_one_before_it_gives_up() -> None:
    admission = Admission(patience=10)
    assert admission.ask(A, True, 0)
    assert not admission.ask(B, False, 0)
    assert not admission.ask(C, False, 0)
    assert admission.leave(B, 5) == C
    assert not admission.ask(C, False, 14.9)
    assert admission.ask(C, False, 15)


PATIENCE_S = 5
#: Possible events of a step: a request of some kind arrives, a running request ends, a request is withdrawn,
#: or only time passes.
events = st.one_of(
    st.tuples(st.just("come"), st.sampled_from([TASK, FETCH, SEND])),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("withdraw"), st.integers(0, 9)),
    st.tuples(st.just("pass"), st.integers(0, 9)),
)


@given(st.lists(st.tuples(events, st.booleans()), max_size=60))
def test_whatever_comes_goes_or_stays_for_ever_each_request_is_admitted_in_its_time(steps: Any) -> None:
    """One step takes a second, in which each request asks. Running requests end only where a step says so."""
    admission, now, numbers = Admission(PATIENCE_S), 0, itertools.count()
    due: dict[MemoryRequest, int] = {}

    def ask(who: MemoryRequest, fits: bool) -> None:
        if admission.ask(who, fits, now):
            due.pop(who, None)
        else:
            due.setdefault(who, now + PATIENCE_S * len(admission.waiting))

    for (what, which), fits in [*steps, *[(("pass", 0), False)] * (PATIENCE_S * len(steps))]:
        now += 1
        running, waiting = sorted(admission.running), admission.waiting
        if what == "come":
            ask(MemoryRequest(which, next(numbers)), fits or which == SEND)
        elif what == "end" and running:
            admission.leave(running[which % len(running)], now)
        elif what == "withdraw" and waiting:
            due.pop(who := waiting[which % len(waiting)])
            admission.leave(who, now)
        for who in admission.waiting:
            ask(who, fits)
        late = [who for who, end in due.items() if now > end]
        assert not late, f"{late} should have been admitted by {now}: {admission.waiting} wait"
    assert not admission.waiting


# ---- what is seen of them --------------------------------------------------------------


def test_only_a_request_that_has_waited_is_recorded_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_queue, "RETRY_INTERVAL_S", 0.001)
    metrics = Metrics()
    recording = metrics.recording = Recording()
    tiers = new_tiered_buffer(str(tmp_path), Limits(KIB, 0, 0, None))
    queue = AdmissionQueue(lambda key: False, tiers.reservations, metrics)
    first, second = reservation("first"), reservation("second")

    async def run() -> None:
        room, asked = asyncio.Event(), Counter[MemoryRequest]()

        async def there_is_room_later(request: MemoryRequest) -> bool:
            asked[request] += 1
            return request == first or room.is_set()

        await queue.wait(first, there_is_room_later)
        waiting = asyncio.create_task(queue.wait(second, there_is_room_later))
        while asked[second] < 3:
            await asyncio.sleep(0.001)
        room.set()
        queue.leave(first)
        await waiting

    asyncio.run(run())
    (event,) = recording.take(10).events
    assert (event.kind, event.step, event.args) == (Kind.WAIT, "admission", {"kind": TASK, "key": "second"})
    assert metrics.snapshot()["counters"]["memory.waits"] == 1
    tiers.close()
