"""Run ``dask gpurt bench`` as a user types it: on its own cluster, and on a running one."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner
from distributed import Client

import dask_gpurt
from dask_gpurt.cli import main
from dask_gpurt.tools.bench.tables import QUERIES
from tests.helpers.commands import cluster_of_commands, run

SMALL = ("--scale", "0.005", "--rounds", "1", "--backend", "pandas")


@pytest.mark.slow
def test_on_a_cluster_of_its_own() -> None:
    done = run(sys.executable, "-m", "dask_gpurt", "bench", *SMALL, "--against", "tasks", "--json")
    found = json.loads(done.stdout)
    assert found["contenders"] == ["gpurt", "tasks"]
    assert found["machine"]["workers"] == 2
    assert len(found["runs"]) == 2 * 2 * len(QUERIES)
    assert found["ratio"]["value"] > 0
    assert found["from_files"]
    assert "dask" in found["versions"]


@pytest.mark.nightly
def test_on_a_cluster_that_runs() -> None:
    with cluster_of_commands(workers=2) as (address, _):
        done = run(sys.executable, "-m", "dask_gpurt", "bench", *SMALL, "--scheduler", address)
        with Client(address) as client:
            assert not dask_gpurt.report(client).enabled
    assert "2 workers, 2 threads, pandas; scale 0.005, 4 partitions, made by each query" in done.stdout
    assert "p2p takes" in done.stdout
    for query in QUERIES:
        assert query.name in done.stdout
    assert "only 1 round" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--scheduler", "tcp://127.0.0.1:1", "--workers", "2"], 2, "apply to a local cluster"),
        (["--scheduler", "tcp://127.0.0.1:1"], 1, "no scheduler answers"),
        (["--against", "gpurt"], 2, "'gpurt' is not one of 'p2p', 'tasks'"),
        (["--scale", "0"], 2, "0.0 is not in the range"),
    ],
)
def test_impossible_arguments_are_reported(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.setattr("dask_gpurt.client.addresses.TIMEOUT_S", 0.5)
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code == code
    assert said in done.output
