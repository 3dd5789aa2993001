"""Scrape a running cluster with Prometheus, and evaluate every expression of the Grafana dashboard."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, wait

from dask_gpurt.observe import Fallback
from tests.helpers.clusters import cluster
from tests.helpers.commands import started
from tests.helpers.grafana import expressions
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus on the PATH"),
]

MIB = 2**20
CONFIGURATION = """\
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
- job_name: dask
  static_configs:
  - targets: {targets}
"""
#: Window of rates, spanning many scrapes; Grafana chooses it by the time range shown.
WINDOW = "20s"
SMALL = {"memory__tiers": True, "memory__device": 4 * MIB, "memory__host": 2 * MIB}


class Prometheus:
    """Query a Prometheus server by its HTTP API."""

    def __init__(self, address: str):
        self._address = address

    def get(self, resource: str, **arguments: str) -> Any:
        with urlopen(f"http://{self._address}/api/v1/{resource}?{urlencode(arguments)}") as answer:
            reply = json.load(answer)
        assert reply["status"] == "success", reply
        return reply["data"]

    def values(self, expression: str) -> list[float]:
        """Return the current values of an expression."""
        return [float(one["value"][1]) for one in self.get("query", query=expression)["result"]]

    def scrapes(self, targets: int) -> bool:
        """Return whether it has scraped this many targets, all of them up."""
        try:
            return self.values("sum(up)") == [targets]
        except URLError:  # it is not listening yet
            return False


def pages(client: Client) -> list[str]:
    """Return the address of each page of a cluster."""
    identity = client.sync(client.scheduler.identity, n_workers=-1)
    servers = [identity, *identity["workers"].values()]
    return [f"127.0.0.1:{one['services']['dashboard']}" for one in servers]


def work(client: Client) -> None:
    """Spill, shuffle and fall back, so that each metric with labels has a value."""

    def part(i: int) -> pd.DataFrame:
        return pd.DataFrame({"key": np.arange(MIB // 8, dtype="i8") + i})

    parts = client.map(part, range(16))
    wait(parts)
    frame = dd.from_pandas(pd.DataFrame({"key": range(10_000)}), npartitions=4)
    assert client.compute(frame.shuffle("key").key.nunique(), sync=True) == 10_000

    def fall_back(runtime: Any) -> None:
        runtime.metrics.fallback(Fallback.MEMORY_UNPICKLABLE, "a test has it so")

    client.run(lambda dask_worker: fall_back(dask_worker.plugins["gpurt"]))
    client.run_on_scheduler(lambda dask_scheduler: fall_back(dask_scheduler.extensions["gpurt"]))


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Client]]:
    """Yield a Prometheus that scrapes two workers and their scheduler, and the client."""
    folder = tmp_path_factory.mktemp("prometheus")
    with cluster("pandas", **SMALL) as client:
        targets = pages(client)
        (folder / "prometheus.yml").write_text(CONFIGURATION.format(targets=json.dumps(targets)))
        address = f"127.0.0.1:{free_port()}"
        flags = (
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        )
        with started(str(shutil.which("prometheus")), *flags):
            prometheus = Prometheus(address)
            until(lambda: prometheus.scrapes(len(targets)))  # before any event to count
            work(client)
            yield prometheus, client


def test_each_expression_of_the_dashboard_has_values(scraped: tuple[Prometheus, Client]) -> None:
    prometheus, _ = scraped
    asked = [
        expression.replace("$worker", ".*").replace("$__rate_interval", WINDOW)
        for expression in expressions()
    ]
    assert len(asked) > 20
    # A series that first appeared at the last scrape has a rate only from the next scrape on.
    until(
        lambda: all(prometheus.values(one) for one in asked),
        lambda: [one for one in asked if not prometheus.values(one)],
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool on the PATH")
def test_the_pages_are_as_prometheus_advises(scraped: tuple[Prometheus, Client]) -> None:
    _, client = scraped
    for address in pages(client):
        with urlopen(f"http://{address}/metrics") as page:
            lines = page.read().decode().splitlines(keepends=True)
        ours = "".join(line for line in lines if re.match(r"(# \w+ )?dask_\w+_gpurt_", line))
        assert "# TYPE" in ours
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=ours, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
