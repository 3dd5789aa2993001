"""Ask workers, none of which delays the answers of others; keep tasks off workers while they are silent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status

from dask_gpurt.observe import Metrics
from dask_gpurt.protocol import ASK_STATUS_OP, HEARTBEAT_METRIC
from dask_gpurt.scheduler import worker_calls
from dask_gpurt.scheduler.switching import Workers
from dask_gpurt.scheduler.worker_calls import (
    MISSED,
    SILENT_AT_WORK_S,
    SILENT_S,
    SilentWorkers,
    ask_all,
    heartbeat_of,
)

A, B = "tcp://a:1", "tcp://b:1"
BARRIER, TASK = SimpleNamespace(key="shuffle-barrier-x"), SimpleNamespace(key=("work", 0))


class Scheduler:
    """Fake a scheduler whose workers send a heartbeat when the test says so."""

    def __init__(self, workers: int = 2):
        self.now = 1000.0
        addresses = [A, B, *(f"tcp://c:{number}" for number in range(workers - 2))]
        self.workers = {address: self._state() for address in addresses}
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.changes: list[tuple[str, Status]] = []

    def _state(self) -> Any:
        return SimpleNamespace(last_seen=self.now, status=Status.running, processing=[])

    def handle_worker_status_change(self, status: Status, worker: str, stimulus_id: str) -> None:
        self.workers[worker].status = status
        self.changes.append((worker, status))

    def send_all(self, _: Any, messages: Mapping[str, list[dict[str, Any]]]) -> None:
        self.sent += [(worker, message) for worker, sent in messages.items() for message in sent]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    faked = Scheduler()
    monkeypatch.setattr(worker_calls, "time", lambda: faked.now)
    return faked


def silent(scheduler: Any) -> SilentWorkers:
    return SilentWorkers(scheduler, Metrics())


def looks(workers: SilentWorkers, scheduler: Scheduler, seconds: float) -> bool:
    """Return what the second of two looks finds, seconds after the last heartbeat."""
    scheduler.now += seconds - 1
    workers.is_silent(A)
    scheduler.now += 1
    return workers.is_silent(A)


def test_the_scheduler_has_been_busy_itself(scheduler: Scheduler) -> None:
    """It has read no heartbeat for long, and does so right after the first look."""
    workers = silent(scheduler)
    scheduler.now += 10 * SILENT_S
    assert not workers.is_silent(A)
    assert not workers.is_silent(A), "too soon after the first look"
    scheduler.workers[A].last_seen = scheduler.now
    scheduler.now += 1
    assert not workers.is_silent(A)
    scheduler.now += 10 * SILENT_S
    assert not workers.is_silent(A), "another silence takes two looks again"
    scheduler.now += 1
    assert workers.is_silent(A)


@pytest.mark.parametrize("task", [TASK, BARRIER])
def test_a_worker_has_tasks(scheduler: Scheduler, task: Any) -> None:
    """A task may hold Python's global lock, and with it the event loop; a barrier does not."""
    scheduler.workers[A].processing = [task]
    assert looks(silent(scheduler), scheduler, SILENT_S + 2) == (task is BARRIER)
    assert looks(silent(scheduler), scheduler, SILENT_AT_WORK_S)


def test_heartbeats_of_many_workers_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every eleven seconds: a few have to be missed, however long a silent worker may be waited for."""
    scheduler = Scheduler(workers=2000)
    monkeypatch.setattr(worker_calls, "time", lambda: scheduler.now)
    workers = silent(scheduler)
    scheduler.now += SILENT_S + 2
    assert not workers.is_silent(A)
    scheduler.now += 12
    assert not workers.is_silent(A)
    assert not looks(workers, scheduler, 11 * MISSED), "too soon after the first look"
    scheduler.now += 12
    assert workers.is_silent(A)


def test_a_worker_that_has_left_is_not_silent(scheduler: Scheduler) -> None:
    workers = silent(scheduler)
    workers.hold(A)
    del scheduler.workers[A]
    workers.remove(A)
    assert A not in workers
    assert not looks(workers, scheduler, SILENT_S + 2)
    workers.is_back(A, "running")
    assert scheduler.changes == [(A, Status.paused)]


def test_a_silent_worker_gets_no_tasks_until_it_is_heard_again(scheduler: Scheduler) -> None:
    workers = silent(scheduler)
    workers.hold(A)
    workers.hold(A)
    assert (A in workers, B in workers) == (True, False)
    assert workers.is_silent(A), "at the next look, too"
    assert scheduler.sent == [(A, {"op": ASK_STATUS_OP})]
    workers.is_back(A, "running")
    workers.is_back(A, "running")
    assert A not in workers
    assert scheduler.changes == [(A, Status.paused), (A, Status.running)]


@pytest.mark.parametrize("then", [Status.paused, Status.closing_gracefully])
def test_a_worker_has_another_status_when_it_is_heard_again(scheduler: Scheduler, then: Status) -> None:
    """It has run out of memory; or it is being retired, which it hears of after the question."""
    workers = silent(scheduler)
    workers.hold(A)
    if then is Status.closing_gracefully:
        scheduler.workers[A].status = then
    workers.is_back(A, "paused" if then is Status.paused else "running")
    assert scheduler.workers[A].status is then


@pytest.mark.parametrize("before", [Status.running, Status.paused])
def test_the_runtime_goes_off_while_a_worker_is_silent(scheduler: Scheduler, before: Status) -> None:
    scheduler.workers[A].status = before
    workers = silent(scheduler)
    workers.hold(A)
    assert scheduler.workers[A].status is Status.paused
    workers.close()
    assert scheduler.workers[A].status is before
    assert A not in workers


# ---- calls -------------------------------------------------------------------------------------------


class FakeScheduler:
    """Call handlers of workers that answer, fail, or never answer."""

    def rpc(self, worker: str) -> Any:
        async def handler(**message: Any) -> Any:
            if worker == "fails":
                raise ValueError("its handler raised")
            if worker == "stopped":
                await asyncio.Event().wait()
            return message

        return SimpleNamespace(handler=handler)


def test_a_worker_that_fails_or_does_not_answer_leaves_the_answers_of_others() -> None:
    scheduler: Any = FakeScheduler()
    workers = ["stopped", "fails", "well"]
    replies = asyncio.run(ask_all(scheduler, workers, "handler", 0.01, token="t"))
    assert list(replies) == workers
    assert isinstance(replies["stopped"], TimeoutError)
    assert isinstance(replies["fails"], ValueError)
    assert replies["well"] == {"token": "t"}


def test_what_a_worker_has_told_of_an_earlier_runtime_does_not_count() -> None:
    worker: Any = SimpleNamespace(metrics={})
    assert heartbeat_of(worker, "now") is None
    worker.metrics[HEARTBEAT_METRIC] = {"token": "before", "memory": {}}
    assert heartbeat_of(worker, "now") is None
    worker.metrics[HEARTBEAT_METRIC] = {"token": "now", "memory": {}}
    assert heartbeat_of(worker, "now") == {"token": "now", "memory": {}}


# ---- the devices of workers ------------------------------------------------------------------------


def test_workers_with_a_gpu_are_known_until_they_leave(scheduler: Any) -> None:
    """Local files stay on these alone."""
    workers = Workers(scheduler, b"", "token", silent(scheduler))
    workers.note_devices(A, ["host"])
    workers.note_devices(B, ["host", "cuda"])
    assert workers.with_gpu == {B}
    workers.remove(B)
    workers.note_devices(A, ["cuda"])  # another worker at that address
    assert workers.with_gpu == {A}
    workers.note_devices(A, ["host"])
    assert workers.with_gpu == set()
