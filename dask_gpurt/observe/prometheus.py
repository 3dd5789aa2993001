"""Export the metrics of a worker or scheduler on Dask's ``/metrics`` page, for Prometheus.

The runtime's metrics follow Dask's naming: the configured namespace, the kind of server, and the name from
the table, for example ``dask_worker_gpurt_exchange_bytes_total``. All servers of a process share one page, so
the label ``worker`` distinguishes its workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from distributed.http.prometheus import PrometheusCollector

from dask_gpurt.observe.counting import Metrics
from dask_gpurt.observe.metrics import METRICS, READINGS, Kind, Metric, Server

#: The name of a metric, the values of its labels, and its value.
Reading = tuple[str, tuple[str, ...], float]

_DECLARED: Mapping[str, Metric] = {**METRICS, **READINGS}

_lock = threading.Lock()
#: The collectors of this process, by kind of server.
_collectors: dict[Server, _Collector] = {}


class _Source(NamedTuple):
    """Hold the sources of one server's values, and the values of its own labels."""

    labels: tuple[str, ...]
    metrics: Metrics
    readings: Callable[[], Iterable[Reading]]


class _Collector(PrometheusCollector):
    """Collect the metric families of all servers of a kind, each time a page of their process is read.

    There is one collector per kind, since a page may contain each family only once.
    """

    def __init__(self, kind: Server):
        super().__init__(None)  # type: ignore[no-untyped-call]
        self.subsystem = str(kind)
        self.sources: dict[str, _Source] = {}
        self._labels = ("worker",) if kind is Server.WORKER else ()
        #: Exported as 0 from the start: a rate would miss the step from an absent to the first value.
        self._initial = [
            metric for metric in METRICS.values() if kind in metric.servers and not metric.all_labels
        ]

    def describe(self) -> Iterable[Any]:
        """Declare no families in advance."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield a family of the declared type for each metric that has a value or no labels."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        types = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}
        families: dict[str, Any] = {}
        for source in list(self.sources.values()):
            for metric, labels, value in self._samples(source):
                if metric.name not in families:
                    names = [*self._labels, *metric.all_labels]
                    name = self.build_name(metric.prometheus)  # type: ignore[no-untyped-call]
                    families[metric.name] = types[metric.kind](name, metric.help, labels=names)
                families[metric.name].add_metric([*source.labels, *labels], value)
        yield from families.values()

    def _samples(self, source: _Source) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        samples = source.metrics.samples()
        counted = {metric.name for metric, _, _ in samples}
        yield from samples
        yield from ((metric, (), 0.0) for metric in self._initial if metric.name not in counted)
        yield from ((_DECLARED[name], labels, value) for name, labels, value in source.readings())
        for id, known in source.metrics.fallbacks().items():
            yield READINGS["fallbacks.{fallback}"], (id,), known["count"]


def register(
    server: Any, kind: Server, metrics: Metrics, readings: Callable[[], Iterable[Reading]]
) -> Callable[[], None]:
    """Export metrics on the page of a Dask server. A no-op without prometheus-client.

    ``server``: a Dask worker or scheduler, of this kind.
    ``readings``: returns the :data:`~dask_gpurt.observe.metrics.READINGS` each time the page is requested, on
    the event loop.
    Returns a function that stops the export; idempotent.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return _nothing
    address: str = server.address
    source = _Source((address,) if kind is Server.WORKER else (), metrics, readings)
    with _lock:
        if kind not in _collectors:
            _collectors[kind] = _Collector(kind)
            REGISTRY.register(_collectors[kind])
        _collectors[kind].sources[address] = source

    def unregister() -> None:
        with _lock:
            collector = _collectors.get(kind)
            if collector is None or collector.sources.get(address) is not source:
                return
            del collector.sources[address]
            if not collector.sources:
                del _collectors[kind]
                REGISTRY.unregister(collector)

    return unregister


def _nothing() -> None:
    """Do nothing, since nothing was registered."""
