"""Measure links: those of this host, and those of a fake CUDA's GPUs."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dask_gpurt.topology import Link
from dask_gpurt.topology.detect import discover
from dask_gpurt.topology.hosts import Host, Nic
from dask_gpurt.topology.measure import LARGE_COPY_BYTES, NIC_SHARE, measure, measure_gpus
from tests.helpers.fake_nvml import FakeGpu, pcie_only, switched
from tests.helpers.shared_memory import alone_in_shm

# ---- this host -----------------------------------------------------------------------


def test_a_slow_nic_limits_tcp() -> None:
    with alone_in_shm():
        found = measure(Host("x", nics=(Nic("eth0", 1e6),)))
    assert found[Link.TCP].bandwidth == 1e6 * NIC_SHARE


# ---- GPUs ----------------------------------------------------------------------------


class FakeRuntime:
    """Fake CUDA for the GPUs of a fake NVML, in some order: the ends of a copy determine its duration."""

    memcpyDefault = 4

    def __init__(self, order: list[int], rates: Callable[[str, str], float]):
        self.order, self.rates = order, rates
        self.seconds = 0.0
        self.device = 0
        self.live: dict[int, str] = {}
        self._next = 1

    def _take(self, where: str) -> int:
        self._next += 1
        self.live[self._next] = where
        return self._next

    def getDeviceCount(self) -> int:
        return len(self.order)

    def getDeviceProperties(self, device: int) -> dict[str, bytes]:
        return {"uuid": uuid.UUID(FakeGpu(self.order[device]).uuid.removeprefix("GPU-")).bytes}

    def deviceCanAccessPeer(self, here: int, there: int) -> bool:
        return True

    def setDevice(self, device: int) -> None:
        self.device = device

    def malloc(self, nbytes: int) -> int:
        return self._take(str(self.order[self.device]))

    def free(self, pointer: int) -> None:
        del self.live[pointer]

    def hostAlloc(self, nbytes: int, flags: int) -> int:
        return self._take("pinned")

    freeHost = free

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        ends = (self.live.get(source, "pageable"), self.live.get(target, "pageable"))
        self.seconds = 10e-6 + nbytes / self.rates(*ends)

    def streamSynchronize(self, stream: int) -> None:
        pass

    def best(self, action: Callable[[], object]) -> float:
        action()
        return self.seconds


def played(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))


def rate(source: str, target: str) -> float:
    if "pinned" in (source, target):
        return 50e9
    if "pageable" in (source, target):
        return 10e9
    return 2e12 if source == target else 100e9 / (1 + abs(int(source) - int(target)))


def test_each_class_of_link_has_the_speed_of_its_slowest_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime([3, 0, 2, 1], rate)
    played(monkeypatch, runtime)
    found = measure_gpus(discover(pcie_only()), runtime.best)
    assert {link: pytest.approx(speed.bandwidth, rel=1e-6) for link, speed in found.items()} == {
        Link.SAME_DEVICE: 2e12,
        Link.PINNED: 50e9,
        Link.PAGEABLE: 10e9,
        Link.PCIE: 25e9,
    }
    assert found[Link.PCIE].latency == pytest.approx(10e-6, rel=1e-3)
    assert runtime.live == {}


def test_only_gpus_that_cuda_shows_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime([1, 2], rate)
    played(monkeypatch, runtime)
    found = measure_gpus(discover(switched()), runtime.best)
    assert found[Link.NVLINK].bandwidth == pytest.approx(50e9, rel=1e-6)
    assert LARGE_COPY_BYTES / found[Link.NVLINK].bandwidth > 100 * found[Link.NVLINK].latency


def test_without_a_gpu_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert measure_gpus(Host("x"), lambda action: 1.0) == {}
    played(monkeypatch, FakeRuntime([], rate))
    assert measure_gpus(Host("x"), lambda action: 1.0) == {}
