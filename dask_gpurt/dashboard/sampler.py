"""Sample what the runtime's plugin on a scheduler knows, and keep a bounded history of it. Knows no bokeh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dask_gpurt.dashboard.series import History
from dask_gpurt.dashboard.shuffles import ShuffleLog
from dask_gpurt.dashboard.traffic import TrafficMatrix
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.observe.shown_tiers import SHOWN

#: Workers that have left whose history is kept; beyond that the ones that left first are forgotten.
MAX_GONE = 32
#: The name of the sum over all workers in histories.
ALL = "(all workers)"
#: Directions of moves between tiers, in histories of bytes per second.
SPILLED, UNSPILLED = "spilled", "unspilled"


class Level(NamedTuple):
    """Tell how full a tier of a worker is, in bytes.

    Attributes
    ----------
    used
        By data of tasks, pulled shards and reservations; of shared memory by published shards.
    capacity
        The limit.
    """

    used: int
    capacity: int


class View(Protocol):
    """Show the sampler a cluster as it is now."""

    def names(self) -> Mapping[str, str]:
        """Return the names of the workers that are there, by address."""

    def tiers(self) -> Iterable[Mapping[str, Any]]:
        """Return what :func:`~dask_gpurt.observe.shown_tiers.shown_tiers` does, of all workers."""

    def progress(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the last :mod:`report <dask_gpurt.plugins.progress_reports>` of workers, by address."""


@dataclass
class WorkerSample:
    """Keep the latest of a worker.

    Attributes
    ----------
    levels
        By tier, as it is shown, without tiers that it has not.
    gone_at
        When it has left, in seconds since the epoch; None while it is there.
    overlap, counters
        As in its report.
    moved
        Bytes that have gone down or come up, by direction.
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
        Bytes by worker and tier; of :data:`ALL` the sums.
    rates
        Bytes per second by worker and direction, :data:`SPILLED` or :data:`UNSPILLED`.
    workers
        The latest of each, by address; those that have left too.
    shuffles, traffic
        What is told between samples.
    """

    def __init__(self) -> None:
        self.used: History[tuple[str, str]] = History()
        self.rates: History[tuple[str, str]] = History()
        self.workers: OrderedDict[str, WorkerSample] = OrderedDict()
        self.shuffles = ShuffleLog()
        self.traffic = TrafficMatrix()
        self.at: float | None = None
        #: Bytes by direction, of workers that have left too.
        self._moved: dict[str, float] = {}

    def sample(self, at: float, view: View) -> None:
        """Take a sample.

        Parameters
        ----------
        at
            Seconds since the epoch, ascending.
        """
        names = view.names()
        self._note_who_is_there(at, names)
        self._sample_tiers(at, view.tiers())
        self._sample_progress(at, view.progress())
        self.at = at

    def _note_who_is_there(self, at: float, names: Mapping[str, str]) -> None:
        for address, name in names.items():
            known = self.workers.get(address)
            if known is None or known.gone_at is not None:  # another one may come back at an address
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
            self.shuffles.figures(address, report["runs"])
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
        """Return the limit of a tier in bytes: of a worker, or of all that are there."""
        there = [known for known in self.workers.values() if known.gone_at is None]
        counted = there if worker == ALL else [known for at, known in self.workers.items() if at == worker]
        return sum(known.levels[tier].capacity for known in counted if tier in known.levels)

    def moved(self, direction: str, worker: str = ALL) -> float:
        """Return the bytes that have gone down or come up so far: of a worker, or of all that ever were."""
        if worker == ALL:
            return self._moved.get(direction, 0.0)
        return self.workers[worker].moved.get(direction, 0.0) if worker in self.workers else 0.0


def _by_direction(moves: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Sum moves between tiers: down, also of shards that went below the device at once, and up."""
    order = [str(tier) for tier in Tier]
    found = {SPILLED: 0.0, UNSPILLED: 0.0}
    for source, target, nbytes in moves:
        up = source in order and order.index(target) < order.index(source)
        found[UNSPILLED if up else SPILLED] += nbytes
    return found
