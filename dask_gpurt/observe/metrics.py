"""Declare every metric of the runtime, and count them in one process.

:data:`METRICS` is the one table: name, type, unit and meaning of each. A name that is not in it is refused
when it is first counted. Reports, the Prometheus page and ``docs/reference/metrics.md`` are made from the
same table.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from time import perf_counter
from typing import Any

from dask_gpurt.observe.fallbacks import Fallback

logger = logging.getLogger("dask_gpurt")


class Kind(StrEnum):
    """Tell how a metric behaves over time, and so how those of several workers are put together."""

    #: Only grows. Several workers' are summed.
    COUNTER = "counter"
    #: Keeps the largest value seen. Of several workers' the largest is kept.
    GAUGE = "gauge"


class Unit(StrEnum):
    """Name the unit of a metric; the unit of plain numbers is empty."""

    NUMBER = ""
    BYTES = "bytes"
    SECONDS = "seconds"


class UnknownMetricError(KeyError):
    """Refuse a metric that is not in :data:`METRICS`, or one that is used against its declaration."""


@dataclass(frozen=True)
class Metric:
    """Declare a metric.

    Parameters
    ----------
    name
        Dotted; ``{label}`` stands for the value of a label: ``exchange.bytes.{path}``. Reports have the name
        with the values filled in: ``exchange.bytes.comms``.
    kind, unit
        How it behaves, and what it counts.
    help
        What it tells, as half a sentence.
    exported
        The name for Prometheus, without the suffix ``_total`` of counters; made of ``name`` and ``unit`` if
        not given.
    """

    name: str
    kind: Kind
    unit: Unit
    help: str
    exported: str = ""

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels, in the order in which their values are given."""
        return tuple(re.findall(r"\{(\w+)\}", self.name))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return what matches the name with the values of the labels filled in."""
        fixed = [re.escape(part) for part in re.split(r"\{\w+\}", self.name)]
        # Only the last value may have dots in it.
        head, tail = "([^.]+)".join(fixed[:-1]), fixed[-1]
        return re.compile(f"{head}(.+){tail}" if self.labels else tail)

    @cached_property
    def prometheus(self) -> str:
        """Return the name for Prometheus: words, then the unit."""
        words = [word for word in self.name.split(".") if word != self.unit and "{" not in word]
        name = "_".join(["gpurt", *words, *filter(None, [self.unit])])
        return self.exported or name.replace("-", "_")

    def filled(self, values: tuple[str, ...]) -> str:
        """Return the name with the values of the labels in it."""
        if not values:
            return self.name
        return re.sub(r"\{\w+\}", "{}", self.name).format(*values)


def _counter(name: str, help: str, unit: Unit = Unit.NUMBER, exported: str = "") -> Metric:
    return Metric(name, Kind.COUNTER, unit, help, exported)


def _gauge(name: str, help: str, unit: Unit) -> Metric:
    return Metric(name, Kind.GAUGE, unit, help)


#: Every metric, by name.
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        # ---- shuffle
        _counter("shuffle.runs", "runs, counted on each worker that took part"),
        _counter("shuffle.runs.recovered", "times that runs went on with other owners after a loss"),
        _counter("shuffle.runs.restarted", "runs that began again as a whole"),
        _counter("shuffle.inputs.missing", "inputs that were missing at a barrier, and transferred again"),
        _counter("shuffle.lost.shards", "shards that an owner had taken and could not read"),
        _counter("shuffle.recovered.shards", "shards offered to the owners of new shares"),
        _counter("shuffle.rows", "rows of input partitions"),
        _counter(
            "shuffle.shards.{answer}",
            "shards that an owner does not take, by why: `repeated`, `stale`, `outdated`",
        ),
        _counter("shuffle.tasks.redirected", "unpack tasks that had started elsewhere than on their owner"),
        _counter("shuffle.taken-over", "runs of `p2p` shuffles in whose place the runtime served"),
        _counter("shuffle.taken.{why}", "distinct shuffles and joins that clients sent through it, by why"),
        _counter("shuffle.left.{why}", "shuffles that were left to Dask's own method, by why"),
        _counter("shuffle.seconds.splitting", "time of task threads that split partitions", Unit.SECONDS),
        _counter("shuffle.seconds.packing", "the same that packed shards, and waited for room", Unit.SECONDS),
        _counter("shuffle.seconds.assembling", "the same that put outputs together", Unit.SECONDS),
        # ---- exchange
        _counter("exchange.bytes.{path}", "bytes offered to owners, by the path that they take", Unit.BYTES),
        _counter("exchange.shards.{path}", "shards offered to owners, by the path that they take"),
        _counter("exchange.pulled.bytes", "bytes copied out of mapped pools, not read in place", Unit.BYTES),
        _counter("exchange.seconds.pulling", "time of threads that copied shards", Unit.SECONDS),
        _counter("exchange.seconds.compressing", "time of threads that compressed shards", Unit.SECONDS),
        _counter("exchange.seconds.decompressing", "time of threads that decompressed shards", Unit.SECONDS),
        _counter(
            "exchange.seconds.waiting-for-room", "time of producers that waited for a full pool", Unit.SECONDS
        ),
        _counter(
            "exchange.compression.bytes.before", "bytes of shards before they were compressed", Unit.BYTES
        ),
        _counter(
            "exchange.compression.bytes.after", "bytes of shards after they were compressed", Unit.BYTES
        ),
        _counter("exchange.drains", "requests to owners to make room in the pool of a peer"),
        _counter("exchange.calls.repeated", "calls to peers that were made again"),
        _counter(
            "exchange.messages.stale", "messages for an earlier life of this worker, which were refused"
        ),
        _counter("exchange.retained.reclaimed", "bytes of read shards that made room for others", Unit.BYTES),
        _gauge("exchange.pool.peak", "the most bytes in the pool", Unit.BYTES),
        _gauge("exchange.inflight.peak", "the most bytes that were being pulled at a time", Unit.BYTES),
        # ---- memory
        _counter(
            "memory.spill.bytes.{from}.{to}",
            "bytes moved between tiers; from `exchange`, pulled shards that went below the device at once",
            Unit.BYTES,
            "gpurt_spill_bytes",
        ),
        _counter("memory.spill.seconds", "time that these moves took", Unit.SECONDS, "gpurt_spill_seconds"),
        _counter("memory.unspill.unheld", "objects that were read from below while no task held them"),
        _counter("memory.waits", "tasks that waited for others, since memory was short for what they need"),
        _counter("memory.waits.overdue", "tasks and fetches that began without room after they had waited"),
        _counter("memory.retries", "tasks that ran out of memory and were run again"),
        _counter("memory.short", "requests of the device's allocator for room"),
        _gauge("memory.{tier}.peak", "the most bytes in a tier", Unit.BYTES),
        # ---- reads
        _counter("reads.aside", "tasks that left their slot to another one as they read files"),
        _counter("reads.seconds.reading", "time of task threads in known readers of files", Unit.SECONDS),
        _counter(
            "reads.seconds.beside", "time in which a task read while another one computed", Unit.SECONDS
        ),
        _counter(
            "reads.seconds.waiting",
            "time of task threads that waited for others to compute, after a read or before they began",
            Unit.SECONDS,
        ),
        # ---- placement
        _counter("placement.decisions", "workers that were chosen for a task"),
        _counter("placement.shuffles", "shuffles whose outputs were given owners by cost"),
        _counter("placement.replicas.made", "replicas that were asked for"),
        _counter("placement.replicas.refused", "replicas that no worker had room for"),
        _counter("placement.replicas.dropped", "replicas that were given up"),
        # ---- planning
        _counter("planning.expressions.{outcome}", "expressions of a client: `reused`, `kept`, `not-kept`"),
        _counter("planning.metadata.{outcome}", "metadata of operations: `reused`, `computed`"),
        _counter("planning.files.{outcome}", "looks at the files of a table: `reused`, `read`"),
        _counter("planning.plans.{outcome}", "optimised queries: `reused`, `computed`"),
        # ---- overlap
        _counter("overlap.decisions", "changes of the setting under which a kernel runs"),
        _counter("overlap.confined", "times that compute was confined"),
        _counter("overlap.forgotten", "measurements of a kernel that were dropped, since it has changed"),
        _counter("overlap.agreed", "answers of the scheduler with what all workers have measured"),
        _counter(
            "overlap.handovers", "checks of memory that changes hands, with `dask_gpurt.testing.Instruments`"
        ),
        _counter("residency.{outcome}", "launches of kernels while residency caps counted, by outcome"),
    )
}


def find(filled: str) -> Metric:
    """Return the metric of a name in which the values of its labels are filled in.

    Raises
    ------
    UnknownMetricError
        When the table has none.
    """
    if filled in METRICS:
        return METRICS[filled]
    for metric in METRICS.values():
        if metric.labels and metric.pattern.fullmatch(filled):
            return metric
    raise UnknownMetricError(f"{filled!r} is not in the table of metrics, dask_gpurt.observe.metrics.METRICS")


def combine(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Put the metrics of several processes together: counters are summed, of gauges the largest is kept.

    Names that this version does not know, of a worker of another version, count as counters.
    """
    combined: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            known = combined.get(name, 0)
            combined[name] = max(known, value) if _is_gauge(name) else known + value
    return combined


