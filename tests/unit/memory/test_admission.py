"""What may run when memory is short, and what tasks are thought to need."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections import Counter, defaultdict
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.utils import key_split
from distributed import Client, SchedulerPlugin, wait, worker_client
from distributed.utils_test import gen_cluster
from hypothesis import given
from hypothesis import strategies as st

import dask_gpurt
from dask_gpurt.memory import admission as module
from dask_gpurt.memory.admission import (
    FETCH,
    RUNS_REMEMBERED,
    SEND,
    TASK,
    Admission,
    MemoryEstimator,
    MemoryRequest,
)
from tests.helpers.clusters import Library, cluster, counters

MIB = 2**20


# ---- needs -----------------------------------------------------------------------------


def test_a_prefix_that_has_not_run_may_leave_as_much_as_it_takes_and_work_with_as_much() -> None:
    assert MemoryEstimator().estimate("join", 100) == 200
    assert MemoryEstimator().estimate("read", 0) == 0


def test_a_need_grows_with_the_inputs() -> None:
    estimator = MemoryEstimator()
    estimator.learn("join", 100, 250)
    assert estimator.estimate("join", 150) == 375
    assert estimator.estimate("sort", 150) == 300


def test_a_need_far_above_all_that_was_seen_is_a_mistake() -> None:
    estimator = MemoryEstimator()
    estimator.learn("read", 28, 10 * MIB)  # of a barrier, and of shards that are no inputs
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


# ---- who waits for whom ----------------------------------------------------------------


Step = tuple[str, MemoryRequest]
History = tuple[Step, ...]


class Explored:
    """All that can happen to a few holders that share some room, one thing after another."""

    def __init__(self, needs: dict[MemoryRequest, int], room: int):
        self.needs, self.room = needs, room

    def replay(self, history: History) -> tuple[Admission, set[MemoryRequest], set[MemoryRequest]]:
        """The state after a history: who has begun, and who has finished."""
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
        """What can happen next. A task that has seceded may need tasks of its own: it ends last."""
        admission, began, done = self.replay(history)
        asks = [("ask", who) for who in self.needs if who not in began]
        running = [who for who in self.needs if who in admission.running]
        seceded = [who for who in began - done if who not in admission.running]
        # Only when nobody else is left: whatever it waits for has to have had its turn.
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
def test_in_no_state_does_everybody_wait(needs: dict[MemoryRequest, int], room: int) -> None:
    """Every reachable state: whoever waits there, somebody goes on, or the first to ask may."""
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
            if step[0] != "ask" or explored.replay((*history, step))[1] > began  # somebody got in
        ]
        assert moving, f"stuck after {history}"
        histories += [(*history, step) for step in steps]
    assert len(states) > 20


A, B, C = (MemoryRequest(TASK, name) for name in "abc")


def test_whoever_leaves_names_the_one_that_waits_longest() -> None:
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
    assert admission.ask(A, False, 0), "nobody is left to wait for"
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


PATIENCE = 5
#: What may happen in a step: a request of a kind comes, something that runs ends, a request is withdrawn, or
#: nothing but time passes.
events = st.one_of(
    st.tuples(st.just("come"), st.sampled_from([TASK, FETCH, SEND])),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("withdraw"), st.integers(0, 9)),
    st.tuples(st.just("pass"), st.integers(0, 9)),
)


@given(st.lists(st.tuples(events, st.booleans()), max_size=60))
def test_whatever_comes_goes_or_stays_for_ever_each_request_is_admitted_in_its_time(steps: Any) -> None:
    """One step a second, in which each request asks. What runs ends only where a step says so."""
    admission, now, numbers = Admission(PATIENCE), 0, itertools.count()
    due: dict[MemoryRequest, int] = {}

    def ask(who: MemoryRequest, fits: bool) -> None:
        if admission.ask(who, fits, now):
            due.pop(who, None)
        else:
            due.setdefault(who, now + PATIENCE * len(admission.waiting))

    for (what, which), fits in [*steps, *[(("pass", 0), False)] * (PATIENCE * len(steps))]:
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


# ---- on a worker -----------------------------------------------------------------------


TIGHT = {
    "memory__device": 8 * MIB,
    "memory__pinned": 8 * MIB,
    "memory__host": 0,
    "exchange__pool": 4 * MIB,
}


def wide(seconds: float = 0.0) -> Any:
    time.sleep(seconds)
    return np.ones(5 * MIB, np.uint8)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    with cluster("pandas", workers=1, threads=2, failures=0, **TIGHT) as client:
        yield client


def test_a_task_without_room_waits_until_another_has_finished(two_threads: Client) -> None:
    two_threads.submit(wide, pure=False).result()  # what the prefix needs is known now
    at_once = two_threads.map(_overlap, range(6), key=[f"overlap-{i}" for i in range(6)])
    assert max(two_threads.gather(at_once)) == 2, "small tasks run beside each other"
    for future in two_threads.map(wide, [0.05] * 6, pure=False):
        future.release()
    futures = two_threads.map(wide, [0.05] * 6, pure=False)
    wait(futures)
    assert counters(two_threads)["memory.waits"] > 0
    assert [future.result().nbytes for future in futures] == [5 * MIB] * 6


_at_once: Counter[str] = Counter()
_lock = threading.Lock()


def _overlap(_: int) -> int:
    with _lock:
        _at_once["running"] += 1
    time.sleep(0.1)
    with _lock:
        found = _at_once["running"]
    time.sleep(0.1)
    with _lock:
        _at_once["running"] -= 1
    return found


def _slow_sum(*parts: Any) -> int:
    time.sleep(0.2)
    return sum(int(part[-1]) for part in parts)


def test_what_peers_send_waits_for_room_as_tasks_do() -> None:
    """Two workers that want each other's data, three times as much as fits, one by one."""
    one_by_one = dask.config.set({"distributed.worker.transfer.message-bytes-limit": MIB})
    with one_by_one, cluster("pandas", workers=2, threads=1, failures=0, **TIGHT) as client:
        here, there = client.nthreads()
        made = {
            name: client.map(np.full, [3 * MIB] * 8, range(8), dtype="u1", workers=[name], pure=False)
            for name in (here, there)
        }
        wait([*made[here], *made[there]])
        sums = [
            client.submit(_slow_sum, *two, workers=[name], pure=False)
            for name, other in ((here, there), (there, here))
            for two in zip(*[iter(made[other])] * 2, strict=True)
        ]
        assert client.gather(sums) == [1, 5, 9, 13] * 2
        peaks = client.run(lambda dask_worker: dask_worker.plugins["gpurt"].metrics.snapshot())
        assert max(one["counters"]["memory.device.peak"] for one in peaks.values()) <= 8 * MIB


