"""Count the metrics and fallbacks of one process, and choices of shuffle methods.

``dask gpurt doctor`` and :func:`dask_gpurt.report` show fallbacks, which are what the runtime leaves to Dask
or does in a lesser way, with their text and latest reason, and the count of each choice;
``docs/guides/troubleshooting.md`` says what to do about each fallback.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from time import perf_counter
from typing import Any

from dask_gpurt.observe.metrics import METRICS, Kind, Metric, UnknownMetricError
from dask_gpurt.observe.recording import MARKED, STEPS, Recording

#: Where subjects are handled that are not rooms themselves.
_WITHIN = {
    "planning": "client.planning",
    "results": "client",
    "dashboard": "monitor.dashboard",
    "programs": "worker",
}


class Fallback(Enum):
    """Identify a fallback by a dotted, stable id and a human-readable text.

    ``id``: the room and the subject.
    ``text``: the behaviour of the fallback, as a clause.
    """

    SHUFFLE_UNSUPPORTED_FRAMES = "shuffle.unsupported-frames", "shuffles stay with Dask"
    SHUFFLE_RUN_LOOKUP = "shuffle.run-lookup", "tasks look up their run on the event loop"
    SHUFFLE_RESULTS_FETCHED = (
        "shuffle.results-fetched",
        "barriers and outputs fetch the results that they need",
    )
    SHUFFLE_BAGS = "shuffle.bags", "bags of shuffled dataframes cannot be computed"
    SHUFFLE_RETIREMENT = "shuffle.retirement", "inputs of a worker that retires are transferred again"

    EXCHANGE_COMMS = "exchange.comms", "bytes go through Dask's comms"
    EXCHANGE_SHM_FULL = "exchange.shm-full", "producers wait for room in shared memory"
    EXCHANGE_FEW_DESCRIPTORS = "exchange.few-descriptors", "transfers may fail for lack of file descriptors"
    EXCHANGE_SPILLED_ON_ARRIVAL = "exchange.spilled-on-arrival", "pulled shards do not fit on the device"

    MEMORY_FETCH_WITHOUT_ROOM = "memory.fetch-without-room", "fetches start without a memory reservation"
    MEMORY_ADMITTED_OVERDUE = ("memory.admitted-overdue", "requests are admitted after waiting too long")
    MEMORY_DEFAULT_LIMITS = (
        "memory.default-limits",
        "a worker that joined later uses the default limits of tiers",
    )
    MEMORY_SPLIT = "memory.split", "work is split after running out of memory"
    MEMORY_DEPENDENTS_FIRST = (
        "memory.dependents-first",
        "a worker does not wait for the tasks that read a result",
    )
    MEMORY_UNPICKLABLE = "memory.unpicklable", "an object cannot be spilled"
    MEMORY_TIERS_FULL = "memory.tiers-full", "objects exceed their tier's limit"
    MEMORY_SPILL_UNREADABLE = "memory.spill-unreadable", "spilled data is recomputed"
    MEMORY_GPU_NODES_UNKNOWN = (
        "memory.gpu-nodes-unknown",
        "memory of GPUs that is part of the host's counts as the host's",
    )
    MEMORY_NOT_PINNED = "memory.not-pinned", "no more host memory is pinned"
    MEMORY_FILES_WITHOUT_KVIKIO = "memory.files-without-kvikio", "files are read and written without kvikio"
    MEMORY_NO_PEER_COPIES = "memory.no-peer-copies", "peers fetch objects from where they are on the GPU"

    PROGRAMS_OFF = "programs.off", "fused tasks run through the frames of cudf"
    PROGRAMS_NODE = "programs.node", "an operation failed on columns, and ran through the frames of cudf"
    PROGRAMS_DIFFERENT = "programs.different", "an operation on columns differed from cudf's, which was used"

    READS_KEEP_SLOT = "reads.keep-slot", "tasks that read files keep their slot"
    READS_SHARE_STREAM = "reads.share-stream", "reads wait for tasks that compute"
    READS_NOT_KEPT = "reads.not-kept", "what tasks read of files is not kept"
    READ_PLACES = "reads.place", "Dask decides where files are read"

    DASHBOARD_PAGES = "dashboard.pages", "the dashboard does not list the page of the runtime"

    PLANNING_CLIENT = "planning.client", "the computations of a client are planned by Dask"
    RESULTS_UNSUPPORTED = "results.unsupported", "results are put together on a worker"
    RESULTS_THROUGH_SCHEDULER = "results.through-scheduler", "results go through the scheduler"

    PLANNING_PICKLED_ANEW = "planning.pickled-anew", "a plan is pickled each time it is computed"
    PLANNING_UNSUPPORTED = (
        "planning.unsupported",
        "each query is planned anew, and no tasks are fused, as with Dask",
    )
    PLANNING_STORE_UNREADABLE = (
        "planning.store-unreadable",
        "what other processes have planned is planned again",
    )
    PLANNING_AS_DASK = (
        "planning.as-dask",
        "the tables of a query are read in as many partitions as Dask makes",
    )
    PLANNING_FILES = "planning.files", "dask_cudf describes the columns of files by kernels"
    PLANNING_NOT_TOLD = "planning.not-told", "the dashboard does not say how a plan came about"
    PLANNING_NOT_STORED = "planning.not-stored", "what is planned is not kept for other processes"

    OVERLAP_UNCAPPED = "overlap.uncapped", "kernels are not capped beside a shuffle"
    OVERLAP_HANDED_OVER_EARLY = "overlap.handed-over-early", "memory is reused before pending work ends"

    def __init__(self, id: str, text: str):
        self.id = id
        self.text = text

    @property
    def room(self) -> str:
        """Return the room of the fallback, which is also the name of its logger."""
        subject = self.id.partition(".")[0]
        return _WITHIN.get(subject, subject)


class Metrics:
    """Count metrics and fallbacks of one process. Thread-safe.

    ``recording``: also receives steps, faults and fallbacks while a trace is taken; None otherwise.
    ``lines``: what waits in line in this process. Each says in its ``repr`` for what, and for how long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(int)
        self._fallbacks: dict[str, dict[str, Any]] = {}
        self.recording: Recording | None = None
        self.lines = weakref.WeakSet[Any]()

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Add to a counter.

        ``name``: the name in :data:`METRICS`: ``exchange.bytes.{path}``.
        ``amount``: in the unit of the metric.
        ``labels``: the value of each label, in the order of :attr:`Metric.all_labels`.
        Raises UnknownMetricError if the table has no such counter, or the number of labels differs.
        """
        key = (name, labels)
        if key not in self._values:  # or it has been compared with the table
            _require(name, Kind.COUNTER, labels)
        with self._lock:
            self._values[key] += amount
        if (recording := self.recording) is not None and name in MARKED:
            recording.mark(METRICS[name].filled(labels), amount=amount)

    def peak(self, name: str, value: float, *labels: str) -> None:
        """Raise a gauge to ``value`` if that is larger; parameters and errors as for :meth:`add`."""
        _require(name, Kind.GAUGE, labels)
        with self._lock:
            self._values[name, labels] = max(self._values[name, labels], value)

    @contextmanager
    def seconds(self, name: str, subject: int | None = None) -> Iterator[None]:
        """Add the duration of the body to a counter of seconds, and record it as a step of this thread.

        ``subject``: the number of the input or output, for the trace: see
        :data:`~dask_gpurt.observe.recording.STEPS`.
        """
        recording = self.recording  # a recording that starts during the body has not seen its begin
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, seconds := perf_counter() - start)
            if recording is not None and (step := STEPS.get(name)) is not None:
                args = {} if subject is None else {step.subject: subject}
                recording.timed(step.name, start, seconds, **args)

    def fallback(self, what: Fallback, reason: str) -> None:
        """Count an operation that was left to Dask or done in a lesser way; log the first occurrence."""
        with self._lock:
            known = self._fallbacks.setdefault(what.id, {"text": what.text, "reason": reason, "count": 0})
            known["count"] += 1
            known["reason"] = reason
            first = known["count"] == 1
        if (recording := self.recording) is not None:
            recording.mark("fallback", id=what.id, reason=reason)
        if first:
            logger = logging.getLogger(f"dask_gpurt.{what.room}")
            told = "%s: %s (%s; logged once, `dask gpurt doctor` counts)"
            logger.warning(told, what.text, reason, what.id)

    def total(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric, keyed by the values of its labels."""
        with self._lock:
            return {labels: value for (known, labels), value in self._values.items() if known == name}

    def samples(self) -> list[tuple[Metric, tuple[str, ...], float]]:
        """Return each counted metric, with the values of all its labels, and its value."""
        with self._lock:
            values = list(self._values.items())
        return [(METRICS[name], labels, value) for (name, labels), value in values]

    def snapshot(self) -> dict[str, Any]:
        """Return ``counters`` by filled name, and ``fallbacks`` by id, as plain values."""
        counters: dict[str, float] = {}
        for metric, labels, value in self.samples():
            filled = metric.filled(labels)
            counters[filled] = counters.get(filled, 0) + value
        return {"counters": counters, "fallbacks": self.fallbacks()}

    def fallbacks(self) -> dict[str, dict[str, Any]]:
        """Return ``text``, ``reason`` and ``count`` of each fallback, by id."""
        with self._lock:
            return {id: dict(known) for id, known in self._fallbacks.items()}


