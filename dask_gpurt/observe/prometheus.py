"""Show the metrics of a worker or scheduler on its own ``/metrics`` page, for Prometheus.

The page is Dask's. What is shown there besides is named as Dask names its own: by the configured namespace,
the kind of server, and then ours, ``dask_worker_gpurt_exchange_bytes_total``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from distributed.http.prometheus import PrometheusCollector

from dask_gpurt.observe.metrics import METRICS, READINGS, Kind, Metric, Metrics, Server

#: The name in :data:`~dask_gpurt.observe.metrics.READINGS`, the values of its labels, and its own.
Reading = tuple[str, tuple[str, ...], float]


class _Collector(PrometheusCollector):
    """Collect the families of one server, each time that a page of its process is read.

    All servers of a process show the same page. Its workers are told apart by the label ``worker``.
    """

    def __init__(
        self, server: Any, kind: Server, metrics: Metrics, readings: Callable[[], Iterable[Reading]]
    ):
        super().__init__(server)  # type: ignore[no-untyped-call]
        self.subsystem = str(kind)
        # From the start, since a rate over time does not see the step from nothing to the first value.
        self._initial = {
            metric: 0.0 for metric in METRICS.values() if kind in metric.servers and not metric.all_labels
        }
        self._own = {"worker": server.address} if kind is Server.WORKER else {}
        self._metrics = metrics
        self._readings = readings

    def describe(self) -> Iterable[Any]:
        """Claim no names, since all workers of a process show the same ones."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield a family for each metric that has a value or no labels, typed as its table declares it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        types = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}
        families: dict[str, Any] = {}
        for metric, labels, value in self._samples():
            if metric.name not in families:
                names = [*self._own, *metric.all_labels]
                name = self.build_name(metric.prometheus)  # type: ignore[no-untyped-call]
                families[metric.name] = types[metric.kind](name, metric.help, labels=names)
            families[metric.name].add_metric([*self._own.values(), *labels], value)
        yield from families.values()

    def _samples(self) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        samples = self._metrics.samples()
        counted = {metric for metric, _, _ in samples}
        yield from samples
        yield from ((metric, (), value) for metric, value in self._initial.items() if metric not in counted)
        yield from ((READINGS[name], labels, value) for name, labels, value in self._readings())
        for id, known in self._metrics.fallbacks().items():
            yield READINGS["fallbacks.{fallback}"], (id,), known["count"]


def register(
    server: Any, kind: Server, metrics: Metrics, readings: Callable[[], Iterable[Reading]]
) -> Callable[[], None]:
    """Show metrics where Dask shows a server's own; do nothing without prometheus-client.

    Parameters
    ----------
    server
        Dask's worker or scheduler, of this kind.
    readings
        Returns what is known only now; called each time that the page is read, on the event loop.

    Returns
    -------
    function
        Stops showing them; a second call does nothing.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return _nothing
    collector = _Collector(server, kind, metrics, readings)
    REGISTRY.register(collector)

    def unregister() -> None:
        with contextlib.suppress(KeyError):  # of a second call
            REGISTRY.unregister(collector)

    return unregister


def _nothing() -> None:
    """Do nothing, since nothing is shown."""
