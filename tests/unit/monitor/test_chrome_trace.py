"""Write traces that satisfy readers of the format, whatever was recorded."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.monitor.trace import SCHEDULER, ProcessTrace, Trace, chrome_trace
from dask_gpurt.observe.recording import TASK, Event, Kind
from tests.helpers.trace_format import check, slices

A, B = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"


def span(step: str, at: float, seconds: float, thread: int = 1, task: str = "", **args: Any) -> Event:
    return Event(Kind.SPAN, step, at, seconds, thread, task, args)


def trace(**processes: ProcessTrace) -> Trace:
    return Trace(processes={{"a": A, "b": B, "s": SCHEDULER}[name]: of for name, of in processes.items()})


times = st.integers(0, 400).map(lambda ticks: ticks / 64)
events = st.builds(
    Event,
    st.sampled_from([Kind.SPAN, Kind.SPAN, Kind.SPAN, Kind.WAIT, Kind.MARK]),
    st.sampled_from([TASK, "pack", "pull", "assemble"]),
    times,
    times,
    st.integers(1, 3),
    st.sampled_from(["", "('x-0123', 0)", "('x-0123', 1)", "y"]),
    st.fixed_dictionaries({"shard": st.sampled_from("abc")}, optional={"cost": st.just(float("inf"))}),
)


@given(st.lists(events, max_size=25), st.lists(events, max_size=25), st.floats(-3, 3))
def test_whatever_is_recorded_can_be_read(one: list[Event], other: list[Event], ahead: float) -> None:
    later = [event._replace(at=event.at + ahead) for event in other]
    found = trace(s=ProcessTrace(), a=ProcessTrace(events=one), b=ProcessTrace(events=later))
    written = json.loads(json.dumps(chrome_trace(found), allow_nan=False))
    check(written)
    spans = [event for event in [*one, *other] if event.kind == Kind.SPAN]
    assert len(slices(written)) == len(spans)
    marks = [event for event in written["traceEvents"] if event["ph"] == "i"]
    assert len(marks) == sum(event.kind == Kind.MARK for event in [*one, *other])


def test_a_task_is_widened_to_its_steps_and_not_over_its_neighbours() -> None:
    # Dask's times of both tasks are 2 ms late.
    found = [
        span(TASK, 0.002, 0.010, task="one"),
        span("split", 0.001, 0.005, task="one"),
        span("pack", 0.006, 0.004, task="one"),
        span(TASK, 0.0125, 0.010, task="two"),
        span("split", 0.011, 0.004, task="two"),
    ]
    written = chrome_trace(trace(a=ProcessTrace(events=found)))
    check(written)
    assert len({one.tid for one in slices(written)}) == 1
    tasks = {one.args["task"]: one for one in slices(written) if one.name not in ("split", "pack")}
    for step in slices(written):
        task = tasks[step.args["task"]]
        assert task.begin <= step.begin <= step.end <= task.end
    assert tasks["one"].end <= tasks["two"].begin


def test_coroutines_that_overlap_on_one_thread_have_several_tracks() -> None:
    found = [span(TASK, at, 1.0, task=f"t{at}") for at in (0.0, 0.5, 0.9)]
    written = chrome_trace(trace(a=ProcessTrace(events=found, threads={1: "MainThread"})))
    check(written)
    names = [e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["MainThread", "MainThread (2)", "MainThread (3)"]


def test_events_taken_that_did_not_arrive_are_lost() -> None:
    process = ProcessTrace()
    process.receive(recording=1.0, arrived=10, taken=10, lost=0)
    process.receive(recording=1.0, arrived=5, taken=25, lost=2)  # ten are missing, two were overwritten
    assert process.lost == 12
    process.receive(recording=7.0, arrived=3, taken=4, lost=0)  # a restarted worker at the same address
    assert process.lost == 13
    process.receive(recording=7.0, arrived=1, taken=5, lost=0)
    assert process.lost == 13


def test_lost_events_are_reported() -> None:
    found = trace(a=ProcessTrace(name="zero", lost=3, events=[span("pack", 0, 1)]))
    found.left_out = 4
    found.unanswered[B] = "the worker has left"
    said = chrome_trace(found)["otherData"]
    assert said["lost events"] == 7
    assert said["processes"][A]["lost events"] == 3
    assert said["workers that did not answer"] == {B: "the worker has left"}


def test_a_trace_says_what_it_lacks() -> None:
    found = trace(a=ProcessTrace(lost=1_000), b=ProcessTrace())
    found.unanswered["c"] = "gone"
    answer, events = found.lacks()
    assert answer == "c did not answer: gone"
    assert events.startswith("1,000 events were lost")


def test_the_summary_adds_up() -> None:
    found = trace(
        a=ProcessTrace(
            events=[
                span("pull", 0, 1.0, bytes=10),
                span("pull", 2, 3.0, bytes=20),
                span(TASK, 0, 0.5, task="('shuffle-transfer-0123456789abcdef', 1)"),
            ]
        )
    )
    first, second = found.summary()
    assert first == (A, "pull", 2, 4.0, 3.0, 30)
    assert second == (A, "shuffle-transfer", 1, 0.5, 0.5, 0)
