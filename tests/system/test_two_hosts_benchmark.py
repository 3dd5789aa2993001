"""Run the benchmark of placement on two hosts and on four, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client, wait

from benchmarks.two_hosts.clusters import Plan, addresses, bytes_between, clusters
from benchmarks.two_hosts.hosts import UnsupportedError, host_of, require
from benchmarks.two_hosts.speeds import measure_speeds

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
MB = 10**6


@pytest.mark.parametrize("hosts", [2, 4])
def test_sides_take_turns_agree_and_are_simulated(hosts: int, tmp_path: Path) -> None:
    try:
        require()
    except UnsupportedError as error:
        pytest.skip(str(error))
    output = tmp_path / "results.json"
    some = (
        "--hosts",
        str(hosts),
        "--pairs",
        "2",
        "--links",
        "1",
        "--workloads",
        "uneven-reuse,random-dag",
        "--scale",
        "0.1",
    )
    command = [sys.executable, "-m", "benchmarks.two_hosts", *some, "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "the kernel forbids hosts" in done.stderr:
        pytest.skip("the kernel forbids hosts on one machine")
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert [cell["workload"] for cell in results["cells"]] == ["uneven-reuse", "random-dag"]
    for cell in results["cells"]:
        assert cell["workload"] in done.stdout
        assert [run["side"] for run in cell["runs"]] == ["on", "off", "off", "on", "on", "off"]
        assert cell["measured"]["low"] <= cell["measured"]["ratio"] <= cell["measured"]["high"]
        assert cell["simulated"] > 0
        assert len(cell["simulated_seconds"]) == 2
    assert results["parameters"]["hosts"] == hosts
    assert len(results["links"]["1"]["bandwidths"]["between"]) == hosts * (hosts - 1)
    assert not results["links"]["1"]["fallbacks"]


def test_each_of_four_hosts_has_its_own_link_and_counts(tmp_path: Path) -> None:
    try:
        require()
        with clusters(Plan(4, 20 * MB, 2**30), tmp_path) as sides, sides["off"].as_current():
            _check_links(sides["off"])
    except UnsupportedError as error:
        pytest.skip(str(error))


def _check_links(client: Client) -> None:
    workers = addresses(client)
    assert [host_of(worker) for worker in workers] == [f"10.98.0.{n}" for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    for speed in measure_speeds(client, workers).between.values():
        assert 10 * MB < speed.bandwidth < 22 * MB
    made = client.submit(bytes, 10 * MB, workers=[workers[-1]])
    wait(made)
    before = bytes_between(client)
    wait(client.submit(len, made, workers=[workers[4]]))
    assert 10 * MB <= bytes_between(client) - before < 12 * MB
