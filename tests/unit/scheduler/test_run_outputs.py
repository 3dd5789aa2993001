"""Find the workers that may own the outputs of a shuffle, by the restrictions of its tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status
from distributed.scheduler import SchedulerState

from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError, ShuffleId, barrier_key
from dask_gpurt.scheduler.runs import ActiveRuns, possible_owners, require_allowed

SHUFFLE = ShuffleId("a")


class Scheduler:
    """Hold what is read of a scheduler, with Dask's own rule for restrictions."""

    valid_workers = SchedulerState.valid_workers

    def __init__(self, *workers: str, paused: str = "", **restrictions: Any) -> None:
        self.workers = {name: _Worker(name) for name in workers}
        self.running = {ws for ws in self.workers.values() if ws.address != paused}
        self.host_info: dict[str, Any] = {}
        self.resources: dict[str, Any] = {"GPU": {"a": 1.0}}
        task = {"worker_restrictions": None, "host_restrictions": None, "resource_restrictions": None}
        task |= {"key": barrier_key(SHUFFLE), "loose_restrictions": False} | restrictions
        self.tasks = {barrier_key(SHUFFLE): SimpleNamespace(**task)}

    def coerce_hostname(self, host: str) -> str:
        return host

    def owners(self) -> list[str]:
        ready = SimpleNamespace(ready=self.workers, silent=())
        spec: Any = SimpleNamespace(id=SHUFFLE, device=None)
        return possible_owners(self, ready, [spec])  # type: ignore[arg-type]


class _Worker:
    status = Status.running

    def __init__(self, address: str) -> None:
        self.address = address


@pytest.mark.parametrize(
    ("restrictions", "owners"),
    [
        ({}, ["a", "b"]),
        ({"worker_restrictions": {"b", "gone"}}, ["b"]),
        ({"worker_restrictions": {"b", "gone"}, "loose_restrictions": True}, ["b"]),
        ({"worker_restrictions": {"gone"}, "loose_restrictions": True}, ["a", "b"]),
        ({"host_restrictions": {"nowhere"}, "loose_restrictions": True}, ["a", "b"]),
        ({"resource_restrictions": {"GPU": 1}}, ["a"]),
        (
            {"worker_restrictions": {"b"}, "resource_restrictions": {"GPU": 1}, "loose_restrictions": True},
            ["a", "b"],
        ),
        ({"worker_restrictions": {"b"}, "paused": "b"}, ["b"]),
        ({"worker_restrictions": {"b"}, "paused": "b", "loose_restrictions": True}, ["a", "b"]),
        ({"worker_restrictions": {"a", "b"}, "paused": "b"}, ["a"]),
    ],
)
def test_outputs_go_to_workers_on_which_dask_would_run_them(
    restrictions: dict[str, Any], owners: list[str]
) -> None:
    scheduler = Scheduler("a", "b", **restrictions)
    require_allowed(scheduler, SHUFFLE)  # type: ignore[arg-type]
    assert scheduler.owners() == owners


def test_outputs_that_no_worker_may_run_are_refused_at_once() -> None:
    scheduler = Scheduler("a", "b", worker_restrictions={"gone"}, resource_restrictions={"TPU": 2})
    with pytest.raises(P2PConsistencyError, match=r"workers \['gone'\], resources \{'TPU': 2\}, of which"):
        require_allowed(scheduler, SHUFFLE)  # type: ignore[arg-type]


def test_both_sides_of_a_join_are_one_group() -> None:
    """A worker that leaves is replaced once for both, and not once for each."""

    class Runs(ActiveRuns):
        def __init__(self) -> None:
            self.asked: list[str] = []

        def sharing(self, shuffle: ShuffleId) -> set[ShuffleId]:
            self.asked.append(shuffle)
            return {ShuffleId(each) for each in ("left", "right")} if shuffle != "alone" else {shuffle}

    for given in (["left", "right", "alone"], ["alone", "right"]):
        runs = Runs()
        groups = runs.grouped([ShuffleId(each) for each in given])
        assert sorted(map(sorted, groups)) == [["alone"], ["left", "right"]]
        assert len(runs.asked) == 2
