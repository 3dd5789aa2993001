"""Keep the counters of workers that leave: totals that have been reported never decrease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dask_gpurt.observe import Metrics
from dask_gpurt.protocol import HEARTBEAT_METRIC
from dask_gpurt.scheduler.reports import ClusterReports

TOKEN = "of this plugin"


def snapshot(rows: int, fell_back: int = 0) -> dict[str, Any]:
    fallbacks = {"exchange.comms": {"text": "a", "reason": str(fell_back), "count": fell_back}}
    return {"counters": {"shuffle.rows": rows}, "fallbacks": fallbacks if fell_back else {}}


class FakeScheduler:
    """Answer for workers with what they were given; run a callback in the middle of each question."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}
        self.meanwhile: Callable[[], None] = lambda: None

    def join(self, worker: str, heartbeat: dict[str, Any] | None = None) -> None:
        metrics = {} if heartbeat is None else {HEARTBEAT_METRIC: {**heartbeat, "token": TOKEN}}
        self.workers[worker] = SimpleNamespace(metrics=metrics, name=worker, last_seen=0.0)

    def rpc(self, worker: str) -> Any:
        async def report(connect: bool) -> Any:
            answer = self.answers[worker]
            self.meanwhile()
            return answer

        return SimpleNamespace(gpurt_report=report)


def on_cluster(*workers: str) -> tuple[FakeScheduler, ClusterReports]:
    scheduler: Any = FakeScheduler()
    for worker in workers:
        scheduler.join(worker, snapshot(1))
    return scheduler, ClusterReports(scheduler, Metrics(), TOKEN)


def leave(scheduler: FakeScheduler, reports: ClusterReports, worker: str) -> None:
    del scheduler.workers[worker]
    reports.remove(worker)


def report(reports: ClusterReports) -> dict[str, Any]:
    return asyncio.run(reports.collect(connect=False))


def test_a_worker_that_is_killed_after_a_report_counts_as_in_the_report() -> None:
    scheduler, reports = on_cluster("a", "b")
    scheduler.answers = {"a": snapshot(50, fell_back=2), "b": snapshot(7)}
    assert report(reports)["counters"]["shuffle.rows"] == 57
    leave(scheduler, reports, "a")
    after = report(reports)
    assert after["counters"]["shuffle.rows"] == 57
    (gone,) = after["departed"]
    assert gone["counters"] == {"shuffle.rows": 50}
    assert gone["fallbacks"]["exchange.comms"]["count"] == 2
    assert 0 <= gone["silent"] < 60  # since the answer, not since the heartbeat of 1970
    assert reports.known()["counters"]["shuffle.rows"] == 57


def test_a_later_heartbeat_counts_too() -> None:
    scheduler, reports = on_cluster("a")
    scheduler.answers = {"a": snapshot(50, fell_back=2)}
    report(reports)
    scheduler.workers["a"].metrics[HEARTBEAT_METRIC] = {**snapshot(60, fell_back=3), "token": TOKEN}
    leave(scheduler, reports, "a")
    (gone,) = report(reports)["departed"]
    assert gone["counters"] == {"shuffle.rows": 60}
    assert gone["fallbacks"]["exchange.comms"]["reason"] == "3"


def test_a_worker_that_does_not_answer_counts_as_it_did_before() -> None:
    scheduler, reports = on_cluster("a")
    scheduler.answers = {"a": snapshot(50)}
    assert report(reports)["counters"]["shuffle.rows"] == 50
    scheduler.answers = {"a": OSError("stopped")}
    found = report(reports)
    assert found["workers"] == {"a": {"error": "stopped"}}
    assert found["counters"]["shuffle.rows"] == 50


def test_an_answer_of_a_worker_that_was_replaced_meanwhile_counts_once() -> None:
    """A worker answers, is killed, and its nanny starts another one at its address before the report ends."""
    scheduler, reports = on_cluster("a")
    scheduler.answers = {"a": snapshot(50)}

    def replace() -> None:
        leave(scheduler, reports, "a")
        scheduler.join("a")
        reports.add("a")

    scheduler.meanwhile = replace
    found = report(reports)
    assert found["workers"] == {}
    assert found["counters"]["shuffle.rows"] == 1  # of the heartbeat
    leave(scheduler, reports, "a")
    assert reports.known()["counters"]["shuffle.rows"] == 1
