"""Declare every metric of the runtime.

:data:`METRICS` is the one table of what is counted, with name, type, unit and meaning of each. A name that is
not in it is refused when it is first counted. :data:`READINGS` has what is not counted but read when a page
for Prometheus is asked for. Reports, these pages, the dashboard in ``etc/grafana`` and
``docs/reference/metrics.md`` are made from these tables, or checked against them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache


class Server(StrEnum):
    """Name the processes of a cluster in which a metric is counted, as Dask names them for Prometheus."""

    WORKER = "worker"
    SCHEDULER = "scheduler"
    #: Has no page for Prometheus.
    CLIENT = "client"


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
        The name for Prometheus, without what comes before it (:meth:`family`) and the suffix ``_total`` of
        counters; made of ``name`` and ``unit`` if not given.
    finer
        Labels besides those of ``name``, that Prometheus has and reports sum over.
    servers
        Where it is counted.
    """

    name: str
    kind: Kind
    unit: Unit
    help: str
    exported: str = ""
    finer: tuple[str, ...] = ()
    servers: tuple[Server, ...] = (Server.WORKER,)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return the labels that are part of the name."""
        return tuple(re.findall(r"\{(\w+)\}", self.name))

    @cached_property
    def all_labels(self) -> tuple[str, ...]:
        """Return the names of all labels, in the order in which their values are given."""
        return (*self.labels, *self.finer)

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

    def family(self, server: Server, namespace: str = "dask") -> str:
        """Return the name as a server's page has it.

        Parameters
        ----------
        namespace
            Dask's setting ``distributed.dashboard.prometheus.namespace``.
        """
        suffix = "total" if self.kind is Kind.COUNTER else ""
        return "_".join(filter(None, (namespace, server, self.prometheus, suffix)))

    def filled(self, values: tuple[str, ...]) -> str:
        """Return the name with the values of the labels in it; values of finer labels are left out."""
        if not self.labels:
            return self.name
        return re.sub(r"\{\w+\}", "{}", self.name).format(*values[: len(self.labels)])


def _counter(
    name: str,
    help: str,
    unit: Unit = Unit.NUMBER,
    exported: str = "",
    *,
    finer: tuple[str, ...] = (),
    on: Server = Server.WORKER,
) -> Metric:
    return Metric(name, Kind.COUNTER, unit, help, exported, finer, (on,))


def _gauge(name: str, help: str, unit: Unit) -> Metric:
    return Metric(name, Kind.GAUGE, unit, help)


#: The label of a shard's producer, as its owner sees it: `same-worker`, `same-host` or `other-host`.
_PEER = ("peer",)

#: Every metric that is counted, by name.
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        # ---- shuffle
        Metric(
            "shuffle.runs",
            Kind.COUNTER,
            Unit.NUMBER,
            "runs; of a worker those that it took part in, of the cluster each once",
            servers=(Server.WORKER, Server.SCHEDULER),
        ),
        _counter(
            "shuffle.runs.recovered",
            "times that runs went on with other owners after a loss",
            on=Server.SCHEDULER,
        ),
        _counter("shuffle.runs.restarted", "runs that began again as a whole", on=Server.SCHEDULER),
        _counter(
            "shuffle.outputs.moved",
            "outputs that got other owners once their sizes were known",
            on=Server.SCHEDULER,
        ),
        _counter("shuffle.elements", "elements of input chunks of rechunks"),
        _counter("shuffle.inputs.missing", "inputs that were missing at a barrier, and transferred again"),
        _counter("shuffle.lost.shards", "shards that an owner had taken and could not read"),
        _counter("shuffle.recovered.shards", "shards offered to the owners of new shares"),
        _counter("shuffle.rows", "rows of input partitions"),
        _counter(
            "shuffle.shards.{answer}",
            "shards that an owner does not take, by why: `repeated`, `stale`, `outdated`",
        ),
        _counter("shuffle.tasks.redirected", "unpack tasks that had started elsewhere than on their owner"),
        _counter(
            "shuffle.results.sent",
            "results of transfers and barriers that were sent ahead of the tasks that need them",
            on=Server.SCHEDULER,
        ),
        _counter(
            "shuffle.taken-over",
            "runs of `p2p` shuffles and rechunks in whose place the runtime served",
            on=Server.SCHEDULER,
        ),
        _counter(
            "shuffle.taken.{why}",
            "distinct shuffles and joins that clients sent through it, by why",
            on=Server.SCHEDULER,
        ),
        _counter(
            "shuffle.left.{why}", "shuffles that were left to Dask's own method, by why", on=Server.SCHEDULER
        ),
        _counter("shuffle.seconds.splitting", "time of task threads that split partitions", Unit.SECONDS),
        _counter("shuffle.seconds.packing", "the same that packed shards, and waited for room", Unit.SECONDS),
        _counter("shuffle.seconds.assembling", "the same that put outputs together", Unit.SECONDS),
        # ---- exchange
        _counter(
            "exchange.bytes.{path}",
            "bytes offered to owners, by the path that they take",
            Unit.BYTES,
            finer=_PEER,
        ),
        _counter(
            "exchange.shards.{path}", "shards offered to owners, by the path that they take", finer=_PEER
        ),
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
        _counter("reads.aside", "tasks that left their slot to another one as they read or wrote files"),
        _counter(
            "reads.seconds.reading",
            "time of task threads in known readers and writers of files",
            Unit.SECONDS,
        ),
        _counter(
            "reads.seconds.beside",
            "time in which a task read or wrote while another one computed",
            Unit.SECONDS,
        ),
        _counter(
            "reads.seconds.waiting",
            "time of task threads that waited for others to compute, after a read or write or before they "
            "began",
            Unit.SECONDS,
        ),
        # ---- placement
        _counter("placement.decisions", "workers that were chosen for a task", on=Server.SCHEDULER),
        _counter(
            "placement.shuffles", "shuffles whose outputs were given owners by cost", on=Server.SCHEDULER
        ),
        _counter(
            "placement.engaged.{reason}",
            "times that placement began to choose, by reason: `links`, `speeds`, `residency`, `headroom`",
            on=Server.SCHEDULER,
        ),
        _counter("placement.replicas.made", "replicas that were asked for", on=Server.SCHEDULER),
        _counter("placement.replicas.refused", "replicas that no worker had room for", on=Server.SCHEDULER),
        _counter("placement.replicas.dropped", "replicas that were given up", on=Server.SCHEDULER),
        # ---- planning
        _counter(
            "planning.expressions.{outcome}",
            "expressions of a client: `reused`, `kept`, `not-kept`",
            on=Server.CLIENT,
        ),
        _counter(
            "planning.metadata.{outcome}", "metadata of operations: `reused`, `computed`", on=Server.CLIENT
        ),
        _counter(
            "planning.files.{outcome}", "looks at the files of a table: `reused`, `read`", on=Server.CLIENT
        ),
        _counter("planning.plans.{outcome}", "optimised queries: `reused`, `computed`", on=Server.CLIENT),
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

#: Metrics that are read when a page for Prometheus is requested, by name. Reports have them in another form.
READINGS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "memory.held.{tier}.{kind}",
            Kind.GAUGE,
            Unit.BYTES,
            "bytes in a tier, by kind, and its `capacity`",
            "gpurt_memory_bytes",
        ),
        Metric(
            "fallbacks.{fallback}",
            Kind.COUNTER,
            Unit.NUMBER,
            "times that something was left to Dask, or done in a lesser way, by id",
            servers=(Server.WORKER, Server.SCHEDULER),
        ),
        Metric(
            "workers.ready",
            Kind.GAUGE,
            Unit.NUMBER,
            "workers on which the runtime is on",
            servers=(Server.SCHEDULER,),
        ),
        Metric(
            "shuffles.active",
            Kind.GAUGE,
            Unit.NUMBER,
            "shuffles that run, or whose outputs may still be needed",
            servers=(Server.SCHEDULER,),
        ),
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


@lru_cache(maxsize=4096)  # of all workers' names, which are much the same
def _is_gauge(filled: str) -> bool:
    try:
        return find(filled).kind is Kind.GAUGE
    except UnknownMetricError:
        return False
