"""Keep the last events in a ring, count lost events, and cost nothing when not recording."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.observe.recording import Kind, Recording


@given(st.integers(1, 20), st.lists(st.one_of(st.just("mark"), st.integers(1, 8)), max_size=60))
def test_taken_and_lost_events_are_all_in_order(capacity: int, steps: list[Any]) -> None:
    recording = Recording(capacity)
    model: list[int] = []
    taken: list[int] = []
    lost = recorded = 0
    for step in steps:
        if step == "mark":
            recording.mark("x", number=recorded)
            model.append(recorded)
            recorded += 1
            if len(model) > capacity:
                model.pop(0)
                lost += 1
        else:
            batch = recording.take(step)
            found = [event.args["number"] for event in batch.events]
            assert found == model[:step]
            del model[:step]
            taken += found
            assert batch.more == bool(model)
            assert batch.lost == lost
    assert len(taken) + len(model) + lost == recorded
    assert taken == sorted(taken)


def test_threads_record_at_once_and_nothing_goes_missing() -> None:
    recording = Recording(capacity=100)
    together = threading.Barrier(4)

    def work(which: int) -> None:
        together.wait()
        for number in range(500):
            with recording.span("step", which=which, number=number):
                pass

    threads = [threading.Thread(target=work, args=(which,), name=f"thread {which}") for which in range(4)]
    for thread in threads:
        thread.start()
    found = []
    while any(thread.is_alive() for thread in threads):
        found += recording.take(50).events
    for thread in threads:
        thread.join()
    batch = recording.take(1000)
    found += batch.events
    assert len(found) + batch.lost == 2000
    assert set(batch.threads.values()) >= {f"thread {which}" for which in range(4)}
    for which in range(4):
        mine = [event.args["number"] for event in found if event.args["which"] == which]
        assert mine == sorted(set(mine))


def test_a_timed_metric_is_a_step_of_its_thread() -> None:
    metrics = Metrics()
    metrics.recording = Recording()
    with metrics.seconds("shuffle.seconds.packing", 7):
        pass
    with metrics.seconds("exchange.seconds.pulling"):  # coroutines time it too, so it is not a step
        pass
    (event,) = metrics.recording.take(10).events
    assert (event.kind, event.step, event.args) == (Kind.SPAN, "pack", {"input": 7})
    assert event.seconds == pytest.approx(metrics.snapshot()["counters"]["shuffle.seconds.packing"], abs=1e-3)
    assert event.thread == threading.get_ident()


def test_faults_fallbacks_and_decisions_are_marked() -> None:
    metrics = Metrics()
    recording = metrics.recording = Recording()
    metrics.add("shuffle.lost.shards", 2)
    metrics.add("shuffle.taken.{why}", 1, "configured")
    metrics.add("shuffle.rows", 10)
    metrics.fallback(Fallback.EXCHANGE_COMMS, "no shared memory")
    found = [(event.step, dict(event.args)) for event in recording.take(10).events]
    assert found == [
        ("shuffle.lost.shards", {"amount": 2}),
        ("shuffle.taken.configured", {"amount": 1}),
        ("fallback", {"id": "exchange.comms", "reason": "no shared memory"}),
    ]


def test_a_recording_that_begins_in_the_middle_of_a_step_leaves_it_out() -> None:
    metrics = Metrics()
    with metrics.seconds("shuffle.seconds.packing"):
        recording = metrics.recording = Recording()
    assert recording.take(10).events == []


def test_nothing_is_allocated_while_nothing_is_recorded() -> None:
    metrics = Metrics()
    metrics.add("shuffle.rows")
    metrics.fallback(Fallback.EXCHANGE_COMMS, "again")

    def steps() -> None:
        for _ in range(1000):
            metrics.add("shuffle.rows")
            if (recording := metrics.recording) is not None:
                recording.mark("never")

    steps()
    before = sys.getallocatedblocks()
    steps()
    assert sys.getallocatedblocks() - before < 50
