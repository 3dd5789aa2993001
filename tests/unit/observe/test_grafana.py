"""Check that the Grafana dashboard is up to date, and that its expressions name existing metrics."""

from __future__ import annotations

import re

import pytest

from dask_gpurt.observe.metrics import METRICS, READINGS, Metric, Server
from tests.helpers.grafana import FILE, expressions, generator

#: Metrics on the pages, by name.
SHOWN: dict[str, Metric] = {
    metric.family(server): metric
    for metric in (*METRICS.values(), *READINGS.values())
    for server in metric.servers
    if server is not Server.CLIENT
}


def test_the_file_is_as_it_is_written() -> None:
    assert FILE.read_text() == generator().text()


@pytest.mark.parametrize("expression", expressions())
def test_expressions_name_metrics_and_labels_that_exist(expression: str) -> None:
    names = re.findall(r"\bdask_\w+", expression)
    assert names
    assert [name for name in names if name not in SHOWN] == []
    labels = {"worker", *(label for name in names for label in SHOWN[name].all_labels)}
    grouped = re.findall(r"by \((.*?)\)", expression)
    used = re.findall(r"(\w+)=~", expression) + [label for group in grouped for label in group.split(", ")]
    assert set(used) <= labels


@pytest.mark.parametrize("expression", expressions())
def test_counters_are_shown_as_rates_and_gauges_as_they_are(expression: str) -> None:
    for before, name in re.findall(r"(\w*)\(?\b(dask_\w+)", expression):
        assert (before in ("rate", "increase")) == name.endswith("_total")
