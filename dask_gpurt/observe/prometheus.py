"""Counters as Prometheus metrics, on the worker's own ``/metrics`` page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dask_gpurt.observe.metrics import Metrics

_collectors: dict[str, Any] = {}


class _Collector:
    def __init__(self, worker: str, metrics: Metrics):
        self._worker = worker
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._metrics.snapshot()["counters"].items():
            family = "gpurt_" + name.replace(".", "_").replace("-", "_")
            metric = GaugeMetricFamily(family, f"{name} of the dask-gpurt runtime", labels=["worker"])
            metric.add_metric([self._worker], value)
            yield metric


def register(worker: str, metrics: Metrics) -> None:
    """Show ``metrics`` where Dask shows a worker's own; nothing without prometheus-client."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    _collectors[worker] = _Collector(worker, metrics)
    REGISTRY.register(_collectors[worker])


def unregister(worker: str) -> None:
    """Stop showing the counters of a worker."""
    if collector := _collectors.pop(worker, None):
        from prometheus_client import REGISTRY

        REGISTRY.unregister(collector)
