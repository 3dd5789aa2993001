"""Compare the workers that a task may run on with those that Dask chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from distributed.scheduler import SchedulerState, decide_worker
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.dask_hooks.scheduler import allowed_workers, unpaused_later
from tests.helpers.examples import examples

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