def test_a_task_that_waits_for_tasks_of_its_own_does_not_stop_them(two_threads: Client) -> None:
    def parent() -> int:
        held = np.ones(5 * MIB, np.uint8)
        with worker_client() as client:  # secedes
            return int(client.submit(wide, pure=False).result().nbytes + held.nbytes)

    two_threads.submit(wide, pure=False).result()
    parents = two_threads.map(lambda _: parent(), range(3), pure=False)
    assert two_threads.gather(parents) == [10 * MIB] * 3


_met: defaultdict[str, threading.Event] = defaultdict(threading.Event)


def _meet(mine: str, other: str, _: Any = None) -> bool:
    held = np.ones(5 * MIB, np.uint8)
    _met[mine].set()
    return _met[other].wait(60) and bool(held.all())


@pytest.mark.parametrize("of", ["tasks", "a task and a fetch"])
def test_tasks_that_wait_for_each_other_both_run_though_memory_is_short(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in whose place the other one would have to wait, until it ends, which it does not."""
    monkeypatch.setattr(module, "ADMISSION_PATIENCE_S", 0.2)
    monkeypatch.setattr(sys.modules[__name__], "_met", defaultdict(threading.Event))
    config = {f"gpurt.{name.replace('__', '.')}": value for name, value in TIGHT.items()}
    workers = [("127.0.0.1", 2), ("127.0.0.1", 1)]

    @gen_cluster(client=True, nthreads=workers, timeout=120, config=config)
    async def run(client: Any, scheduler: Any, here: Any, there: Any) -> None:
        await dask_gpurt.enable(client)
        await client.submit(wide, key="meet-0", workers=[here.address])  # what the prefix needs is known now
        far = None
        if of == "a task and a fetch":
            far = client.submit(np.ones, 5 * MIB, np.uint8, key="far", workers=[there.address])
            await far
        one = client.submit(_meet, "first", "second", key="meet-1", workers=[here.address])
        while not _met["first"].is_set():
            await asyncio.sleep(0.01)
        two = client.submit(_meet, "second", "first", far, key="meet-2", workers=[here.address])
        assert await client.gather([one, two]) == [True, True]
        report = await dask_gpurt.report(client)
        assert report["counters"]["memory.waits.overdue"] >= 1
        assert module.OVERDUE in report["workers"][here.address]["fallbacks"]
        await dask_gpurt.disable(client)

    run()


def test_a_task_with_tiny_inputs_does_not_make_others_push_everything_out() -> None:
    with cluster("pandas", workers=1, failures=0) as client:
        tiny, kept = client.submit(int, 7, pure=False), client.submit(wide, pure=False)
        client.submit(lambda _: wide(), tiny, key="grow-1").result()
        client.submit(lambda array: array[:1], kept, key="grow-2").result()
        assert not [name for name in counters(client) if name.startswith("memory.spill.bytes")]


def test_nothing_is_spilled_for_a_trifle(two_threads: Client) -> None:
    """The tier is full of what can go; a few bytes do not make it go."""
    kept = two_threads.map(lambda i: np.full(MIB, i, np.uint8), range(7), pure=False)
    rest = two_threads.submit(np.ones, MIB - 1, np.uint8, pure=False)
    wait([*kept, rest])
    wait(two_threads.map(str, range(50), pure=False))
    assert not [name for name in counters(two_threads) if name.startswith("memory.spill.bytes")]


def test_a_need_above_the_limit_does_not_keep_a_task_from_running(two_threads: Client) -> None:
    def huge(_: int) -> int:
        return int(np.ones(20 * MIB, np.uint8).nbytes)

    assert two_threads.gather(two_threads.map(huge, range(4), pure=False)) == [20 * MIB] * 4


class InMemory(SchedulerPlugin):
    """The most keys of a prefix that are in memory at once."""

    def __init__(self, prefix: str):
        self.prefix, self.keys, self.most = prefix, set[Any](), 0

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if key_split(key).startswith(self.prefix):
            (self.keys.add if finish == "memory" else self.keys.discard)(key)
            self.most = max(self.most, len(self.keys))


def part(i: int) -> pd.DataFrame:
    return pd.DataFrame({"key": np.arange(i, i + 2**16), "payload": 1.0})


def test_a_read_of_more_than_fits_does_not_run_ahead_of_the_shuffle() -> None:
    with cluster(failures=0, **TIGHT) as client:
        read = InMemory("part")
        client.cluster.scheduler.add_plugin(read)
        frame = dd.from_map(part, range(80))  # 80 MiB, through 16
        assert frame.shuffle("key").payload.sum().compute() == 80 * 2**16
    assert 0 < read.most <= 8, "per worker the ones in use, those next, and no more"


@pytest.mark.parametrize("one_in", [5])
def test_with_allocations_that_fail_at_random_all_comes_out_right(library: Library, one_in: int) -> None:
    frame = pd.DataFrame({"key": np.arange(200_000) * 7 % 200_003, "payload": np.arange(200_000)})
    with cluster(library.name, failures=one_in, memory__retries=30, **TIGHT) as client:
        ours = dd.from_pandas(frame, npartitions=12)
        if library.name == "cudf":
            ours = ours.to_backend("cudf")
        joined = ours.shuffle("key").merge(ours.shuffle("key"), on="key")
        assert int(joined.payload_x.sum().compute()) == int(frame.payload.sum())
        assert counters(client)["memory.retries"] > 0
        assert dask_gpurt.is_enabled(client)
