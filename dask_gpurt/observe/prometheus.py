"""Counters as Prometheus metrics, on the worker's own ``/metrics`` page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dask_gpurt.observe.metrics import Metrics

#: Tier, kind and bytes of each thing that a worker's tiers hold.
Amounts = Iterable[tuple[str, str, int]]

_SPILL_BYTES, _SPILL_SECONDS = "memory.spill.bytes.", "memory.spill.seconds"

_collectors: dict[str, Any] = {}


class _Collector:
    def __init__(self, worker: str, metrics: Metrics, memory: Callable[[], Amounts]):
        self._worker = worker
        self._metrics = metrics
        self._memory = memory

    def describe(self) -> Iterable[Any]:
        """Claim no names, since all workers of a process show the same ones."""
        return ()

    def collect(self) -> Iterator[Any]:
        counters = self._metrics.snapshot()["counters"]
        families = (self._tiers(), *self._spilled(counters), *self._others(counters))
        return (family for family in families if family.samples)

    def _tiers(self) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        labels = ["worker", "tier", "kind"]
        held = GaugeMetricFamily("gpurt_memory_bytes", "Bytes in a tier, and its capacity", labels=labels)
        for tier, kind, nbytes in self._memory():
            held.add_metric([self._worker, tier, kind], nbytes)
        return held

    def _spilled(self, counters: Mapping[str, float]) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        labels = ["worker", "from", "to"]
        moved = CounterMetricFamily("gpurt_spill_bytes", "Bytes moved from tier to tier", labels=labels)
        took = CounterMetricFamily("gpurt_spill_seconds", "Time that these moves took", labels=["worker"])
        for name, value in counters.items():
            if name.startswith(_SPILL_BYTES):
                moved.add_metric([self._worker, *name.removeprefix(_SPILL_BYTES).split(".")], value)
            elif name == _SPILL_SECONDS:
                took.add_metric([self._worker], value)
        yield from (moved, took)

    def _others(self, counters: Mapping[str, float]) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, value in counters.items():
            if name.startswith(_SPILL_BYTES) or name == _SPILL_SECONDS:
                continue
            family = "gpurt_" + name.replace(".", "_").replace("-", "_")
            metric = GaugeMetricFamily(family, f"{name} of the dask-gpurt runtime", labels=["worker"])
            metric.add_metric([self._worker], value)
            yield metric


def register(worker: str, metrics: Metrics, memory: Callable[[], Amounts]) -> None:
    """Show ``metrics`` and tiers where Dask shows a worker's own; nothing without prometheus-client.

    Parameters
    ----------
    memory
        What the worker's tiers hold, asked each time that the page is read.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    _collectors[worker] = _Collector(worker, metrics, memory)
    REGISTRY.register(_collectors[worker])


def unregister(worker: str) -> None:
    """Stop showing the counters of a worker."""
    if collector := _collectors.pop(worker, None):
        from prometheus_client import REGISTRY

        REGISTRY.unregister(collector)
