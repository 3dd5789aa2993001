"""Attribute processor time of tasks to threads, and compare it with that without the runtime."""

from __future__ import annotations

import threading
import time

import pytest

from benchmarks.overlap.overhead import (
    ALL,
    CONTENDERS,
    LOOP,
    MESSAGES,
    SCHEDULER,
    TASKS,
    compare,
    worker_seconds,
)


def test_the_seconds_of_a_worker_are_told_apart_by_thread() -> None:
    began, done, end = time.thread_time(), threading.Event(), threading.Event()

    def compute() -> None:
        while time.thread_time() < 0.05:
            pass
        done.set()
        end.wait()

    thread = threading.Thread(target=compute, name="0-Dask-Default-Threads-1-0")
    thread.start()
    done.wait()
    found = worker_seconds()
    end.set()
    thread.join()
    assert found[TASKS] >= 0.05
    assert began <= found[LOOP] <= time.thread_time()


def test_each_contender_is_compared_with_the_runs_without_the_runtime() -> None:
    figures = (SCHEDULER, LOOP, TASKS, ALL, MESSAGES)
    runs = [
        {"workload": "ready", "contender": contender, "figures": dict.fromkeys(figures, turn * cost)}
        for turn in (1.0, 2.0, 3.0)
        for contender, cost in zip(CONTENDERS, (2.0, 3.0, 5.0), strict=True)
    ]
    found = {(row["contender"], row["figure"]): row for row in compare(runs)}
    assert len(found) == 2 * len(figures)
    assert found["no tiers", LOOP]["ratio"] == pytest.approx(1.5)
    assert (found["on", ALL]["on"], found["on", ALL]["off"]) == (10.0, 4.0)
    assert found["on", ALL]["ratio"] == pytest.approx(2.5)
