"""Guard the allocations of a device while other libraries set its resource, with a fake of rmm.

An engine of cudf-polars sets a resource of its own when it starts and when it gets new options.
"""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest


class Resource:
    """Allocate up to a limit, as a pool does."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0

    def allocate(self, nbytes: int) -> None:
        if self.used + nbytes > self.limit:
            raise MemoryError(f"{nbytes} bytes")
        self.used += nbytes

    def deallocate(self, nbytes: int) -> None:
        self.used -= nbytes


class Adaptor:
    """Allocate from another resource; counts the bytes."""

    def __init__(self, upstream_mr: Any):
        self.upstream_mr = upstream_mr
        self.used = 0

    def allocate(self, nbytes: int) -> None:
        self.upstream_mr.allocate(nbytes)
        self.used += nbytes

    def deallocate(self, nbytes: int) -> None:
        self.upstream_mr.deallocate(nbytes)
        self.used -= nbytes


class StatisticsResourceAdaptor(Adaptor):
    """Count bytes in total, and relative to when counters were pushed."""

    def __init__(self, upstream_mr: Any):
        super().__init__(upstream_mr)
        #: The bytes at each push, and the peak since.
        self._pushed: list[list[int]] = []

    @property
    def allocation_counts(self) -> SimpleNamespace:
        return SimpleNamespace(current_bytes=self.used)

    def push_counters(self) -> None:
        self._pushed.append([self.used, 0])

    def pop_counters(self) -> SimpleNamespace:
        return SimpleNamespace(peak_bytes=self._pushed.pop()[1])

    def allocate(self, nbytes: int) -> None:
        super().allocate(nbytes)
        for counters in self._pushed:
            counters[1] = max(counters[1], self.used - counters[0])


class FailureCallbackResourceAdaptor(Adaptor):
    """Call back on failures, and retry as long as the callback says so."""

    def __init__(self, upstream_mr: Any, callback: Callable[[int], bool]):
        super().__init__(upstream_mr)
        self._callback = callback

    def allocate(self, nbytes: int) -> None:
        while True:
            try:
                return super().allocate(nbytes)
            except MemoryError:
                if not self._callback(nbytes):
                    raise


class FakeRmm:
    """Stand in for the module ``rmm``, with one resource on device 0.

    ``mr``: its module ``rmm.mr``.
    """

    def __init__(self, first: Any):
        self._current = {0: first}
        self.mr = SimpleNamespace(
            FailureCallbackResourceAdaptor=FailureCallbackResourceAdaptor,
            StatisticsResourceAdaptor=StatisticsResourceAdaptor,
            get_per_device_resource=self._current.__getitem__,
            set_per_device_resource=self._current.__setitem__,
        )

    @property
    def current(self) -> Any:
        """Return the current resource of the device."""
        return self._current[0]

    def set_current(self, resource: Any) -> None:
        """Set a resource, as another library does."""
        self._current[0] = resource


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
