"""Print a topology by ``dask gpurt topology``, and explain an empty one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from io import StringIO
from typing import Any

import dask
import pytest
from click.testing import CliRunner, Result
from distributed.diagnostics import nvml
from rich.console import Console

from dask_gpurt.cli import main
from dask_gpurt.cli import topology as command
from dask_gpurt.topology import Link
from dask_gpurt.topology.hosts import Gpu, Host, discover
from tests.helpers.fake_nvml import cut_up, pcie_only, switched


def topology(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["topology", *arguments])


SLOW = {"bandwidth": 7e9, "latency": 1e-3}


def values(hosts: Iterable[Host], speeds: dict[str, Any], workers: dict[str, Any]) -> dict[str, Any]:
    return {"hosts": {host.name: host.to_dict() for host in hosts}, "speeds": speeds, "workers": workers}


def shown(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    page = StringIO()
    monkeypatch.setattr(command, "Console", lambda **_: Console(file=page, width=120))
    command.print_topology(values, here=False)
    return page.getvalue()


@pytest.mark.parametrize("library", [switched(), pcie_only(), cut_up(), switched(1)])
def test_a_host_goes_through_json(library) -> None:
    host = discover(library)
    assert Host.of(host.name, json.loads(json.dumps(host.to_dict()))) == host


def test_the_page_shows_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    host = discover(switched(2))
    workers = {"tcp://alice:1": {"host": host.name, "gpu": host.gpus[1].id}}
    page = shown(values([host], {"tcp": SLOW}, workers), monkeypatch)
    for text in (host.name, "2 GPUs", "nvlink", host.gpus[1].id, "tcp://alice:1", "7 GB/s"):
        assert text in page
    assert "by default" in page


RDMA, GPU = Host("pc", nics=("ib0",)), Host("dgx", gpus=(Gpu("GPU-a", 0),))


@pytest.mark.parametrize(
    ("hosts", "speeds", "listed"),
    [
        ([Host("pc")], {}, "shared-memory loopback tcp disk"),
        ([RDMA], {}, "shared-memory loopback rdma tcp disk"),
        ([Host("pc")], {"pcie": SLOW}, "pcie shared-memory loopback tcp disk"),
        ([Host("pc"), GPU], {}, " ".join(link for link in Link if link != "rdma")),
        ([], {}, " ".join(Link)),
    ],
)
def test_only_links_that_the_hosts_can_have_are_listed(
    hosts: list[Host], speeds: dict[str, Any], listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(values(hosts, speeds, {}), monkeypatch).splitlines()
    rows = [words[0] for words in map(str.split, lines) if words and words[0] in list(Link)]
    assert rows == listed.split()


def test_it_says_why_no_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.util.find_spec("pynvml")
    if installed:  # Dask asks once per process
        monkeypatch.setattr(nvml, "NVML_STATE", nvml.NVMLState.UNINITIALIZED)
    with dask.config.set({"distributed.diagnostics.nvml": False}):
        done = topology()
    assert done.exit_code == 0
    assert ("nvml' is false" if installed else "not installed") in done.stdout


def test_a_scheduler_that_does_not_answer_is_named() -> None:
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        done = topology("--scheduler", "tcp://127.0.0.1:1")
    assert done.exit_code == 1
    assert "no scheduler answers at tcp://127.0.0.1:1" in done.stderr
