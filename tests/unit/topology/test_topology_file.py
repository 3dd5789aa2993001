"""Write and read topology files, and reject invalid entries with their line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from dask_gpurt.topology import Link, Speed
from dask_gpurt.topology.detect import discover
from dask_gpurt.topology.file import (
    Description,
    TopologyError,
    as_values,
    host_values,
    load,
    parse,
    parse_host,
)
from dask_gpurt.topology.hosts import Nic
from tests.helpers.fake_nvml import bridged, cut_up, pcie_only, switched

GOOD = """\
version: 1
speeds:
  tcp: {bandwidth: 2.5 GB/s, latency: 300 us}
  rdma: {bandwidth: 5e10, latency: 0}
hosts:
  one:
    gpus:
    - id: GPU-a
    - id: GPU-b
      nvlink: {generation: 4, number: 18}
    links:
    - [same-device, nvlink x18]
    - [nvlink x18, same-device]
    nics:
    - {name: mlx5_0, speed: 50 GB/s, rdma: true}
  two: {}
workers:
  tcp://10.0.0.1:4000: {host: one, gpu: GPU-b}
  from-the-queue: {host: two}
"""


def test_a_file_as_a_person_writes_it() -> None:
    found = parse(GOOD)
    assert found.speeds == {Link.TCP: Speed(2.5e9, 300e-6), Link.RDMA: Speed(5e10, 0)}
    assert [gpu.index for gpu in found.hosts["one"].gpus] == [0, 1]
    assert found.hosts["one"].nics == (Nic("mlx5_0", 50e9, True),)
    assert found.workers == {"tcp://10.0.0.1:4000": ("one", "GPU-b"), "from-the-queue": ("two", None)}


@pytest.mark.parametrize("library", [switched(), bridged(), pcie_only(), cut_up(), switched(1)])
@pytest.mark.parametrize("write", [json.dumps, lambda values: json.dumps(values, indent=2), yaml.safe_dump])
def test_a_written_file_is_read_back(library, write, tmp_path: Path) -> None:
    host = discover(library)
    workers = {"alice": (host.name, host.gpus[-1].id), "bob": (host.name, None)}
    told = Description({Link.NVLINK: Speed(391e9, 2e-5)}, {host.name: host}, workers)
    (tmp_path / "topology.json").write_text(write(as_values(told)))
    assert load(tmp_path / "topology.json") == told
    assert parse_host(host.name, host_values(host)) == host


def test_the_file_in_the_documentation_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs/guides/topology.md").read_text()
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found = parse(example)
    (worker,) = found.workers.values()
    assert worker == ("dgx-1", found.hosts["dgx-1"].gpus[1].id)


# ---- invalid files -------------------------------------------------------------------


def wrong(old: str, new: str) -> str:
    assert old in GOOD
    with pytest.raises(TopologyError) as caught:
        parse(GOOD.replace(old, new, 1), "cluster.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("2.5 GB/s", "-2.5e9", 3, "a bandwidth is -2.5e9: expected a number of bytes per second above 0"),
        ("2.5 GB/s", "0", 3, "a bandwidth is 0"),
        ("2.5 GB/s", "nan", 3, "a bandwidth is nan"),
        ("2.5 GB/s", "fast", 3, "'fast' is not a number: expected"),
        ("300 us", "-1", 3, "a latency is -1: expected a number of seconds of at least 0"),
        ("300 us", "[1]", 3, "expected one value"),
        ("rdma: {b", "infiniband: {b", 4, "unknown link 'infiniband': expected one of same-device, nvlink"),
        (", latency: 0", "", 4, "'latency' is missing"),
        ("version: 1", "version: 2", 1, "version is 2: expected 1"),
        ("version: 1\n", "", 1, "'version' is missing"),
        ("gpu: GPU-b", "gpu: GPU-c", 18, "unknown GPU 'GPU-c': host 'one' has 'GPU-a', 'GPU-b'"),
        ("{host: two}", "{host: three}", 19, "unknown host 'three': hosts has 'one', 'two'"),
        ("- id: GPU-b", "- id: GPU-a", 9, "GPU 'GPU-a' appears twice"),
        (
            "[nvlink x18, ",
            "[pcie, ",
            13,
            "links are not symmetric: GPU-a to GPU-b is nvlink x18, but the other way it is pcie",
        ),
        ("[same-device, nvlink x18]", "[same-device]", 12, "a row of links has 1 entries for 2 GPUs"),
        ("    - [nvlink x18, same-device]\n", "", 12, "links has 1 rows for 2 GPUs"),
        ("[same-device, ", "[pcie, ", 12, "GPU-a and itself are joined by pcie, not same-device"),
        ("[same-device, nvlink x18]", "[same-device, hyperlink]", 12, "'hyperlink' is not a link"),
        (
            "    links:",
            "    matrix:",
            12,
            "unknown key 'matrix': expected one of numa-nodes, gpus, links, nics",
        ),
        ("generation: 4", "generation: four", 10, "'four' is not a whole number"),
        ("rdma: true", "rdma: perhaps", 15, "'perhaps' is neither true nor false"),
        ("  two: {}", "  one: {}", 16, "'one' appears twice"),
        ("  two: {}", "  two: []", 16, "expected keys with values"),
        ("version: 1", "version: 1: 2", 1, "neither JSON nor YAML"),
    ],
)
def test_nonsense_is_refused_with_its_line(old: str, new: str, line: int, reason: str) -> None:
    said = wrong(old, new)
    assert said.startswith(f"cluster.yaml, line {line}: ")
    assert reason in said


@pytest.mark.parametrize("text", ["", "# nothing", "[]", "3"])
def test_a_file_without_anything_in_it(text: str) -> None:
    with pytest.raises(TopologyError, match="line 1: "):
        parse(text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"nowhere\.json cannot be read: .*No such file"):
        load(tmp_path / "nowhere.json")
