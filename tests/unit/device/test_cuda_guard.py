"""Guard the allocations of a device while other libraries set its resource, with a fake of rmm.

An engine of cudf-polars sets a resource of its own when it starts and when it gets new options.
"""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fake_rmm import Adaptor, FakeRmm, Resource

MODULE = "dask_gpurt.device.cuda_guard"


class Cluster:
    """Hold the current resource of a device, a guard of it, and spilled bytes.

    ``spillable``: bytes that can be spilled once, from any resource.
    ``failures``: the requests that the guard was called for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: Any):
        self.rmm = FakeRmm(first)
        monkeypatch.setitem(sys.modules, "rmm", self.rmm)
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        self.module: Any = importlib.import_module(MODULE)
        self.spillable: list[tuple[Any, int]] = []
        self.failures: list[int] = []

    def enable(self) -> Any:
        return self.module.ResourceGuard(0, self._spill)

    def _spill(self, nbytes: int) -> bool:
        self.failures.append(nbytes)
        if not self.spillable:
            return False
        resource, spilled = self.spillable.pop()
        resource.deallocate(spilled)
        return True


@pytest.fixture
def first() -> Resource:
    return Resource(100)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, first: Resource) -> Iterator[Cluster]:
    yield Cluster(monkeypatch, first)
    sys.modules.pop(MODULE, None)


def test_a_failed_allocation_spills_and_is_tried_again(cluster: Cluster, first: Resource) -> None:
    guard = cluster.enable()
    cluster.rmm.current.allocate(60)
    assert (guard.allocated(), guard.peak(), guard.peak()) == (60, 60, 0)
    cluster.spillable.append((cluster.rmm.current, 60))
    cluster.rmm.current.allocate(70)
    assert (cluster.failures, first.used, guard.allocated()) == ([70], 70, 70)
    with pytest.raises(MemoryError):
        cluster.rmm.current.allocate(40)
    guard.remove()
    assert cluster.rmm.current is first


def test_the_resource_of_an_engine_that_starts_later_is_guarded_too(cluster: Cluster) -> None:
    guard = cluster.enable()
    ours = cluster.rmm.current
    ours.allocate(30)
    engine = Adaptor(Resource(50))
    cluster.rmm.set_current(engine)
    guard.renew()
    assert cluster.rmm.current.below is engine
    cluster.rmm.current.allocate(40)
    cluster.spillable.append((cluster.rmm.current, 40))
    cluster.rmm.current.allocate(45)
    assert cluster.failures == [45]
    assert engine.used == 45  # the engine's own account stays right
    assert guard.allocated() == 30 + 45
    assert guard.peak() == 30 + 45
    guard.renew()
    assert cluster.rmm.current.below is engine  # once


def test_disabled_the_engine_keeps_its_resource(cluster: Cluster, first: Resource) -> None:
    guard = cluster.enable()
    engine = Resource(50)
    cluster.rmm.set_current(engine)
    guard.renew()
    guard.remove()
    assert cluster.rmm.current is engine
    guard.renew()  # a poll that comes late
    assert cluster.rmm.current is engine
    assert guard.allocated() == 0


def test_disabled_before_the_engine_was_seen_its_resource_stays(cluster: Cluster) -> None:
    guard = cluster.enable()
    engine = Resource(50)
    cluster.rmm.set_current(engine)
    guard.remove()
    assert cluster.rmm.current is engine


def test_a_resource_over_ours_is_not_guarded_again_and_stays(cluster: Cluster) -> None:
    guard = cluster.enable()
    engine = Adaptor(cluster.rmm.current)
    cluster.rmm.set_current(engine)
    guard.renew()
    assert cluster.rmm.current is engine
    engine.allocate(60)
    assert guard.allocated() == 60  # once
    guard.remove()
    assert cluster.rmm.current is engine
    with pytest.raises(MemoryError):
        engine.allocate(60)
    assert cluster.failures == []  # the guard below is inactive


def test_a_library_that_sets_a_resource_for_a_while_gives_ours_back(cluster: Cluster) -> None:
    guard = cluster.enable()
    ours = cluster.rmm.current
    cluster.rmm.set_current(Resource(50))
    guard.renew()
    cluster.rmm.set_current(ours)  # as cudf-polars does after a query without a cluster
    guard.renew()
    assert cluster.rmm.current is ours
    ours.allocate(10)
    assert guard.allocated() == 10


def test_the_resource_of_an_engine_that_has_ended_is_not_kept(cluster: Cluster) -> None:
    guard = cluster.enable()
    engine = Resource(50)
    cluster.rmm.set_current(engine)
    guard.renew()
    cluster.rmm.current.allocate(5)
    ended, through = weakref.ref(engine), cluster.rmm.current
    cluster.rmm.set_current(Resource(50))
    guard.renew()
    assert guard.allocated() == 5  # of data that outlive the engine
    through.deallocate(5)
    del engine, through
    guard.renew()
    gc.collect()
    assert ended() is None
    assert guard.allocated() == 0


def test_of_two_guards_the_first_may_end_first(cluster: Cluster, first: Resource) -> None:
    one, other = cluster.enable(), cluster.enable()
    one.remove()
    assert cluster.rmm.current.guard is other
    cluster.rmm.current.allocate(60)
    assert other.allocated() == 60
    other.remove()
    assert cluster.rmm.current is first


def test_switched_on_again_after_an_engine_has_started(cluster: Cluster, first: Resource) -> None:
    cluster.enable().remove()
    engine = Resource(50)
    cluster.rmm.set_current(engine)
    guard = cluster.enable()
    assert cluster.rmm.current.below is engine
    guard.remove()
    assert cluster.rmm.current is engine
