"""Detect a host by a fake NVML, and by files as the kernel provides them."""

from __future__ import annotations

import re
from itertools import combinations, product
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.topology import Link, Place, Topology, hosts
from dask_gpurt.topology.hosts import Host
from tests.helpers.fake_nvml import FakeGpu, FakeNvml, cut_up, pcie_only, switched


def host(library: FakeNvml) -> Host:
    return hosts.discover(library)


def links(found: Host) -> list[list[str]]:
    """Return the matrix of the links between GPUs."""
    return [
        [str(found.joins.get(frozenset((one.id, other.id)), Link.SAME_DEVICE)) for other in found.gpus]
        for one in found.gpus
    ]


def joined(found: Host, *visible: str | None) -> Topology:
    """Add a worker for each of ``CUDA_VISIBLE_DEVICES``, named after its number."""
    topology = Topology()
    for number, devices in enumerate(visible):
        topology.add(str(number), hosts.own_place(found, devices, on_gpu=True, rdma=False))
    topology.describe(hosts.here(), found.joins)
    return topology


# ---- hosts ---------------------------------------------------------------------------


def test_four_gpus_and_a_switch() -> None:
    found = host(switched())
    assert links(found) == [
        ["same-device" if row == column else "nvlink" for column in range(4)] for row in range(4)
    ]
    assert joined(found, "0", "1").link("0", "1") == Link.NVLINK


def test_gpus_on_pcie_alone() -> None:
    found = host(pcie_only())
    assert links(found)[0] == ["same-device", *3 * ["pcie"]]


def test_gpus_that_may_not_read_each_other() -> None:
    found = host(pcie_only(peers=False))
    assert links(found)[0] == ["same-device", *3 * ["shared-memory"]]
    assert joined(found, "0", "1").link("0", "1") == Link.SHARED_MEMORY


def test_instances_of_mig_have_no_peers() -> None:
    found = host(cut_up())
    assert links(found) == [
        ["same-device" if row == column else "shared-memory" for column in range(3)] for row in range(3)
    ]
    assert [gpu.index for gpu in found.gpus] == [0, 0, 1]
    topology = joined(found, "MIG-2222", "MIG-1111", "1", "0")
    assert topology.link("0", "1") == topology.link("1", "2") == Link.SHARED_MEMORY
    assert topology.link("1", "3") == Link.SAME_DEVICE  # a number means the first instance


def test_an_old_driver_that_knows_less() -> None:
    class Old(FakeNvml):
        def __getattribute__(self, name: str) -> object:
            known = ("Count", "HandleByIndex", "UUID")
            if name.startswith("nvmlDevice") and not name.endswith(known):
                raise AttributeError(name)
            return super().__getattribute__(name)

    found = host(Old(switched().gpus))
    assert len(found.gpus) == 4
    assert links(found)[0] == ["same-device", *3 * ["shared-memory"]]


# ---- visible devices -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "index"),
    [
        (None, 0),
        ("2", 2),
        ("3,1,0,2", 3),
        (" 1 ,0", 1),
        (FakeGpu(2).uuid, 2),
        (FakeGpu(1).uuid[:8] + ",0", 1),
        (FakeGpu(3).uuid.lower(), 3),
        ("", None),
        ("-1", None),
        ("7", None),
        ("GPU-unheard-of,0", None),  # CUDA stops at the first missing device
        (",0", None),
    ],
)
def test_the_first_visible_device_counts(visible: str | None, index: int | None) -> None:
    found = host(switched()).find(visible)
    assert (found.index if found else None) == index


def test_a_process_without_gpu_is_on_the_host() -> None:
    found = host(switched())
    place = hosts.own_place(found, "0", on_gpu=False, rdma=True)
    assert place == Place(hosts.here())
    assert hosts.own_place(found, "1", on_gpu=True, rdma=True).device == FakeGpu(1).uuid


# ---- the operating system ------------------------------------------------------------


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Write a /sys with one InfiniBand device up and one down."""
    for name, text in {
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


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
    assert hosts.memory_of_host(FakeNvml(gpus), coherent) == total - kilobytes * 1024


def test_without_nvml_all_memory_is_the_hosts(coherent: Path) -> None:
    assert hosts.memory_of_host(None, coherent) == psutil.virtual_memory().total


def test_only_devices_for_rdma_that_are_up_count(sys: Path, tmp_path: Path) -> None:
    assert hosts.has_rdma(sys)
    assert not hosts.has_rdma(tmp_path / "nothing")
    (sys / "class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert not hosts.has_rdma(sys)
    for asked, there in product((True, False), repeat=2):
        place = hosts.own_place(Host(rdma=there), None, on_gpu=False, rdma=asked)
        assert place.rdma == (asked and there)


@given(st.sets(st.frozensets(st.integers(0, 6), min_size=2, max_size=2)))
def test_each_pair_with_an_nvlink_is_known(cables: set[frozenset[int]]) -> None:
    ends = {i: [j for cable in cables if i in cable for j in cable - {i}] for i in range(7)}
    found = host(FakeNvml([FakeGpu(i, list(ends[i])) for i in range(7)]))
    topology = joined(found, *map(str, range(7)))
    for one, other in combinations(range(7), 2):
        nvlinked = topology.link(str(one), str(other)) == Link.NVLINK
        assert nvlinked == (frozenset((one, other)) in cables)


def test_pynvml_has_what_is_asked_of_it() -> None:
    pynvml = pytest.importorskip("pynvml")
    # Not what is asked of distributed.diagnostics.nvml.
    asked = set(re.findall(r"(?<!\bnvml\.)\b(?:nvml[A-Z]|NVML|c_nvml)\w+", Path(hosts.__file__).read_text()))
    assert len(asked) > 10
    assert {name for name in asked if not hasattr(pynvml, name)} == set()
