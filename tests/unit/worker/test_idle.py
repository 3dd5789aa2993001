"""Find tasks that wait, by the clocks of their threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.worker import tasks as worker_tasks
from dask_gpurt.worker.tasks import IdleTasks


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_tasks, "IDLE_S", 0.1)


@contextmanager
def running(work: Callable[[threading.Event], Any]) -> Iterator[Any]:
    """Run a task until the context ends; yield a worker that runs it."""
    over, began = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        work(over)

    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    try:
        yield SimpleNamespace(active_threads={thread.ident: "task"})
    finally:
        over.set()
        thread.join()


def compute(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(1000))


def is_ever_idle(tasks: IdleTasks, looks: int = 60) -> bool:
    for _ in range(looks):
        if tasks.is_idle("task"):
            return True
        time.sleep(0.005)
    return False


def test_a_task_that_waits_for_an_event_is_idle_and_one_that_computes_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_tasks, "HELPING_CORES", 1e9)  # whatever this process does
    with running(threading.Event.wait) as worker:
        tasks = IdleTasks(worker, lambda key: False)
        assert not tasks.is_idle("task"), "it may just have begun to wait"
        assert is_ever_idle(tasks, 10_000)
    with running(compute) as worker:
        assert not is_ever_idle(IdleTasks(worker, lambda key: False))


def test_a_task_that_reads_or_has_helpers_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_tasks, "HELPING_CORES", 0.0)  # however busy this machine is
    with running(threading.Event.wait) as worker:
        assert not is_ever_idle(IdleTasks(worker, lambda key: True))
        with running(compute):
            assert not is_ever_idle(IdleTasks(worker, lambda key: False))


def test_a_task_that_waits_for_the_cluster_is_idle_whatever_else_the_process_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sync(over: threading.Event) -> None:
        over.wait()

    monkeypatch.setattr(worker_tasks, "sync", sync)
    monkeypatch.setattr(worker_tasks, "HELPING_CORES", 0.0)
    with running(sync) as worker, running(compute):
        assert is_ever_idle(IdleTasks(worker, lambda key: False), 10_000)


def test_a_task_that_is_not_known_is_not_idle() -> None:
    worker: Any = SimpleNamespace(active_threads={})
    assert not IdleTasks(worker, lambda key: False).is_idle("task")
