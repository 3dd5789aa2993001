"""Count waits between streams in a trace, and the time that they hold work back."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.tpch.stream_waits import added, summary


class Trace:
    """Write events as PyTorch's profiler does; times are in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def call(self, name: str, number: int, at: float) -> None:
        call = {"cat": "cuda_runtime", "name": name, "ts": at, "dur": 2.0}
        self.events.append({**call, "args": {"correlation": number}})

    def launch(self, number: int, at: float, stream: int, begins: float, lasts: float) -> None:
        self.call("cudaLaunchKernel", number, at)
        kernel = {"cat": "kernel", "name": "k", "ts": begins, "dur": lasts}
        self.events.append({**kernel, "args": {"correlation": number, "stream": stream}})

    def wait(self, number: int, at: float, stream: int) -> None:
        self.call("cudaStreamWaitEvent", number, at)
        args = {"correlation": number, "stream": stream}
        self.events.append(
            {"cat": "cuda_sync", "name": "Stream Wait Event", "ts": at, "dur": 0, "args": args}
        )


def test_a_wait_for_freed_memory_holds_back_what_comes_next() -> None:
    trace = Trace()
    trace.launch(1, at=0, stream=7, begins=5, lasts=1000)  # compute
    trace.launch(3, at=20, stream=9, begins=25, lasts=10)  # communication, which waits for nothing
    trace.wait(4, at=300, stream=9)  # it gets memory that compute has freed
    trace.launch(5, at=310, stream=9, begins=1006, lasts=10)
    found = summary(trace.events, ours=[100])
    assert found["others"] == {"count": 1, "held": 1, "seconds": pytest.approx(694e-6)}
    assert found["ours"] == {"count": 0, "held": 0, "seconds": 0}
    assert found["without"] == {"count": 2, "seconds": pytest.approx(6e-6), "median": pytest.approx(3e-6)}
    assert found["noted"] == {"count": 1}


def test_a_wait_that_the_runtime_noted_is_its_own() -> None:
    trace = Trace()
    trace.launch(1, at=0, stream=7, begins=5, lasts=300)
    trace.wait(4, at=200, stream=9)
    trace.launch(5, at=230, stream=9, begins=310, lasts=10)
    found = summary(trace.events, ours=[190])
    assert found["ours"] == {"count": 1, "held": 1, "seconds": pytest.approx(78e-6)}
    assert found["others"]["count"] == 0


def test_work_after_waits_of_both_is_held_back_by_the_others() -> None:
    trace = Trace()
    trace.wait(1, at=200, stream=9)
    trace.wait(2, at=500, stream=9)
    trace.launch(3, at=510, stream=9, begins=600, lasts=10)
    found = summary(trace.events, ours=[500])
    assert (found["ours"]["count"], found["ours"]["held"]) == (1, 0)
    assert (found["others"]["count"], found["others"]["held"]) == (1, 1)


def test_what_the_stream_does_already_is_not_held_back() -> None:
    trace = Trace()
    trace.launch(1, at=0, stream=9, begins=5, lasts=500)
    trace.wait(2, at=10, stream=9)
    trace.launch(3, at=20, stream=9, begins=506, lasts=10)
    assert summary(trace.events, [])["others"]["seconds"] == pytest.approx(1e-6)


def test_a_wait_before_no_work_counts() -> None:
    trace = Trace()
    trace.wait(2, at=10, stream=9)
    assert summary(trace.events, [])["others"] == {"count": 1, "held": 0, "seconds": 0}


def test_workers_are_added_up() -> None:
    one = {
        "others": {"count": 1, "held": 1, "seconds": 0.5},
        "without": {"count": 3, "median": 1.0},
    }
    assert added([one, one]) == {
        "others": {"count": 2, "held": 2, "seconds": 1.0},
        "without": {"count": 6, "median": 1.0},
    }
