"""Declare every metric of the runtime, and what the tiers that they count are called for people.

:data:`METRICS` is the single table of counted metrics, with the name, type, unit and meaning of each;
counting any other name raises. :data:`READINGS` declares values that are read when Prometheus scrapes a
process. Reports, Prometheus pages, the dashboard in ``etc/grafana`` and ``docs/reference/metrics.md`` are
generated from these tables, or checked against them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any


class Server(StrEnum):
    """Name the processes of a cluster in which a metric is counted, as Dask names them for Prometheus."""

    WORKER = "worker"
    SCHEDULER = "scheduler"
    #: Has no Prometheus page.
    CLIENT = "client"


class Kind(StrEnum):
    """Define how a metric changes over time, and how values of several workers are combined."""

    #: Only grows. Values of several workers are summed.
    COUNTER = "counter"
    #: Keeps the largest value seen. The largest value of several workers is kept.
    GAUGE = "gauge"


class Unit(StrEnum):
    """Name the unit of a metric; plain numbers have an empty unit."""

    NUMBER = ""
    BYTES = "bytes"
    SECONDS = "seconds"


class UnknownMetricError(KeyError):
    """Report a metric that is not in :data:`METRICS`, or that is used contrary to its declaration."""


@dataclass(frozen=True)
class Metric:
    """Declare a metric.

    ``name``: dotted; ``{label}`` stands for the value of a label: ``exchange.bytes.{path}``. Reports use the
    name with the values filled in: ``exchange.bytes.comms``.
    ``help``: its meaning, as a noun phrase.
    ``exported``: the name for Prometheus, without the prefix that :meth:`family` adds and without the suffix
    ``_total`` of counters; by default derived from ``name`` and ``unit``.
    ``finer``: labels besides those in ``name``. Prometheus shows them; reports sum over them.
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
        """Return the labels in the name."""
        return tuple(re.findall(r"\{(\w+)\}", self.name))

    @cached_property
    def all_labels(self) -> tuple[str, ...]:
        """Return the names of all labels, in the order in which their values are given."""
        return (*self.labels, *self.finer)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches the name with the values of the labels filled in."""
        fixed = [re.escape(part) for part in re.split(r"\{\w+\}", self.name)]
        # Only the last value may contain dots.
        head, tail = "([^.]+)".join(fixed[:-1]), fixed[-1]
        return re.compile(f"{head}(.+){tail}" if self.labels else tail)

    @cached_property
    def prometheus(self) -> str:
        """Return the name for Prometheus: words, then the unit."""
        words = [word for word in self.name.split(".") if word != self.unit and "{" not in word]
        name = "_".join(["gpurt", *words, *filter(None, [self.unit])])
        return self.exported or name.replace("-", "_")

    def family(self, server: Server, namespace: str = "dask") -> str:
        """Return the name on a server's Prometheus page.

        ``namespace``: Dask's setting ``distributed.dashboard.prometheus.namespace``.
        """
        suffix = "total" if self.kind is Kind.COUNTER else ""
        return "_".join(filter(None, (namespace, server, self.prometheus, suffix)))

    def filled(self, values: tuple[str, ...]) -> str:
        """Return the name with the values of the labels filled in, without finer labels."""
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


#: The label of a shard's producer relative to its owner: `same-worker`, `same-host` or `other-host`.
_PEER = ("peer",)

#: All counted metrics, by name.
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        # ---- shuffle
        Metric(
            "shuffle.runs",
            Kind.COUNTER,
            Unit.NUMBER,
            "runs; a worker counts the runs it took part in, the cluster counts each run once",
            servers=(Server.WORKER, Server.SCHEDULER),
        ),
        _counter(
            "shuffle.runs.recovered",
            "recoveries of runs that continued with other owners after a loss",
            on=Server.SCHEDULER,
        ),
        _counter("shuffle.runs.restarted", "runs that restarted as a whole", on=Server.SCHEDULER),
        _counter("shuffle.workers.silent", "silent workers that runs went on without", on=Server.SCHEDULER),
        _counter(
            "shuffle.outputs.moved",
            "outputs moved to other owners once their sizes were known",
            on=Server.SCHEDULER,
        ),
        _counter("shuffle.elements", "elements of input chunks of rechunks"),
        _counter("shuffle.inputs.missing", "inputs missing at a barrier, and transferred again"),
        _counter("shuffle.lost.shards", "shards that an owner had accepted and could not read"),
        _counter("shuffle.recovered.shards", "shards offered to the owners of new shares"),
        _counter("shuffle.rows", "rows of input partitions"),
        _counter(
            "shuffle.shards.{answer}",
            "shards that an owner does not accept, by reason: `repeated`, `stale`, `outdated`",
        ),
        _counter("shuffle.tasks.redirected", "unpack tasks that started on a worker other than their owner"),
        _counter(
            "shuffle.results.sent",
            "results of transfers and barriers sent ahead of the tasks that need them",
            on=Server.SCHEDULER,
        ),
        _counter(
            "shuffle.taken-over",
            "runs of `p2p` shuffles and rechunks that the runtime took over",
            on=Server.SCHEDULER,
        ),
        _counter(
            "shuffle.taken.{why}",
            "distinct shuffles and joins that clients sent through the runtime, by reason",
            on=Server.SCHEDULER,
        ),
        _counter("shuffle.left.{why}", "shuffles left to Dask's own method, by reason", on=Server.SCHEDULER),
        _counter("shuffle.seconds.splitting", "thread time spent splitting partitions", Unit.SECONDS),
        _counter(
            "shuffle.seconds.packing",
            "thread time spent packing shards, including waits for room",
            Unit.SECONDS,
        ),
        _counter("shuffle.seconds.assembling", "thread time spent assembling outputs", Unit.SECONDS),
        # ---- exchange
        _counter("exchange.bytes.{path}", "bytes offered to owners, by path", Unit.BYTES, finer=_PEER),
        _counter("exchange.shards.{path}", "shards offered to owners, by path", finer=_PEER),
        _counter("exchange.pulled.bytes", "bytes copied from mapped pools, not read in place", Unit.BYTES),
        _counter("exchange.seconds.pulling", "thread time spent copying shards", Unit.SECONDS),
        _counter(
            "exchange.seconds.waiting-for-room",
            "time that producers waited for room in a full pool",
            Unit.SECONDS,
        ),
        _counter("exchange.drains", "requests to owners to make room in the pool of a peer"),
        _counter("exchange.calls.repeated", "repeated calls to peers"),
        _counter(
            "exchange.messages.stale",
            "messages for an earlier incarnation of this worker, which were refused",
        ),
        _counter(
            "exchange.retained.reclaimed",
            "bytes of retained shards freed to make room for others",
            Unit.BYTES,
        ),
        _gauge("exchange.pool.peak", "peak bytes in the pool", Unit.BYTES),
        _gauge("exchange.inflight.peak", "peak bytes of concurrent pulls", Unit.BYTES),
        # ---- memory
        _counter(
            "memory.spill.bytes.{from}.{to}",
            "bytes moved between tiers; from `exchange`: pulled shards stored directly below the device",
            Unit.BYTES,
            "gpurt_spill_bytes",
        ),
        _counter(
            "memory.spill.seconds",
            "time spent moving data between tiers",
            Unit.SECONDS,
            "gpurt_spill_seconds",
        ),
        _counter("memory.unspill.unheld", "objects read from a lower tier while no task held them"),
        _counter("memory.waits", "tasks, fetches and sends that waited for others because memory was short"),
        _counter("memory.waits.overdue", "tasks and fetches that started without room after they had waited"),
        _counter(
            "memory.waits.past-idle",
            "tasks and fetches that started without room, since all running tasks waited for the cluster",
        ),
        _counter("memory.retries", "tasks that ran out of memory and were retried"),
        _counter("memory.short", "requests of the device's allocator for room"),
        _counter(
            "memory.peer-copies.bytes",
            "bytes of objects on a GPU that were copied into one buffer for a peer to fetch",
            Unit.BYTES,
        ),
        _counter("memory.peer-copies.full", "objects that a peer fetched from where they were: no room"),
        _gauge("memory.{tier}.peak", "peak bytes in a tier", Unit.BYTES),
        # ---- programs
        _counter("programs.nodes", "operations of fused tasks that ran on columns"),
        _counter(
            "programs.left", "operations of fused tasks that were left to cudf, of those that are known"
        ),
        # ---- reads
        _counter(
            "reads.bytes.{source}",
            "bytes that tasks read of Parquet files: of remote ones from the `cache`, or the `store`; of "
            "columns that were on the `device`, in `pinned` memory or, on hosts, in `memory`, or had to be "
            "`decoded`",
            Unit.BYTES,
        ),
        _counter(
            "reads.hits.{source}",
            "times that tasks found ranges of remote files in the `cache`, or columns: on the `device`, in "
            "`pinned` memory, or in `memory` of a host",
        ),
        _counter(
            "reads.seconds.saved",
            "time that tasks did not spend on fetching or decoding what they found there; an estimate",
            Unit.SECONDS,
        ),
        _counter("reads.replaced", "reads made once more since a file was replaced while it was read"),
        _counter("reads.dropped", "allocations that failed, for which columns kept of files were dropped"),
        _counter("reads.aside", "tasks that left their slot to another task while they read or wrote files"),
        _counter("reads.streams", "reads of Parquet files on a CUDA stream of their own"),
        _counter(
            "reads.seconds.reading", "thread time spent in known readers and writers of files", Unit.SECONDS
        ),
        _counter(
            "reads.seconds.beside",
            "time in which a task read or wrote while another task computed",
            Unit.SECONDS,
        ),
        _counter(
            "reads.seconds.waiting",
            "thread time spent waiting for a turn to compute, after a read or write or before a task began",
            Unit.SECONDS,
        ),
        # ---- planning
        _counter(
            "planning.expressions.{outcome}",
            "expressions of a client: `reused`, `kept`, `not-kept`",
            on=Server.CLIENT,
        ),
        _counter(
            "planning.metadata.{outcome}",
            "descriptions of operations by rules (`derived`) and by Dask (`left`), and answers of the "
            "library to what the rules ask: `reused`, `loaded`, `computed`",
            on=Server.CLIENT,
        ),
        _counter(
            "planning.files.{outcome}",
            "inspections of the files of a table: `reused`, `loaded`, `read`",
            on=Server.CLIENT,
        ),
        _counter(
            "planning.plans.{outcome}", "optimised queries: `reused`, `loaded`, `computed`", on=Server.CLIENT
        ),
        _counter(
            "results.partitions",
            "partitions of results that a client has put together itself",
            on=Server.CLIENT,
        ),
        _counter(
            "planning.reads.{outcome}",
            "reads of tables in queries that were planned: `by-size`, or `as-dask` plans them",
            on=Server.CLIENT,
        ),
        _counter(
            "planning.local.{what}",
            "operations by a key of which no two files of a table have a value in common, which are done "
            "where the rows are read, in queries that were planned: `groups` or `duplicates`",
            on=Server.CLIENT,
        ),
        # ---- overlap
        _counter("overlap.confined", "times that residency caps were switched on beside a shuffle"),
        _counter("overlap.handovers", "checks of memory handovers, by the tests"),
        _counter("residency.{outcome}", "kernel launches while residency caps applied, by outcome"),
    )
}

#: Metrics that are read when Prometheus scrapes a process, by name. Reports have them in another form.
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
            "operations left to Dask or done in a lesser way, by id",
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
            "shuffles that are running, or whose outputs may still be needed",
            servers=(Server.SCHEDULER,),
        ),
    )
}


def find(filled: str) -> Metric:
    """Return the metric of a name with the values of its labels filled in.

    Raises UnknownMetricError if the name matches no metric in :data:`METRICS`.
    """
    if filled in METRICS:
        return METRICS[filled]
    for metric in METRICS.values():
        if metric.labels and metric.pattern.fullmatch(filled):
            return metric
    raise UnknownMetricError(f"{filled!r} is not in the table of metrics, dask_gpurt.observe.metrics.METRICS")


def combine(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several processes: sum counters, keep the largest value of gauges.

    Unknown names, from a worker with another version, count as counters.
    """
    combined: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            known = combined.get(name, 0)
            combined[name] = max(known, value) if _is_gauge(name) else known + value
    return combined


