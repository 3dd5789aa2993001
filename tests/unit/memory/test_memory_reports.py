"""Limit how often a worker reports its tiers to the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.memory.ledger import Ledger, Tier
from dask_gpurt.worker.reports import REPORT_INTERVAL_S, MemoryReporter


class FakeWorker:
    """Record messages and delayed calls; the test decides when a call happens."""

    def __init__(self, heartbeat: float):
        self.metrics: dict[str, Any] = {}
        self.periodic_callbacks = {"heartbeat": SimpleNamespace(callback_time=heartbeat * 1000)}
        self.sent: list[Any] = []
        self.batched_stream = SimpleNamespace(send=self.sent.append)
        self.waiting: list[tuple[float, Callable[[], None]]] = []
        self.loop = SimpleNamespace(
            add_callback=lambda call: call(), call_later=lambda *call: self.waiting.append(call)
        )

    def wait(self) -> float:
        """Run the next delayed call; returns its delay."""
        delay, call = self.waiting.pop()
        call()
        return delay


@pytest.mark.parametrize(("heartbeat", "pause"), [(0.5, REPORT_INTERVAL_S), (2.28, 0.228)])
def test_the_larger_the_cluster_the_rarer_the_messages_of_busy_workers(
    heartbeat: float, pause: float
) -> None:
    worker, ledger = FakeWorker(heartbeat), Ledger(dict.fromkeys(Tier, 100))
    reporter = MemoryReporter(worker, ledger)

    def change(nbytes: int) -> float:
        for kind in ("partitions", "shards"):
            ledger.set(Tier.HOST, kind, nbytes)
            reporter.changed()
        return worker.wait()

    assert change(1) == REPORT_INTERVAL_S  # a change after a long silence is reported at once
    assert change(2) == pytest.approx(pause, abs=0.02)
    assert [message["cells"] for message in worker.sent] == [
        [["host", "partitions", nbytes], ["host", "shards", nbytes]] for nbytes in (1, 2)
    ]
    assert worker.waiting == []
