"""``dask gpurt topology``, as a user types it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dask_gpurt.topology import Link
from dask_gpurt.topology.file import load
from tests.helpers.commands import run
from tests.helpers.shared_memory import alone_in_shm


def topology(*arguments: str | Path, code: int = 0, **settings: str) -> Any:
    return run(sys.executable, "-m", "dask_gpurt", "topology", *arguments, code=code, **settings)


def test_this_host_is_measured_and_the_file_is_read_back(tmp_path: Path) -> None:
    with alone_in_shm():
        done = topology("--measure", "--json")
    file = tmp_path / "measured.json"
    file.write_text(done.stdout)
    speeds = load(file).speeds
    assert {Link.SHARED_MEMORY, Link.TCP, Link.DISK} <= set(speeds)
    assert all(1e6 < speed.bandwidth < 1e14 and speed.latency < 1 for speed in speeds.values())
    again = topology("--load", file, "--json")
    assert json.loads(again.stdout) == json.loads(done.stdout)


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
