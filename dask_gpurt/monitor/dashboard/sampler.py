"""Sample the state of a cluster, and keep a bounded history of it: tiers, moves, shuffles.

Independent of bokeh.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from dask_gpurt.memory.ledger import Tier
from dask_gpurt.monitor.dashboard.shuffles import ShuffleLog
from dask_gpurt.observe.metrics import SHOWN

#: The name of the sum over all workers in histories.
ALL = "(all workers)"
#: Directions of moves between tiers, in histories of rates.
SPILLED, UNSPILLED = "spilled", "unspilled"
#: The beginning of the names of counters of moves between tiers.
MOVES = "memory.spill.bytes."
#: Maximum number of points of a history, as many as a screen can show.
MAX_POINTS = 512

Name = TypeVar("Name", bound=Hashable)


class Level(NamedTuple):
    """Hold the level of a tier of a worker, in bytes.

    ``used``: bytes of partitions, pulled shards and reservations; for shared memory, of published shards.
    """

    used: int
    capacity: int


@dataclass
class WorkerSample:
    """Hold the latest state of a worker.

    ``levels``: levels by display name of the tier, without tiers that the worker does not have.
    ``moved``: total bytes spilled and unspilled, by direction.
    """

    name: str
    levels: dict[str, Level] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)


class Sampler:
    """Keep the history of a cluster.

    ``used``: bytes by worker and tier; :data:`ALL` has the sums.
    ``rates``: bytes per second by worker and direction, :data:`SPILLED` or :data:`UNSPILLED`.
    ``workers``: the latest state of each worker by address. One that leaves is forgotten, except in sums.
    ``shuffles``: data from events between samples.
    """

    def __init__(self) -> None:
        self.used: History[tuple[str, str]] = History()
        self.rates: History[tuple[str, str]] = History()
        self.workers: dict[str, WorkerSample] = {}
        self.shuffles = ShuffleLog()
        self.at: float | None = None
        #: Total bytes by direction, including workers that have left.
        self._moved: dict[str, float] = {}

    def sample(
        self,
        at: float,
        names: Mapping[str, str],
        tiers: Iterable[Mapping[str, Any]],
        beats: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take a sample.

        ``at``: seconds since the epoch, ascending.
        ``names``: the names of the current workers, by address.
        ``tiers``: the rows of :func:`~dask_gpurt.observe.metrics.shown_tiers` for all workers.
        ``beats``: what the last heartbeat of each worker has told, by address.
        """
        self._record_workers(names)
        self._sample_tiers(at, tiers)
        self._sample_progress(at, beats)
        self.at = at

    def _record_workers(self, names: Mapping[str, str]) -> None:
        for address in self.workers.keys() - names.keys():
            del self.workers[address]
            self.used.forget([(address, tier) for tier in SHOWN])
            self.rates.forget([(address, direction) for direction in (SPILLED, UNSPILLED)])
        for address, name in names.items():
            self.workers.setdefault(address, WorkerSample(name))

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

    def _sample_progress(self, at: float, beats: Mapping[str, Mapping[str, Any]]) -> None:
        seconds = None if self.at is None else at - self.at
        values: dict[tuple[str, str], float] = {}
        for address, beat in beats.items():
            if (worker := self.workers.get(address)) is None:
                continue
            self.shuffles.reported(address, beat["runs"])
            before, worker.moved = worker.moved, _by_direction(beat["counters"])
            for direction, nbytes in worker.moved.items():
                since = max(0.0, nbytes - before.get(direction, 0.0))
                self._moved[direction] = self._moved.get(direction, 0.0) + since
                if seconds and before:
                    values[address, direction] = since / seconds
                    values[ALL, direction] = values.get((ALL, direction), 0.0) + since / seconds
        if values:
            self.rates.add(at, values)

    def capacity(self, tier: str, worker: str = ALL) -> int:
        """Return the capacity of a tier in bytes, of one worker or of all."""
        counted = [known for address, known in self.workers.items() if worker in (ALL, address)]
        return sum(known.levels[tier].capacity for known in counted if tier in known.levels)

    def moved(self, direction: str, worker: str = ALL) -> float:
        """Return the bytes moved in a direction so far, by one worker or by all past and current workers."""
        if worker == ALL:
            return self._moved.get(direction, 0.0)
        return self.workers[worker].moved.get(direction, 0.0) if worker in self.workers else 0.0


def _by_direction(counters: Mapping[str, float]) -> dict[str, float]:
    """Sum moves between tiers by direction; shards that were pulled into a lower tier count as spilled."""
    order = [str(tier) for tier in Tier]
    found = {SPILLED: 0.0, UNSPILLED: 0.0}
    for name, nbytes in counters.items():
        if name.startswith(MOVES):
            source, target = name.removeprefix(MOVES).split(".")
            up = source in order and order.index(target) < order.index(source)
            found[UNSPILLED if up else SPILLED] += nbytes
    return found


class History(Generic[Name]):
    """Keep several named series with common times.

    When there are too many points, pairs of neighbours are merged into one point with the later time and the
    larger value, which preserves peaks. From then on each point holds twice as many samples.

    ``max_points``: the number of points at which they are merged, an even number.
    """

    def __init__(self, max_points: int = MAX_POINTS):
        self._max_points = max_points
        self._times = array("d")
        self._values: dict[Name, array[float]] = {}
        #: Samples per point, and the number of samples in the last point.
        self._samples_per_point = 1
        self._in_last = 0

    def __len__(self) -> int:
        return len(self._times)

    @property
    def names(self) -> Iterable[Name]:
        """Return the names, in the order of their first value."""
        return self._values.keys()

    @property
    def times(self) -> list[float]:
        """Return the times of the points, ascending."""
        return self._times.tolist()

    def values(self, name: Name) -> list[float]:
        """Return the value at each point, NaN where there was none."""
        known = self._values.get(name)
        return known.tolist() if known is not None else [math.nan] * len(self)

    def add(self, at: float, values: Mapping[Name, float]) -> None:
        """Add a sample; times have to ascend."""
        if self._times and self._in_last < self._samples_per_point:
            self._times[-1] = at
            for name, value in values.items():
                column = self._column(name)
                column[-1] = _larger(column[-1], value)
        else:
            self._append(at, values)
        self._in_last += 1
        if len(self) == self._max_points:
            self._thin_out()

    def _append(self, at: float, values: Mapping[Name, float]) -> None:
        for name in values.keys() - self._values.keys():
            self._column(name)
        self._times.append(at)
        for name, column in self._values.items():
            column.append(values.get(name, math.nan))
        self._in_last = 0

    def _column(self, name: Name) -> array[float]:
        if name not in self._values:
            self._values[name] = array("d", [math.nan]) * len(self)
        return self._values[name]

    def _thin_out(self) -> None:
        """Merge each pair of points; their number is even."""
        for name, column in self._values.items():
            self._values[name] = array("d", map(_larger, column[::2], column[1::2]))
        self._times = self._times[1::2]
        self._in_last += self._samples_per_point
        self._samples_per_point *= 2

    def forget(self, names: Iterable[Name]) -> None:
        """Drop names with all their values."""
        for name in names:
            self._values.pop(name, None)


def _larger(one: float, other: float) -> float:
    """Return the larger of two values; NaN stands for a missing value."""
    return other if math.isnan(one) or other > one else one
