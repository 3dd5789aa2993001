"""Trials of links: what is on this host, and GPUs of a CUDA that is played."""

from __future__ import annotations

import importlib.util
import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.topology import Link
from dask_gpurt.topology.discover import discover
from dask_gpurt.topology.file import load
from dask_gpurt.topology.hosts import Host, Nic
from dask_gpurt.topology.measure import NIC_SHARE, measure
from dask_gpurt.topology.measure_gpu import LARGE, measure_gpus
from tests.helpers.commands import run
from tests.helpers.fake_nvml import FakeGpu, pcie_only, switched


def topology(*arguments: str | Path, code: int = 0, **settings: str) -> Any:
    return run(sys.executable, "-m", "dask_gpurt", "topology", *arguments, code=code, **settings)


# ---- this host -----------------------------------------------------------------------


def test_this_host_is_measured_and_the_file_is_read_back(tmp_path: Path) -> None:
    done = topology("--measure", "--json")
    file = tmp_path / "measured.json"
    file.write_text(done.stdout)
    speeds = load(file).speeds
    assert {Link.SHARED_MEMORY, Link.TCP, Link.DISK} <= set(speeds)
    assert all(1e6 < speed.bandwidth < 1e14 and speed.latency < 1 for speed in speeds.values())
    again = topology("--load", file, "--json")
    assert json.loads(again.stdout) == json.loads(done.stdout)


def test_a_slow_nic_limits_tcp() -> None:
    assert measure(Host("x", nics=(Nic("eth0", 1e6),)))[Link.TCP].bandwidth == 1e6 * NIC_SHARE


def test_the_page_shows_the_matrix(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(
        "{version: 1, hosts: {dgx: {gpus: [{id: GPU-a}, {id: GPU-b}], "
        "links: [[same-device, nvlink x18], [nvlink x18, same-device]], nics: [{name: ib0, rdma: true}]}}, "
        "workers: {alice: {host: dgx, gpu: GPU-b}}, speeds: {tcp: {bandwidth: 7 GB/s, latency: 1 ms}}}"
    )
    shown = topology("--load", file, COLUMNS="120").stdout
    for text in (
        "dgx",
        "2 GPUs",
        "ib0 RDMA",
        "nvlink x18",
        "GPU-b",
        "alice",
        "7 GB/s",
        "391 GB/s",
        "by default",
    ):
        assert text in shown


def test_it_says_why_no_gpu_is_found() -> None:
    shown = topology(DASK_DISTRIBUTED__DIAGNOSTICS__NVML="False").stdout
    assert ("nvml' is false" if importlib.util.find_spec("pynvml") else "not installed") in shown


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--load", "nowhere.yaml"), 1, "nowhere.yaml can not be read"),
        (("--measure", "--load", "x"), 2, "give one"),
        (("--scheduler", "tcp://127.0.0.1:1"), 1, "no scheduler answers at tcp://127.0.0.1:1"),
    ],
)
def test_commands_that_can_not_be_served(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = topology(*arguments, code=code, DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT="1s")
    assert said in done.stderr


def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text("version: 1\nspeeds:\n  tcp: {bandwidth: -1, latency: 0}\n")
    assert "topology.yaml, line 3: a bandwidth is -1" in topology("--load", file, code=1).stderr


# ---- GPUs ----------------------------------------------------------------------------


class FakeRuntime:
    """CUDA for the GPUs of a fake NVML, in some order: copies last as long as their ends say."""

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
    assert LARGE / found[Link.NVLINK].bandwidth > 100 * found[Link.NVLINK].latency


def test_without_a_gpu_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert measure_gpus(Host("x"), lambda action: 1.0) == {}
    played(monkeypatch, FakeRuntime([], rate))
    assert measure_gpus(Host("x"), lambda action: 1.0) == {}
