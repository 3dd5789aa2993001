"""Send a barrier again to the worker that is about to report, or is just reporting, that it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dask_gpurt.scheduler.unresponsive import HELD_BACK_S
from tests.helpers.computations import Computation
from tests.helpers.stepwise import StepwiseCluster

WORKER, BARRIER = "tcp://host-0:1", "shuffle-barrier-one"


@pytest.fixture
def cluster() -> Iterator[StepwiseCluster]:
    computation = Computation(["one"], joined=False, reduced=False)
    cluster = StepwiseCluster(computation, workers=1, retries=10, pool=2**17, paths=["comms"])
    yield cluster
    cluster.close()


def go_on_until(cluster: StepwiseCluster, done: Callable[[], bool]) -> None:
    while not done():
        cluster.happen(cluster.events()[0])


def send_again(cluster: StepwiseCluster) -> int:
    """Release the barrier, as a repair does; return its new dispatch."""
    cluster.call(cluster.scheduler.recovery.rerun, [BARRIER], "processing")
    return dispatch(cluster)


def dispatch(cluster: StepwiseCluster) -> int:
    return int(cluster.scheduler.tasks[BARRIER].run_id)


def executions(cluster: StepwiseCluster) -> int:
    return cluster.story.count(f"the start of {BARRIER} on {WORKER}")


def test_it_is_sent_again_while_its_end_is_reported(cluster: StepwiseCluster) -> None:
    def is_reported() -> bool:
        reports: Any = cluster.wire.up[cluster.everyone[0]]
        return bool(reports) and (reports[0]["op"], reports[0].get("key")) == ("task-finished", BARRIER)

    go_on_until(cluster, is_reported)
    latest = send_again(cluster)
    cluster.happen_named(f"task-finished of {WORKER}")
    assert dispatch(cluster) == latest
    cluster.finish()
    assert executions(cluster) == 2


def test_it_is_sent_again_while_it_runs_and_ends_under_its_earlier_number(cluster: StepwiseCluster) -> None:
    """The worker resumes the execution that it has cancelled, and does not execute the barrier again."""
    ends = f"the end of {BARRIER} on {WORKER}"
    go_on_until(cluster, lambda: any(event.name == ends for event in cluster.events()))
    latest = send_again(cluster)
    cluster.happen_named(f"free-keys, compute-task -> {WORKER}")
    cluster.happen_named(ends)
    sealed, finished = cluster.wire.up[cluster.everyone[0]]
    assert sealed["op"] == "gpurt-sealed"
    assert finished["run_id"] < latest
    before = cluster.loop.time()
    cluster.until(lambda: dispatch(cluster) > latest)
    assert cluster.loop.time() >= before + HELD_BACK_S
    cluster.finish()
    assert executions(cluster) == 2
