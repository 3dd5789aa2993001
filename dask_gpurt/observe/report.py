"""Define what the client API reports of a cluster: typed objects that are readable in a console.

Reports behave as mappings, and the memory usage as a sequence of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from html import escape
from typing import Any

import pandas as pd
from dask.utils import format_bytes, format_time

from dask_gpurt.observe.metrics import Unit, UnknownMetricError, find, shown_metric
from dask_gpurt.observe.tables import PrintedTable, Queries


class _Plain(Mapping[str, Any]):
    """Convert a mapping of mappings to plain values."""

    def to_dict(self) -> dict[str, Any]:
        """Return all contents as JSON-serialisable values."""
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple, PrintedTable)) else value


class _Record(_Plain):
    """Expose the fields of a dataclass as the items of a mapping too."""

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    @classmethod
    def _fields(cls) -> tuple[str, ...]:
        return tuple(item.name for item in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def _known(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that have a field; a process with another version may send more."""
        return {name: value for name, value in values.items() if name in cls._fields()}

    def _names(self) -> tuple[str, ...]:
        return self._fields()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


@dataclass(frozen=True, eq=False)
class FallbackCount(_Record):
    """Hold the count of a fallback, and the reason of its last occurrence.

    Parameters
    ----------
    text
        The behaviour of the fallback.
    reason
        The reason of the last occurrence.
    count
        Occurrences since the runtime was switched on.
    """

    text: str
    reason: str
    count: int

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> FallbackCount:
        """Build the count of a fallback from plain values."""
        return cls(**cls._known(known))


class Fallbacks(_Plain):
    """Hold counts of fallbacks, by the id of a :class:`~dask_gpurt.observe.Fallback`."""

    def __init__(self, counted: Mapping[str, Mapping[str, Any]] | None = None):
        self._counted = {id: FallbackCount.of(known) for id, known in (counted or {}).items()}

    def __getitem__(self, id: str) -> FallbackCount:
        return self._counted[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counted)

    def __len__(self) -> int:
        return len(self._counted)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._counted!r})"


@dataclass(frozen=True, eq=False, repr=False)
class WorkerReport(_Record):
    """Report the state, counters and fallbacks of the runtime on one worker.

    If the worker did not answer, ``error`` is the only item and the other fields are empty.

    Parameters
    ----------
    version
        The version of the package on the worker.
    devices, pools
        The description of each device and the bytes of its exchange pool, by kind of device.
    paths, host_paths
        The ``path`` from a peer's main device, and from its host memory, with the ``reason`` why no better
        path is used; by address of the peer.
    overlap
        The ``mode`` in effect, the ``caps`` of kernels beside shuffles, and the ``reason`` if
        there cannot be any.
    reads
        ``beside``: the maximum number of tasks started while others read; ``threads``: the number of threads
        with which libcudf reads, as set in the environment.
    problems
        Errors in the settings of the worker, a sentence each.
    counters
        By name, as listed in ``docs/reference/metrics.md``.
    fallbacks
        By id.
    error
        Why the worker did not answer; None if it did.
    """

    version: str = ""
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    paths: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    host_paths: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    overlap: Mapping[str, Any] = field(default_factory=dict)
    reads: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    error: str | None = None

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> WorkerReport:
        """Build the report of a worker from the plain values that it sent."""
        typed = {
            **reply,
            "problems": tuple(reply.get("problems", ())),
            "fallbacks": Fallbacks(reply.get("fallbacks")),
        }
        return cls(**cls._known(typed))

    def _names(self) -> tuple[str, ...]:
        if self.error is not None:
            return ("error",)
        return tuple(name for name in super()._names() if name != "error")

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<WorkerReport: no answer, {self.error}>"
        lines = [f"<WorkerReport: dask-gpurt {self.version} on {' and '.join(self.devices) or 'no device'}"]
        lines += [f"  {problem}" for problem in self.problems]
        lines += _counter_lines(self.counters, set(self.devices))
        lines += [f"  {_fallback(id, known)}" for id, known in self.fallbacks.items()]
        return "\n".join(lines) + ">"


@dataclass(frozen=True, eq=False, repr=False)
class DepartedWorker(_Record):
    """Report the counters and fallbacks of a worker that has left, as of its last heartbeat or report.

    Parameters
    ----------
    address, name
        The worker's address and name.
    left
        When the scheduler noticed that it had left, in seconds since the epoch.
    silent
        Seconds from its last heartbeat or report until then, which the counters do not cover; None if there
        was neither.
    counters, fallbacks
        As in a :class:`WorkerReport`.
    """

    address: str
    name: str
    left: float
    silent: float | None
    counters: Mapping[str, float] = field(default_factory=dict)
    fallbacks: Fallbacks = field(default_factory=Fallbacks)

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> DepartedWorker:
        """Build the report of a worker that has left from plain values."""
        return cls(**cls._known({**known, "fallbacks": Fallbacks(known["fallbacks"])}))

    def __repr__(self) -> str:
        return f"<DepartedWorker: {self}>"

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.left).strftime("%H:%M:%S")
        if self.silent is None:
            return f"{self.address} left at {at} before its first report: its work is not counted"
        return f"{self.address} left at {at}: its last {format_time(self.silent)} are not counted"