def _is_gauge(filled: str) -> bool:
    try:
        return find(filled).kind is Kind.GAUGE
    except UnknownMetricError:
        return False


class Metrics:
    """Count metrics and fallbacks of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(int)
        self._fallbacks: dict[str, dict[str, Any]] = {}

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Add to a counter.

        Parameters
        ----------
        name
            As :data:`METRICS` has it: ``exchange.bytes.{path}``.
        amount
            In the unit of the metric.
        labels
            The value of each label, in the order of the name.

        Raises
        ------
        UnknownMetricError
            When the table has no such counter, or one with other labels.
        """
        _require(name, Kind.COUNTER, labels)
        with self._lock:
            self._values[name, labels] += amount

    def peak(self, name: str, value: float, *labels: str) -> None:
        """Keep the largest value seen of a gauge; parameters and errors as of :meth:`add`."""
        _require(name, Kind.GAUGE, labels)
        with self._lock:
            self._values[name, labels] = max(self._values[name, labels], value)

    @contextmanager
    def seconds(self, name: str) -> Iterator[None]:
        """Add the time that the body takes to a counter of seconds."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - start)

    def fallback(self, what: Fallback, reason: str, *labels: str) -> None:
        """Count that something was left to Dask, or done in a lesser way; log it the first time.

        Parameters
        ----------
        what
            The id of what was not done.
        reason
            Why, for people.
        labels
            The value of each label of the id.
        """
        filled, text = what.filled(*labels)
        with self._lock:
            known = self._fallbacks.setdefault(filled, {"text": text, "reason": reason, "count": 0})
            known["count"] += 1
            known["reason"] = reason
            first = known["count"] == 1
        if first:
            logger.warning("%s: %s (%s; logged once, `dask gpurt doctor` counts)", text, reason, filled)

    def total(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric by the values of its labels."""
        with self._lock:
            return {labels: value for (known, labels), value in self._values.items() if known == name}

    def samples(self) -> list[tuple[Metric, tuple[str, ...], float]]:
        """Return every metric that has a value, with the values of its labels and its own."""
        with self._lock:
            values = list(self._values.items())
        return [(METRICS[name], labels, value) for (name, labels), value in values]

    def snapshot(self) -> dict[str, Any]:
        """Return ``counters`` by filled name, and ``fallbacks`` by id, as plain values."""
        with self._lock:
            fallbacks = {id: dict(known) for id, known in self._fallbacks.items()}
        counters = {metric.filled(labels): value for metric, labels, value in self.samples()}
        return {"counters": counters, "fallbacks": fallbacks}


def _require(name: str, kind: Kind, labels: tuple[str, ...]) -> None:
    metric = METRICS.get(name)
    if metric is None:
        raise UnknownMetricError(
            f"{name!r} is not in the table of metrics, dask_gpurt.observe.metrics.METRICS"
        )
    if metric.kind is not kind or len(metric.labels) != len(labels):
        raise UnknownMetricError(
            f"{name!r} is a {metric.kind} with the labels {metric.labels}, and was given {labels} as a {kind}"
        )