def _require(name: str, kind: Kind, labels: tuple[str, ...]) -> None:
    metric = METRICS.get(name)
    if metric is None:
        raise UnknownMetricError(
            f"{name!r} is not in the table of metrics, dask_gpurt.observe.metrics.METRICS"
        )
    if metric.kind is not kind or len(metric.all_labels) != len(labels):
        raise UnknownMetricError(
            f"{name!r} is a {metric.kind} with the labels {metric.all_labels}, "
            f"and was given {labels} as a {kind}"
        )


# ---- choices of shuffle methods ----------------------------------------------------------------------

#: The topic of Dask's events with which clients report their choices to the scheduler.
METHOD_TOPIC = "gpurt-shuffle-methods"


class MethodChoice(Enum):
    """Identify a choice of the shuffle method by a stable id and a human-readable text.

    ``id``: the last part of the metrics ``shuffle.taken.{why}`` and ``shuffle.left.{why}``.
    ``taken``: whether the shuffle goes through the runtime.
    ``text``: the reason, as a clause.
    """

    DEFAULT = "default", True, "no method is set"
    NAMED = "named", True, "the method is 'gpurt'"
    CONFIGURED_TASKS = "configured-tasks", True, "'tasks' is configured"
    ARGUMENT_TASKS = "argument-tasks", True, "'tasks' is an argument, and 'gpurt.takeover' is 'all'"

    ONLY_CONFIGURED = "only-configured", False, "'tasks' is an argument, and 'gpurt.takeover' is not 'all'"
    TAKEOVER_OFF = "takeover-off", False, "'gpurt.takeover' is false"
    EXPLICIT_COMMS = "explicit-comms", False, "'explicit-comms' of dask-cuda is on"
    LOCAL_SCHEDULER = "local-scheduler", False, "'scheduler' is one of Dask's own in the client's process"
    UNSUPPORTED_FRAMES = "unsupported-frames", False, "the frames are neither pandas nor cudf"
    COLUMN_LEVELS = "column-levels", False, "the columns have several levels"
    COLUMN_TAKEN = "column-taken", False, "a column has the name under which Dask adds output partitions"
    OTHER_METHOD = "other-method", False, "another Dask method is set"

    def __init__(self, id: str, taken: bool, text: str):
        self.id = id
        self.taken = taken
        self.text = text

    def count(self, metrics: Metrics) -> None:
        """Count this choice."""
        if self.taken:
            metrics.add("shuffle.taken.{why}", 1, self.id)
        else:
            metrics.add("shuffle.left.{why}", 1, self.id)

    def counted(self, counters: Mapping[str, float]) -> int:
        """Return the count of this choice in the counters of a report."""
        return int(counters.get(f"shuffle.{'taken' if self.taken else 'left'}.{self.id}", 0))


class Choices:
    """Report choices of shuffle methods, and record those that are made in planning a query.

    A plan that another process has made is used without choosing again; then the recorded ones are reported.

    ``report``: called with the name of an expression and the choice for it.
    """

    def __init__(self, report: Callable[[str, MethodChoice], None]):
        self._report = report
        self._recorded: ContextVar[list[tuple[str, MethodChoice]] | None] = ContextVar(
            "gpurt-choices", default=None
        )

    def __call__(self, expression: str, choice: MethodChoice) -> None:
        """Report a choice, and record it if that is asked for."""
        if (recorded := self._recorded.get()) is not None:
            recorded.append((expression, choice))
        self._report(expression, choice)

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[str, MethodChoice]]]:
        """Record the choices that are made in the context."""
        found: list[tuple[str, MethodChoice]] = []
        token = self._recorded.set(found)
        try:
            yield found
        finally:
            self._recorded.reset(token)

    def report_again(self, recorded: Iterable[tuple[str, MethodChoice]]) -> None:
        """Report recorded choices again."""
        for expression, choice in recorded:
            self._report(expression, choice)
