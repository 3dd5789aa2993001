"""Add threads to a pool, tell where a task may run, and whether a computation is local."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from dask.dataframe.dask_expr._shuffle import Shuffle
from distributed.scheduler import SchedulerState, decide_worker
from distributed.threadpoolexecutor import ThreadPoolExecutor, secede
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.dask_hooks.computing import runs_locally
from dask_gpurt.dask_hooks.patch import PatchSet
from dask_gpurt.dask_hooks.scheduler import allowed_workers, unpaused_later
from dask_gpurt.dask_hooks.worker import widen_pool
from tests.helpers.examples import examples
from tests.helpers.waiting import LIMIT_S, until


def test_a_pool_that_is_widened_twice_within_a_second_keeps_its_thread() -> None:
    """As by switching off and on: threads take up to a second to notice that they are to end."""
    pool, go_on, later = ThreadPoolExecutor(1), threading.Event(), list[Future[Any]]()
    worker: Any = SimpleNamespace(executors={"default": pool})
    restore = widen_pool(worker, 1)
    both = threading.Barrier(2)
    for each in [pool.submit(both.wait, LIMIT_S) for _ in range(2)]:
        each.result(LIMIT_S)
    restore()
    widen_pool(worker, 1)()
    first = pool.submit(go_on.wait, LIMIT_S)
    until(lambda: len(pool._threads) == 1)
    first.add_done_callback(lambda _: later.append(pool.submit(int, 7)))  # before its thread takes the next
    go_on.set()
    until(lambda: bool(later))
    assert later[0].result(10) == 7
    pool.shutdown()


def test_threads_that_secede_after_a_pool_is_narrowed_do_not_leave_it_empty() -> None:
    pool = ThreadPoolExecutor(1)
    worker: Any = SimpleNamespace(executors={"default": pool})
    restore = widen_pool(worker, 1)
    begun, go_on = threading.Barrier(3), [threading.Event(), threading.Event()]

    def task(number: int) -> None:
        begun.wait(LIMIT_S)
        go_on[number].wait(LIMIT_S)
        if number == 0:
            secede()

    tasks = [pool.submit(task, number) for number in range(2)]
    begun.wait(LIMIT_S)
    restore()
    waiting = pool.submit(int)
    go_on[0].set()
    tasks[0].result(LIMIT_S)
    go_on[1].set()
    assert waiting.result(LIMIT_S) == 0
    pool.shutdown()


# ---- workers that a task may run on ---------------------------------------------------------------

NAMES = ["a:1", "a:2", "b:1", "c:1"]
HOSTS = ["a", "b", "c"]


@dataclass(frozen=True)
class Named:
    """Stand for a worker."""

    address: str


@dataclass(eq=False)
class Cluster:
    """Hold what Dask's own method reads of a scheduler."""

    workers: dict[str, Any]
    running: set[Any]
    resources: dict[str, dict[str, float]]
    host_info: dict[str, Any] = field(default_factory=dict)

    valid_workers = SchedulerState.valid_workers

    def coerce_hostname(self, host: str) -> str:
        return host.removeprefix("alias-of-")

    def resume(self) -> Cluster:
        return Cluster(self.workers, set(self.workers.values()), self.resources, self.host_info)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    workers = {name: Named(name) for name in draw(st.sets(st.sampled_from(NAMES)))}
    running = {ws for ws in workers.values() if draw(st.integers(0, 3))}
    have = {name: float(draw(st.integers(0, 2))) for name in workers if draw(st.booleans())}
    hosts = {host: {"addresses": {n for n in workers if n.startswith(host)}} for host in HOSTS}
    return Cluster(
        workers, running, {"GPU": have}, {h: info for h, info in hosts.items() if info["addresses"]}
    )


tasks = st.builds(
    SimpleNamespace,
    worker_restrictions=st.none() | st.sets(st.sampled_from([*NAMES, "gone:1"])),
    host_restrictions=st.none() | st.sets(st.sampled_from([*HOSTS, "alias-of-a", "nowhere"])),
    resource_restrictions=st.none() | st.just({"GPU": 1.0}) | st.just({"GPU": 1.0, "none has it": 1.0}),
    loose_restrictions=st.booleans(),
    dependencies=st.just(()),
    actor=st.just(False),
)


def chosen_by_dask(cluster: Cluster, task: Any) -> set[Any]:
    """Return the workers that Dask chooses, depending on which it likes best."""
    valid = cluster.valid_workers(task)
    found = {
        decide_worker(task, set(cluster.running), valid, lambda ws, best=best: ws is not best)
        for best in cluster.running
    }
    return found - {None}


@examples(60)
@given(cluster=clusters(), task=tasks)
def test_the_workers_that_a_task_may_run_on_are_those_that_dask_chooses(cluster: Cluster, task: Any) -> None:
    allowed: Any = allowed_workers(cluster, task)  # type: ignore[arg-type]
    assert chosen_by_dask(cluster, task) == (cluster.running if allowed is None else allowed)


@examples(60)
@given(cluster=clusters(), task=tasks)
def test_the_workers_that_it_may_run_on_later_are_those_if_none_were_paused(
    cluster: Cluster, task: Any
) -> None:
    task.loose_restrictions = False
    if (now := cluster.valid_workers(task)) is not None:
        later = unpaused_later(cluster, task)  # type: ignore[arg-type]
        assert later >= now
        assert chosen_by_dask(cluster.resume(), task) == later


# ---- computations that go to a scheduler of this process ------------------------------------------

FRAME = pd.DataFrame({"key": [1, 2, 3, 4], "row": range(4)})


@pytest.fixture
def heard() -> Any:
    """Return a list that records ``runs_locally()`` whenever a shuffle is lowered."""
    said: list[bool] = []
    patches = PatchSet()

    def listening(original: Any) -> Any:
        def lower(expr: Any) -> Any:
            said.append(runs_locally())
            return original(expr)

        return lower

    patches.put(Shuffle, "_lower", listening)
    yield said
    patches.restore()


@pytest.mark.parametrize("scheduler", ["sync", "threads", dask.get])
def test_a_computation_on_a_scheduler_of_this_process_is_local(heard: list[bool], scheduler: Any) -> None:
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        shuffled = dd.from_pandas(FRAME, npartitions=2).shuffle("key")
        for compute in (dask.compute, dask.persist, type(shuffled).compute, type(shuffled).persist):
            heard.clear()
            compute(shuffled, scheduler=scheduler)
            assert set(heard) == {True}


def test_planning_alone_is_not_local(heard: list[bool]) -> None:
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        dd.from_pandas(FRAME, npartitions=2).shuffle("key").optimize()
    assert set(heard) == {False}
