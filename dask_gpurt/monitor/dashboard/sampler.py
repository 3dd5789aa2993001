"""Sample the state of a cluster, and keep a bounded history of it. Independent of bokeh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dask_gpurt.memory.tiers import Tier
from dask_gpurt.monitor.dashboard.series import History
from dask_gpurt.monitor.dashboard.shuffles import ShuffleLog
from dask_gpurt.monitor.dashboard.traffic import TrafficMatrix
from dask_gpurt.observe.shown_tiers import SHOWN

#: Maximum number of workers that have left whose history is kept; the earliest are dropped first.
MAX_GONE = 32
#: The name of the sum over all workers in histories.
ALL = "(all workers)"
#: Directions of moves between tiers, in histories of rates.
SPILLED, UNSPILLED = "spilled", "unspilled"


class Level(NamedTuple):
    """Hold the level of a tier of a worker, in bytes.

    Attributes
    ----------
    used
        Bytes of partitions, pulled shards and reservations; for shared memory, of published shards.
    capacity
        The limit.
    """

    used: int
    capacity: int


class View(Protocol):
    """Give the sampler the current state of a cluster."""

    def names(self) -> Mapping[str, str]:
        """Return the names of the current workers, by address."""

    def tiers(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of :func:`~dask_gpurt.observe.shown_tiers.shown_tiers` for all workers."""

    def progress(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the last :mod:`report <dask_gpurt.worker.reports>` by worker address."""


@dataclass
class WorkerSample:
    """Hold the latest state of a worker.

    Attributes
    ----------
    levels
        Levels by display name of the tier, without tiers that the worker does not have.
    gone_at
        When it left, in seconds since the epoch; None for a current worker.
    overlap, counters
        As in its report.
    moved
        Total bytes spilled and unspilled, by direction.
    """

    name: str
    levels: dict[str, Level] = field(default_factory=dict)
    gone_at: float | None = None
    overlap: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)


class Sampler:
    """Keep the history of a cluster.

    Attributes
    ----------
    used
        Bytes by worker and tier; :data:`ALL` has the sums.
    rates
        Bytes per second by worker and direction, :data:`SPILLED` or :data:`UNSPILLED`.
    workers
        The latest state of each worker by address, including workers that have left.
    shuffles, traffic
        Data from events between samples.
    """

    def __init__(self) -> None:
        self.used: History[tuple[str, str]] = History()
        self.rates: History[tuple[str, str]] = History()
        self.workers: OrderedDict[str, WorkerSample] = OrderedDict()
        self.shuffles = ShuffleLog()
        self.traffic = TrafficMatrix()
        self.at: float | None = None
        #: Total bytes by direction, including workers that have left.
        self._moved: dict[str, float] = {}

    def sample(self, at: float, view: View) -> None:
        """Take a sample.

        Parameters
        ----------
        at
            Seconds since the epoch, ascending.
        """
        names = view.names()
        self._record_workers(at, names)
        self._sample_tiers(at, view.tiers())
        self._sample_progress(at, view.progress())
        self.at = at

    def _record_workers(self, at: float, names: Mapping[str, str]) -> None:
        for address, name in names.items():
            known = self.workers.get(address)
            if known is None or known.gone_at is not None:  # a new worker may reuse an address
                self.workers[address] = WorkerSample(name)
        for address, worker in self.workers.items():
            if address not in names and worker.gone_at is None:
                worker.gone_at = at
        gone = [address for address, worker in self.workers.items() if worker.gone_at is not None]
        gone.sort(key=lambda address: self.workers[address].gone_at or 0.0)
        for address in gone[: max(0, len(gone) - MAX_GONE)]:
            del self.workers[address]
            self.used.forget([(address, tier) for tier in SHOWN])
            self.rates.forget([(address, direction) for direction in (SPILLED, UNSPILLED)])

    def _sample_tiers(self, at: float, rows: Iterable[Mapping[str, Any]]) -> None:
        values: dict[tuple[str, str], float] = {}
        for row in rows:
            address, tier, capacity = row["worker"], row["tier"], row["capacity"]
            used = capacity - row["headroom"]
            worker = self.workers.get(address)
            if worker is None or not (capacity or used):
                continue
            worker.levels[tier] = Level(used, capacity)
            values[address, tier] = used
            values[ALL, tier] = values.get((ALL, tier), 0) + used
        if values:
            self.used.add(at, values)

    def _sample_progress(self, at: float, reports: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        seconds = None if self.at is None else at - self.at
        values: dict[tuple[str, str], float] = {}
        for address, report in reports:
            if (worker := self.workers.get(address)) is None:
                continue
            worker.overlap, worker.counters = report["overlap"], report["counters"]
            self.shuffles.reported(address, report["runs"])
            before, worker.moved = worker.moved, _by_direction(report["moved"])
            for direction, nbytes in worker.moved.items():
                since = max(0.0, nbytes - before.get(direction, 0.0))
                self._moved[direction] = self._moved.get(direction, 0.0) + since
                if seconds and before:
                    values[address, direction] = since / seconds
                    values[ALL, direction] = values.get((ALL, direction), 0.0) + since / seconds
        if values:
            self.rates.add(at, values)

    def capacity(self, tier: str, worker: str = ALL) -> int:
        """Return the capacity of a tier in bytes, of one worker or of all current workers."""
        there = [known for known in self.workers.values() if known.gone_at is None]
        counted = there if worker == ALL else [known for at, known in self.workers.items() if at == worker]
        return sum(known.levels[tier].capacity for known in counted if tier in known.levels)

    def moved(self, direction: str, worker: str = ALL) -> float:
        """Return the bytes moved in a direction so far, by one worker or by all past and current workers."""
        if worker == ALL:
            return self._moved.get(direction, 0.0)
        return self.workers[worker].moved.get(direction, 0.0) if worker in self.workers else 0.0


def _by_direction(moves: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Sum moves between tiers by direction; shards that were pulled into a lower tier count as spilled."""
    order = [str(tier) for tier in Tier]
    found = {SPILLED: 0.0, UNSPILLED: 0.0}
    for source, target, nbytes in moves:
        up = source in order and order.index(target) < order.index(source)
        found[UNSPILLED if up else SPILLED] += nbytes
    return found
