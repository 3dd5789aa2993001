"""Print a topology by ``dask gpurt topology``, and explain an empty one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner, Result
from distributed.diagnostics import nvml

from dask_gpurt.cli import main
from dask_gpurt.topology import Link


def topology(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["topology", *map(str, arguments)])


def test_the_page_shows_the_matrix(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(
        "{version: 1, hosts: {dgx: {gpus: [{id: GPU-a}, {id: GPU-b}], "
        "links: [[same-device, nvlink x18], [nvlink x18, same-device]], nics: [{name: ib0, rdma: true}]}}, "
        "workers: {alice: {host: dgx, gpu: GPU-b}}, speeds: {tcp: {bandwidth: 7 GB/s, latency: 1 ms}}}"
    )
    shown = topology("--load", file)
    assert shown.exit_code == 0
    for text in (
        "dgx",
        "2 GPUs",
        "ib0 RDMA",
        "nvlink x18",
        "GPU-b",
        "alice",
        "7 GB/s",
        "391 GB/s",
        "2,060 GB/s",
        "by default",
    ):
        assert text in shown.stdout


@pytest.mark.parametrize(
    ("hosts", "speeds", "listed"),
    [
        ("{pc: {}}", "{}", "shared-memory loopback tcp disk"),
        ("{pc: {nics: [{name: ib0, rdma: true}]}}", "{}", "shared-memory loopback rdma tcp disk"),
        ("{pc: {}}", "{pcie: {bandwidth: 9 GB/s, latency: 1 ms}}", "pcie shared-memory loopback tcp disk"),
        ("{pc: {}, dgx: {gpus: [{id: GPU-a}]}}", "{}", " ".join(link for link in Link if link != "rdma")),
        ("{}", "{}", " ".join(Link)),
    ],
)
def test_only_links_that_the_hosts_can_have_are_listed(
    hosts: str, speeds: str, listed: str, tmp_path: Path
) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(f"{{version: 1, hosts: {hosts}, speeds: {speeds}}}")
    lines = topology("--load", file).stdout.splitlines()
    rows = [words[0] for words in map(str.split, lines) if words and words[0] in list(Link)]
    assert rows == listed.split()


def test_it_says_why_no_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.util.find_spec("pynvml")
    if installed:  # Dask asks once per process
        monkeypatch.setattr(nvml, "NVML_STATE", nvml.NVMLState.UNINITIALIZED)
    with dask.config.set({"distributed.diagnostics.nvml": False}):
        shown = topology()
    assert shown.exit_code == 0
    assert ("nvml' is false" if installed else "not installed") in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--load", "nowhere.yaml"), 1, "nowhere.yaml cannot be read"),
        (("--scheduler", "tcp://127.0.0.1:1", "--load", "x"), 2, "give one"),
        (("--scheduler", "tcp://127.0.0.1:1"), 1, "no scheduler answers at tcp://127.0.0.1:1"),
    ],
)
def test_commands_that_can_not_be_served(arguments: tuple[str, ...], code: int, said: str) -> None:
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        done = topology(*arguments)
    assert done.exit_code == code
    assert said in done.stderr


def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text("version: 1\nspeeds:\n  tcp: {bandwidth: -1, latency: 0}\n")
    refused = topology("--load", file)
    assert refused.exit_code == 1
    assert "topology.yaml, line 3: a bandwidth is -1" in refused.stderr
