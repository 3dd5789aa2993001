"""Compute the memory of hosts by a fake NVML, and by files as the kernel provides them."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from dask_gpurt.cli.cluster import default_workers
from dask_gpurt.device import discover
from dask_gpurt.device.discover import gpu_count
from tests.helpers.fake_nvml import FakeGpu, FakeNvml


@pytest.fixture
def coherent(tmp_path: Path) -> Path:
    """Write a /sys with a node of processors, the memory of a GPU, and memory that is behind CXL."""
    folder = tmp_path / "devices/system/node"
    for node, processors, kilobytes in ((0, "0-71", 500_000_000), (1, "", 100_000), (2, "", 300_000)):
        (folder / f"node{node}").mkdir(parents=True)
        (folder / f"node{node}/cpulist").write_text(f"{processors}\n")
        (folder / f"node{node}/meminfo").write_text(
            f"Node {node} MemTotal:       {kilobytes} kB\nNode {node} MemFree:  1 kB\n"
        )
    return tmp_path


@pytest.mark.parametrize(
    ("gpus", "kilobytes"),
    [
        ([FakeGpu(0, node=1)], 100_000),
        ([FakeGpu(0)], 0),  # most hosts: a GPU's memory is not a node
        ([FakeGpu(0, node=0)], 0),  # the node that it is attached to
        ([FakeGpu(0, node=7)], 0),
        ([FakeGpu(0, node=1), FakeGpu(1, node=2)], 400_000),
    ],
)
def test_the_memory_of_a_gpu_that_is_a_node_of_its_own_is_not_the_hosts(
    coherent: Path, gpus: list[FakeGpu], kilobytes: int
) -> None:
    total = psutil.virtual_memory().total
    assert discover.memory_of_host(FakeNvml(gpus), coherent) == total - kilobytes * 1024


def test_without_nvml_all_memory_is_the_hosts(coherent: Path) -> None:
    assert discover.memory_of_host(None, coherent) == psutil.virtual_memory().total


def test_a_driver_that_knows_no_nodes_has_all_memory_the_hosts(coherent: Path) -> None:
    class Old(FakeNvml):
        def __getattribute__(self, name: str) -> object:
            if name == "nvmlDeviceGetNumaNodeId":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert discover.memory_of_host(Old([FakeGpu(0, node=1)]), coherent) == psutil.virtual_memory().total


def test_pynvml_has_what_is_asked_of_it() -> None:
    pynvml = pytest.importorskip("pynvml")
    # Not what is asked of distributed.diagnostics.nvml.
    asked = set(
        re.findall(r"(?<!\bnvml\.)\b(?:nvml[A-Z]|NVML|c_nvml)\w+", Path(discover.__file__).read_text())
    )
    assert len(asked) > 4
    assert {name for name in asked if not hasattr(pynvml, name)} == set()


# ---- the number of workers that a cluster on this machine gets by default ----------------------------

MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


@pytest.mark.parametrize(
    ("there", "named", "visible"),
    [
        (0, None, 0),
        (0, "0,1", 0),
        (4, None, 4),
        (4, "2,3", 2),
        (4, "GPU-5a7e, 1", 2),
        (1, f"{MIG},{MIG[:-1]}e", 2),
        (4, "", 0),
        (4, "-1", 0),
    ],
)
def test_only_gpus_that_are_visible_count(
    monkeypatch: pytest.MonkeyPatch, there: int, named: str | None, visible: int
) -> None:
    monkeypatch.setattr("distributed.diagnostics.nvml.device_get_count", lambda: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpu_count() == default_workers("cudf") == visible
    assert default_workers("pandas") == 2
