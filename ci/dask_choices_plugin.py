"""A pytest plugin that runs the tests of distributed's own scheduler with our placement.

Every scheduler in these tests gets a placement with the same knowledge as Dask: Dask's one bandwidth for all
links, the latency of TCP, and the memory that Dask counts. Tests with intentionally different choices are
listed in ``EXPECTED``, with the reason.

``GPURT_SUITE_BASELINE=1`` leaves placement off: tests that fail then fail in Dask itself.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler, SchedulerPlugin, utils_test

from dask_gpurt.memory.ledger import ClusterMemory
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import LedgerHeadroom, Placement
from dask_gpurt.topology import SHIPPED, Link, Speed, Topology

BASELINE = os.environ.get("GPURT_SUITE_BASELINE") == "1"

#: Reasons for intentionally different choices, by part of the test's node id. They depend on timing.
EXPECTED: dict[str, str] = {
    "::test_decide_worker_coschedule_order_neighbors": (
        "an idle worker takes a task with one input of 800 bytes from a busy one: Dask sends no such input"
    ),
    "::test_steal_more_attractive_tasks": (
        "tasks of known length go to idle workers when they arrive, so that the one to be stolen is there"
    ),
}

_metrics: list[Metrics] = []


class _OneSpeed(Topology):
    """Give all links Dask's current estimate of the bandwidth."""

    def __init__(self, scheduler: Any):
        super().__init__()
        self._scheduler = scheduler

    def way(self, source: str, target: str, by_comms: bool = False) -> tuple[Link, Speed]:
        return Link.RDMA, Speed(self._scheduler.bandwidth, SHIPPED[Link.TCP].latency)


class _Events(SchedulerPlugin):
    """Forward scheduler events to a placement for which Dask has no other hook."""

    name = "gpurt-placement"

    def __init__(self, placement: Placement):
        self.placement = placement

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        self.placement.on_worker_removed(worker)


_start = Scheduler.start_unsafe


async def _start_with_placement(scheduler: Any) -> Any:
    started = await _start(scheduler)
    metrics = Metrics()
    _metrics.append(metrics)
    placement = Placement(
        scheduler, _OneSpeed(scheduler), LedgerHeadroom(ClusterMemory(), scheduler.workers), metrics
    )
    placement.bind()
    scheduler.add_plugin(_Events(placement))
    return started


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    for name in ("ci1", "memray", "ipython", "leaking", "workerstate", "slow", "gpu", "flaky"):
        config.addinivalue_line("markers", name)
    # Certificates are beside the tests, which an installed distributed does not contain.
    utils_test.certs_dir = str(Path(config.rootpath) / "distributed" / "tests")
    if not BASELINE:
        Scheduler.start_unsafe = _start_with_placement


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.option.runslow:
            item.add_marker(pytest.mark.skip(reason="slow"))
        why = next((why for test, why in EXPECTED.items() if test in item.nodeid), None)
        if why is not None and not BASELINE:
            item.add_marker(pytest.mark.xfail(reason=why))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    decisions, fallbacks = 0.0, Counter[str]()
    for metrics in _metrics:
        found = metrics.snapshot()
        decisions += found["counters"].get("placement.decisions", 0)
        for what, known in found["fallbacks"].items():
            fallbacks[f"{what}: {known['reason']}"] += known["count"]
    terminalreporter.write_line(
        f"{decisions:.0f} decisions were ours, fallbacks: {dict(fallbacks) or 'none'}"
    )