@lru_cache(maxsize=4096)  # workers report mostly the same names
def _is_gauge(filled: str) -> bool:
    try:
        return find(filled).kind is Kind.GAUGE
    except UnknownMetricError:
        return False


# ---- what tiers are called ---------------------------------------------------------------------------
#
# Metrics use the same names on all workers: the tier in which tasks compute is ``device``, and published
# shards count beside it. On a worker without a GPU that tier is host memory, and the pool of published shards
# is in shared memory. Whatever is printed for people uses the display names.

Row = Mapping[str, Any]

#: Display names used only for workers without a GPU.
MEMORY, SHARED_MEMORY = "memory", "shared memory"
#: All display names, from fast to slow.
SHOWN = ("device", MEMORY, SHARED_MEMORY, "pinned", "host", "disk")
#: Display names of the exchange pools, by kind of device.
SHOWN_POOLS: Mapping[str, str] = {"host": SHARED_MEMORY, "cuda": "device"}
#: The labels of metrics that name a tier.
_TIER_LABELS = ("tier", "from", "to")


def shown_tiers(rows: Iterable[Row], shared_memory: Mapping[str, int]) -> Iterator[Row]:
    """Yield the rows of workers and tiers with display names.

    ``rows``: rows with the names of metrics, for each worker and tier, or for each prefix of tasks in a tier.
    The tiers of a worker must be adjacent.
    ``shared_memory``: capacity of the exchange pool in bytes, by worker without a GPU.
    """
    rows = list(rows)
    beside: dict[str, Row] = {row["worker"]: row for row in rows if row["tier"] == "host"}
    for row in rows:
        worker, tier = row["worker"], row["tier"]
        if worker not in shared_memory or tier == "disk":
            yield row
        elif "prefix" in row:
            yield {**row, "tier": MEMORY} if tier == "device" else row
        elif tier == "device":
            # The process's other memory is host memory too, but is counted in the tier below.
            own = {kind: row[kind] + beside[worker][kind] for kind in ("cudf", "unmanaged")}
            yield {**row, **own, "tier": MEMORY, "published": 0}
            yield _pool(row, shared_memory[worker])
        elif row["capacity"]:  # zero unless the user has set it
            yield {**row, "cudf": 0, "unmanaged": 0}


def _pool(row: Row, capacity: int) -> Row:
    return {
        **dict.fromkeys(row, 0),
        "worker": row["worker"],
        "tier": SHARED_MEMORY,
        "capacity": capacity,
        "headroom": capacity - row["published"],
        "published": row["published"],
    }


def shown_metric(name: str) -> str:
    """Return the name of a metric of workers without a GPU, followed by the display names of its tiers."""
    try:
        metric = find(name)
    except UnknownMetricError:  # from a worker with another version
        return name
    found = metric.pattern.fullmatch(name)
    values = zip(metric.labels, found.groups() if found else (), strict=True)
    tiers = [value for label, value in values if label in _TIER_LABELS]
    if "device" not in tiers:
        return name
    return f"{name} ({' to '.join(MEMORY if tier == 'device' else tier for tier in tiers)})"