@dataclass(frozen=True, eq=False, repr=False)
class RuntimeReport(_Record):
    """Report the state, counters and fallbacks of the runtime on a cluster.

    Parameters
    ----------
    enabled
        Whether the runtime is on. If not, all other fields are empty.
    version
        The version of the package on the scheduler.
    takeover
        The setting ``gpurt.takeover`` with which the runtime was switched on: false, true or ``"all"``.
    counters
        Metrics of the whole cluster by name, as listed in ``docs/reference/metrics.md``: the sums of
        counters, the largest values of gauges. Workers that have left are included as of their last
        heartbeat or report.
    fallbacks
        Fallbacks of the scheduler, by id.
    workers
        The reports of workers, by address.
    departed
        The workers that have left since the runtime was switched on, the latest 100.
    queries
        The last computations: time, tasks, bytes, and what rules did and left.
    """

    enabled: bool = False
    version: str | None = None
    takeover: bool | str = False
    counters: Mapping[str, float] = field(default_factory=dict)
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    workers: Mapping[str, WorkerReport] = field(default_factory=dict)
    departed: tuple[DepartedWorker, ...] = ()
    queries: Queries = Queries(())

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> RuntimeReport:
        """Build the report of a cluster from the plain values that its scheduler sent."""
        typed = {
            **reply,
            "fallbacks": Fallbacks(reply["fallbacks"]),
            "workers": {address: WorkerReport.of(one) for address, one in reply["workers"].items()},
            # A scheduler with another version may not send this.
            "departed": tuple(DepartedWorker.of(one) for one in reply.get("departed", ())),
            "queries": Queries(tuple(reply.get("queries", ()))),
        }
        return cls(**cls._known(typed))

    def to_pandas(self) -> pd.DataFrame:
        """Return a frame of the counters.

        Returns
        -------
        pandas.DataFrame
            A row for each ``metric`` of each ``worker``, including workers that have left, and of the whole
            ``cluster``: its ``value`` and its ``unit``, which is ``bytes``, ``seconds`` or empty.
        """
        counted = [
            ("cluster", self.counters),
            *((address, worker.counters) for address, worker in self.workers.items()),
            *((gone.address, gone.counters) for gone in self.departed),
        ]
        rows = [
            (where, name, value, str(_unit(name)))
            for where, counters in counted
            for name, value in sorted(counters.items())
        ]
        return pd.DataFrame(rows, columns=["worker", "metric", "value", "unit"])

    def _repr_html_(self) -> str:
        return super()._repr_html_() + (self.queries.to_html() if self.queries else "")

    @property
    def devices(self) -> set[str]:
        """Return the kinds of device of all workers."""
        return {kind for worker in self.workers.values() for kind in worker.devices}

    def __repr__(self) -> str:
        if not self.enabled:
            return "<RuntimeReport: the runtime is off>"
        count = len(self.workers)
        lines = [f"<RuntimeReport: dask-gpurt {self.version} on {count} worker{'' if count == 1 else 's'}"]
        lines += _counter_lines(self.counters, self.devices)
        lines += [f"  scheduler {_fallback(id, known)}" for id, known in self.fallbacks.items()]
        for address, worker in self.workers.items():
            if worker.error is not None:
                lines.append(f"  {address} did not answer: {worker.error}")
            lines += [f"  {address} {_fallback(id, known)}" for id, known in worker.fallbacks.items()]
        for gone in self.departed:
            lines.append(f"  {gone}")
            lines += [f"  {gone.address} {_fallback(id, known)}" for id, known in gone.fallbacks.items()]
        return "\n".join(lines) + ">"


def _counter_lines(counters: Mapping[str, float], devices: set[str]) -> list[str]:
    shown = shown_metric if devices == {"host"} else str
    return [f"  {shown(name)}: {_readable(name, value)}" for name, value in sorted(counters.items())]


def _fallback(id: str, known: FallbackCount) -> str:
    times = "once" if known.count == 1 else f"{known.count} times"
    return f"fell back {times}, {known.text} ({id}): {known.reason}"


def _unit(name: str) -> Unit:
    try:
        return find(name).unit
    except UnknownMetricError:  # from a worker with another version
        return Unit.NUMBER


def _readable(name: str, value: float) -> str:
    """Return a value with its unit."""
    match _unit(name):
        case Unit.BYTES:
            return format_bytes(int(value))
        case Unit.SECONDS:
            return format_time(value)
        case _:
            return f"{value:,.0f}"
