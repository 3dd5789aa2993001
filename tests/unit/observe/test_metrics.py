"""Check the tables of metrics and fallbacks, the Grafana dashboard of them, and how they are merged."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from functools import cache
from itertools import pairwise
from pathlib import Path

import dask
import pytest
from distributed.http.prometheus import PrometheusCollector
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

import dask_gpurt
from dask_gpurt.observe import Fallback, Metrics, prometheus
from dask_gpurt.observe.metrics import (
    METRICS,
    READINGS,
    Kind,
    Metric,
    Server,
    Unit,
    UnknownMetricError,
    combine,
    find,
)
from dask_gpurt.observe.progress import RunProgress
from dask_gpurt.observe.report import Fallbacks, RuntimeReport
from tests.helpers.grafana import FILE, expressions, generator

PACKAGE = Path(dask_gpurt.__file__).parent

each_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


@cache
def used() -> Mapping[str, set[str]]:
    """Return the names that the package passes to each method, directly or through a partial."""
    found: dict[str, set[str]] = {"add": set(), "peak": set(), "seconds": set()}
    for file in PACKAGE.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            given = [call.func, *call.args]  # or as partial(metrics.add, name)
            for function, name in pairwise(given):
                if not isinstance(function, ast.Attribute) or function.attr not in found:
                    continue
                if "metrics" in ast.unparse(function.value).lower():
                    assert isinstance(name, ast.Constant), f"{file.name}: {ast.unparse(call)}"
                    found[function.attr].add(str(name.value))
    return found


@pytest.mark.parametrize(
    ("method", "kind"), [("add", Kind.COUNTER), ("peak", Kind.GAUGE), ("seconds", Kind.COUNTER)]
)
def test_whatever_is_counted_is_in_the_table(method: str, kind: Kind) -> None:
    names = used()[method]
    assert len(names) >= 3
    assert {METRICS[name].kind for name in names} == {kind}
    if method == "seconds":
        assert {METRICS[name].unit for name in names} == {Unit.SECONDS}


def test_whatever_is_in_the_table_is_counted() -> None:
    # The interposer counts launches itself, and tests count the handovers that they check.
    assert set(METRICS).difference(*used().values()) == {"residency.{outcome}", "overlap.handovers"}


def test_a_metric_outside_the_table_is_refused() -> None:
    metrics = Metrics()
    with pytest.raises(UnknownMetricError, match=r"exchange\.byte"):
        metrics.add("exchange.byte")
    with pytest.raises(UnknownMetricError, match="path"):
        metrics.add("exchange.bytes.{path}", 5)
    with pytest.raises(UnknownMetricError, match="counter"):
        metrics.peak("shuffle.runs", 3)
    with pytest.raises(UnknownMetricError, match="gauge"):
        metrics.add("exchange.pool.peak", 3)
    assert metrics.snapshot() == {"counters": {}, "fallbacks": {}}


@each_metric
def test_a_filled_name_leads_back_to_its_metric(metric: Metric) -> None:
    values = tuple(f"value-{number}" for number in range(len(metric.all_labels)))
    assert find(metric.filled(values)) is metric


def test_names_for_prometheus_are_different_and_end_in_their_unit() -> None:
    declared = [*METRICS.values(), *READINGS.values()]
    names = [metric.prometheus for metric in declared]
    assert len(set(names)) == len(names)
    for metric in declared:
        assert re.fullmatch(r"gpurt(_[a-z]+)+", metric.prometheus)
        assert metric.prometheus.endswith(metric.unit)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100))))
def test_counters_of_several_are_summed_and_of_gauges_the_largest_is_kept(
    several: list[tuple[int, int]],
) -> None:
    reports = []
    for runs, peak in several:
        metrics = Metrics()
        metrics.add("shuffle.runs", runs)
        metrics.peak("memory.{tier}.peak", peak, "device")
        reports.append({**metrics.snapshot()["counters"], "of.another.version": 1})
    combined = combine(reports)
    if not several:
        assert combined == {}
        return
    assert combined == {
        "shuffle.runs": sum(runs for runs, _ in several),
        "memory.device.peak": max(peak for _, peak in several),
        "of.another.version": len(several),
    }


def test_fallbacks_are_counted_by_id_with_the_last_reason(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    for reason in ("one", "another"):
        metrics.fallback(Fallback.EXCHANGE_COMMS, reason)
        metrics.fallback(Fallback.READ_PLACES, reason)
    assert metrics.snapshot()["fallbacks"] == {
        "exchange.comms": {"text": "bytes go through Dask's comms", "reason": "another", "count": 2},
        "reads.place": {"text": "Dask decides where files are read", "reason": "another", "count": 2},
    }
    assert len(caplog.records) == 2


# ---- the report of a cluster ---------------------------------------------------------


def reported() -> RuntimeReport:
    """Return a report of two workers, one of which did not answer."""
    metrics = Metrics()
    metrics.add("exchange.bytes.{path}", 2 * 2**20, "comms", "same-host")
    metrics.add("exchange.bytes.{path}", 1 * 2**20, "comms", "other-host")
    metrics.add("exchange.seconds.pulling", 0.25)
    metrics.fallback(Fallback.EXCHANGE_COMMS, "on another host")
    devices: dict[str, object] = {"host": {}}
    worker = {
        "version": "0.1.0",
        "devices": devices,
        "problems": ["a setting is wrong"],
        **metrics.snapshot(),
        "new": "unknown",
    }
    return RuntimeReport.of(
        {
            "enabled": True,
            "version": "0.1.0",
            "takeover": True,
            "counters": worker["counters"],
            "fallbacks": {},
            "workers": {"tcp://a:1": worker, "tcp://b:1": {"error": "it has left"}},
        }
    )


def test_a_report_has_fields_and_is_the_mapping_that_it_was() -> None:
    report = reported()
    worker, gone = report.workers["tcp://a:1"], report.workers["tcp://b:1"]
    assert report["workers"]["tcp://a:1"]["counters"] == report.counters
    assert worker["fallbacks"]["exchange.comms"]["count"] == worker.fallbacks["exchange.comms"].count == 1
    assert (worker["problems"], worker.get("error")) == (("a setting is wrong",), None)
    assert (dict(gone), gone.counters) == ({"error": "it has left"}, {})
    with pytest.raises(KeyError):
        report["others"]
    with pytest.raises(FrozenInstanceError):
        report.enabled = False  # type: ignore[misc]
    assert dict(RuntimeReport()) == {**dict(RuntimeReport()), "enabled": False, "counters": {}, "workers": {}}


def test_a_report_is_readable_with_units() -> None:
    printed = repr(reported())
    for said in ("2 workers", "exchange.bytes.comms: 3.00 MiB", "exchange.seconds.pulling: 250.00 ms"):
        assert said in printed
    assert (
        "tcp://a:1 fell back once, bytes go through Dask's comms (exchange.comms): on another host" in printed
    )
    assert "tcp://b:1 did not answer: it has left" in printed
    assert repr(RuntimeReport()) == "<RuntimeReport: the runtime is off>"
    assert repr(reported().workers["tcp://a:1"]).splitlines() == [
        "<WorkerReport: dask-gpurt 0.1.0 on host",
        "  a setting is wrong",
        "  exchange.bytes.comms: 3.00 MiB",
        "  exchange.seconds.pulling: 250.00 ms",
        "  fell back once, bytes go through Dask's comms (exchange.comms): on another host>",
    ]
    assert repr(reported().workers["tcp://b:1"]) == "<WorkerReport: no answer, it has left>"


def test_a_report_can_be_written_as_json() -> None:
    plain = reported().to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["workers"]["tcp://a:1"]["fallbacks"]["exchange.comms"]["reason"] == "on another host"


def test_a_report_of_another_version_is_read_as_far_as_it_is_known() -> None:
    fallback = {"text": "it did less", "reason": "why", "count": 2}
    worker = {"fallbacks": {"a.later-one": {**fallback, "later": 1}}, "later": 1}
    report = RuntimeReport.of(
        {"enabled": True, "fallbacks": {}, "workers": {"tcp://a:1": worker}, "later": 1}
    )
    assert dict(report.workers["tcp://a:1"].fallbacks["a.later-one"]) == fallback
    assert list(Fallbacks()) == []


# ---- for Prometheus ------------------------------------------------------------------


def test_finer_labels_are_for_prometheus_and_reports_sum_over_them() -> None:
    metrics = Metrics()
    for nbytes, peer in ((5, "same-host"), (7, "other-host"), (11, "same-host")):
        metrics.add("exchange.bytes.{path}", nbytes, "comms", peer)
    assert metrics.snapshot()["counters"] == {"exchange.bytes.comms": 23}
    (bytes_by_path,) = {metric for metric, _, _ in metrics.samples()}
    assert bytes_by_path.all_labels == ("path", "peer")
    assert {labels: value for _, labels, value in metrics.samples()} == {
        ("comms", "same-host"): 16,
        ("comms", "other-host"): 7,
    }
    with pytest.raises(UnknownMetricError, match="peer"):
        metrics.add("exchange.bytes.{path}", 1, "comms")


@pytest.mark.parametrize(
    ("name", "server", "namespace", "family"),
    [
        ("shuffle.rows", Server.WORKER, "dask", "dask_worker_gpurt_shuffle_rows_total"),
        ("shuffle.workers.silent", Server.SCHEDULER, "", "scheduler_gpurt_shuffle_workers_silent_total"),
        ("memory.{tier}.peak", Server.WORKER, "here", "here_worker_gpurt_memory_peak_bytes"),
    ],
)
def test_families_are_named_as_dask_names_its_own(
    name: str, server: Server, namespace: str, family: str
) -> None:
    assert METRICS[name].family(server, namespace) == family
    with dask.config.set({"distributed.dashboard.prometheus.namespace": namespace}):
        collector = PrometheusCollector(None)
    collector.subsystem = str(server)
    assert collector.build_name(METRICS[name].prometheus) == family.removesuffix("_total")


class ServerOfNoPage:
    """Provide only the server attributes that the page uses."""

    address = "tcp://a:1"


def test_a_server_shows_its_counters_from_the_start_until_it_is_taken_away() -> None:
    metrics = Metrics()
    metrics.add("shuffle.workers.silent", 2)
    metrics.fallback(Fallback.READ_PLACES, "a reason")
    take_away = prometheus.register(
        ServerOfNoPage(), Server.SCHEDULER, metrics, lambda: [("workers.ready", (), 3)]
    )
    value = REGISTRY.get_sample_value
    try:
        assert value("dask_scheduler_gpurt_shuffle_workers_silent_total") == 2
        assert value("dask_scheduler_gpurt_shuffle_runs_total") == 0
        assert value("dask_scheduler_gpurt_workers_ready") == 3
        assert value("dask_scheduler_gpurt_fallbacks_total", {"fallback": "reads.place"}) == 1
        assert value("dask_scheduler_gpurt_shuffle_rows_total") is None  # workers count these
    finally:
        take_away()
        take_away()
    assert value("dask_scheduler_gpurt_workers_ready") is None


# ---- Dask's page of shuffles ----------------------------------------------------------------------

POOLS = ({"capacity": 1000, "used": 50, "retained": 20}, {"capacity": 10, "used": 5, "retained": 0})


def test_a_run_has_shards_in_pools() -> None:
    progress = RunProgress()
    for nbytes in (100, 300):
        progress.offered(nbytes)
    progress.received(70)
    comm = progress.for_dask(POOLS)["comm"]
    assert (comm["total"], comm["written"], comm["read"], comm["avg_size"]) == (400, 400, 70, 200)
    assert (comm["memory"], comm["memory_limit"]) == (50 - 20 + 5, 1000 + 10), "retained blocks are free"


def test_the_page_gets_the_fields_that_it_reads() -> None:
    report = RunProgress().for_dask(POOLS)
    fields = {"memory", "memory_limit", "total", "buckets", "written", "read", "avg_size", "avg_duration"}
    assert report.keys() == {"comm", "disk", "start"}
    assert report["comm"].keys() == report["disk"].keys() == fields


# ---- the Grafana dashboard ------------------------------------------------------------------------

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
