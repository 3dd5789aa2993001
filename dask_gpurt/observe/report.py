"""Type the report of a cluster: objects for programs, readable in a console, mappings as on the wire."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

import pandas as pd
from dask.utils import format_bytes, format_time

from dask_gpurt.observe.fallbacks import FORMER_KEYS
from dask_gpurt.observe.metrics import Unit, UnknownMetricError, find


class _Plain(Mapping[str, Any]):
    """Turn a mapping of mappings into plain values."""

    def to_dict(self) -> dict[str, Any]:
        """Return it all as values that JSON holds."""
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Record(_Plain):
    """Let the fields of a dataclass be read as the items of a mapping too."""

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
        """Return the values that have a field; a process of another version may send more."""
        return {name: value for name, value in values.items() if name in cls._fields()}

    def _names(self) -> tuple[str, ...]:
        return self._fields()


@dataclass(frozen=True, eq=False)
class FallbackCount(_Record):
    """Tell how often something fell back, and why the last time.

    Parameters
    ----------
    text
        What happened instead.
    reason
        Of the last time.
    count
        Since the runtime was switched on.
    """

    text: str
    reason: str
    count: int

    @classmethod
    def of(cls, id: str, known: Mapping[str, Any]) -> FallbackCount:
        """Return the count of a fallback from plain values, in which a version before 0.1 has no text."""
        return cls(**cls._known({"text": id, **known}))


class Fallbacks(_Plain):
    """Hold what fell back, by the id of a :class:`~dask_gpurt.observe.Fallback`.

    The texts that were the keys before are taken for one release, with a warning.
    """

    def __init__(self, counted: Mapping[str, Mapping[str, Any]] | None = None):
        self._counted = {id: FallbackCount.of(id, known) for id, known in (counted or {}).items()}

    def __getitem__(self, id: str) -> FallbackCount:
        if id not in self._counted and (current := FORMER_KEYS.get(id)) in self._counted:
            warnings.warn(f"the fallback {id!r} has the id {current!r} now", DeprecationWarning, stacklevel=2)
            id = str(current)
        return self._counted[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counted)

    def __len__(self) -> int:
        return len(self._counted)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._counted!r})"


@dataclass(frozen=True, eq=False)
class WorkerReport(_Record):
    """Tell what the runtime on one worker has, did and fell back from.

    A worker that did not answer has an ``error``, as its only item, and the other fields are empty.

    Parameters
    ----------
    version
        Of the package there.
    devices, pools
        By kind of device: how it describes itself, and bytes of its exchange pool.
    paths, host_paths
        By address of a peer, the ``path`` from its main device and from host memory, and the ``reason`` why
        it is not a better one.
    overlap, residency
        What is confined beside shuffles, and what was learnt; see ``docs/guides/overlap.md``.
    reads
        ``beside``, the most tasks that are begun while others read, and ``threads``, those with which libcudf
        reads, as set in the environment.
    problems
        What is wrong with the settings of the worker, a sentence each.
    counters
        By name, as ``docs/reference/metrics.md`` lists them.
    fallbacks
        By id.
    error
        Why the worker did not answer; None where it did.
    """

    version: str = ""
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    paths: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    host_paths: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    overlap: Mapping[str, Any] = field(default_factory=dict)
    residency: Mapping[str, Any] = field(default_factory=dict)
    reads: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    error: str | None = None

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> WorkerReport:
        """Return the report of a worker from the plain values that it has sent."""
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


@dataclass(frozen=True, eq=False)
class DepartedWorker(_Record):
    """Tell what the runtime did on a worker that has left since, as of its last heartbeat.

    Parameters
    ----------
    address, name
        That it had.
    left
        When the scheduler noticed, in seconds since 1970.
    silent
        Seconds from its last heartbeat until then, of which nothing is known; None where it had not reported.
    counters, fallbacks
        As of a :class:`WorkerReport`.
    """

    address: str
    name: str
    left: float
    silent: float | None
    counters: Mapping[str, float] = field(default_factory=dict)
    fallbacks: Fallbacks = field(default_factory=Fallbacks)

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> DepartedWorker:
        """Return what is known of a worker that has left, from plain values."""
        return cls(**cls._known({**known, "fallbacks": Fallbacks(known["fallbacks"])}))

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.left).strftime("%H:%M:%S")
        if self.silent is None:
            return f"{self.address} left at {at} before it had reported: nothing of it is counted"
        return (
            f"{self.address} left at {at}: what it did in its last {format_time(self.silent)} is not counted"
        )


@dataclass(frozen=True, eq=False, repr=False)
class RuntimeReport(_Record):
    """Tell what the runtime on a cluster has, did and fell back from.

    Parameters
    ----------
    enabled
        Whether the runtime is on. If not, everything else is empty.
    version
        Of the package on the scheduler.
    takeover
        The setting ``gpurt.takeover`` with which it was switched on: false, true or ``"all"``.
    counters
        Of the whole cluster by name, as ``docs/reference/metrics.md`` lists them: counters are summed, of
        gauges the largest is kept. Workers that have left count, as of their last heartbeat.
    fallbacks
        Of the scheduler, by id.
    workers
        By address.
    departed
        The workers that have left since the runtime was switched on, the latest 100.
    """

    enabled: bool = False
    version: str | None = None
    takeover: bool | str = False
    counters: Mapping[str, float] = field(default_factory=dict)
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    workers: Mapping[str, WorkerReport] = field(default_factory=dict)
    departed: tuple[DepartedWorker, ...] = ()

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> RuntimeReport:
        """Return the report of a cluster from the plain values that its scheduler has sent."""
        typed = {
            **reply,
            "fallbacks": Fallbacks(reply["fallbacks"]),
            "workers": {address: WorkerReport.of(one) for address, one in reply["workers"].items()},
            # A scheduler of another version may not tell.
            "departed": tuple(DepartedWorker.of(one) for one in reply.get("departed", ())),
        }
        return cls(**cls._known(typed))

    def to_pandas(self) -> pd.DataFrame:
        """Return a frame of the counters.

        Returns
        -------
        pandas.DataFrame
            A row for each ``metric`` of each ``worker``, also of those that have left, and of the whole
            ``cluster``: its ``value`` and its ``unit``, ``bytes``, ``seconds`` or nothing.
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

    def __repr__(self) -> str:
        if not self.enabled:
            return "<RuntimeReport: the runtime is off>"
        count = len(self.workers)
        lines = [f"<RuntimeReport: dask-gpurt {self.version} on {count} worker{'' if count == 1 else 's'}"]
        lines += [f"  {name}: {_readable(name, value)}" for name, value in sorted(self.counters.items())]
        lines += [f"  scheduler {_fallback(id, known)}" for id, known in self.fallbacks.items()]
        for address, worker in self.workers.items():
            if worker.error is not None:
                lines.append(f"  {address} did not answer: {worker.error}")
            lines += [f"  {address} {_fallback(id, known)}" for id, known in worker.fallbacks.items()]
        for gone in self.departed:
            lines.append(f"  {gone}")
            lines += [f"  {gone.address} {_fallback(id, known)}" for id, known in gone.fallbacks.items()]
        return "\n".join(lines) + ">"


def _fallback(id: str, known: FallbackCount) -> str:
    return f"fell back {known.count} times, {known.text} ({id}): {known.reason}"


def _unit(name: str) -> Unit:
    try:
        return find(name).unit
    except UnknownMetricError:  # of a worker of another version
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
