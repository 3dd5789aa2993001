"""Show the metrics of a worker on its own ``/metrics`` page, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dask_gpurt.observe.metrics import Kind, Metric, Metrics

#: Tier, kind and bytes of each thing that a worker's tiers hold.
Amounts = Iterable[tuple[str, str, int]]

_collectors: dict[str, Any] = {}


class _Collector:
    """Collect the families of one worker, each time that its page is read."""

    def __init__(self, worker: str, metrics: Metrics, memory: Callable[[], Amounts]):
        self._worker = worker
        self._metrics = metrics
        self._memory = memory

    def describe(self) -> Iterable[Any]:
        """Claim no names, since all workers of a process show the same ones."""
        return ()

    def collect(self) -> Iterator[Any]:
        samples = self._metrics.samples()
        families = (self._tiers(), *self._declared(samples), *self._former(samples))
        return (family for family in families if family.samples)

    def _tiers(self) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        labels = ["worker", "tier", "kind"]
        held = GaugeMetricFamily("gpurt_memory_bytes", "Bytes in a tier, and its capacity", labels=labels)
        for tier, kind, nbytes in self._memory():
            held.add_metric([self._worker, tier, kind], nbytes)
        return held

    def _declared(self, samples: Iterable[tuple[Metric, tuple[str, ...], float]]) -> Iterable[Any]:
        """Return a family for each metric, typed and labelled as the table declares it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        types = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}
        families: dict[str, Any] = {}
        for metric, labels, value in samples:
            if metric.name not in families:
                names = ["worker", *metric.labels]
                families[metric.name] = types[metric.kind](metric.prometheus, metric.help, labels=names)
            families[metric.name].add_metric([self._worker, *labels], value)
        return families.values()

    def _former(self, samples: Iterable[tuple[Metric, tuple[str, ...], float]]) -> Iterator[Any]:
        """Return the untyped names that metrics had before version 0.1; they go with 0.2."""
        from prometheus_client.core import GaugeMetricFamily

        for metric, labels, value in samples:
            if metric.exported:  # had its name before
                continue
            filled = metric.filled(labels)
            former = "gpurt_" + filled.replace(".", "_").replace("-", "_")
            help = f"Deprecated, use {metric.prometheus}: {metric.help}"
            family = GaugeMetricFamily(former, help, labels=["worker"])
            family.add_metric([self._worker], value)
            yield family


def register(worker: str, metrics: Metrics, memory: Callable[[], Amounts]) -> None:
    """Show metrics and tiers where Dask shows a worker's own; do nothing without prometheus-client.

    Parameters
    ----------
    memory
        Returns what the worker's tiers hold; called each time that the page is read.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    _collectors[worker] = _Collector(worker, metrics, memory)
    REGISTRY.register(_collectors[worker])


def unregister(worker: str) -> None:
    """Stop showing the metrics of a worker."""
    if collector := _collectors.pop(worker, None):
        from prometheus_client import REGISTRY

        REGISTRY.unregister(collector)
