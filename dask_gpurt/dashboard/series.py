"""Keep values over time in bounded memory: the longer the history, the coarser it gets. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

#: Points that a history has at most: a screen shows no more.
MAX_POINTS = 512

Name = TypeVar("Name", bound=Hashable)


class History(Generic[Name]):
    """Keep named values at the same times.

    Once there are too many points, neighbours become one, with the later time and the larger value: peaks
    stay. From then on twice as many samples go into a point.

    Parameters
    ----------
    max_points
        At least 2.
    """

    def __init__(self, max_points: int = MAX_POINTS):
        if max_points < 2:
            raise ValueError(f"max_points={max_points}: a history has 2 points at least")
        self._max_points = max_points
        self._times = array("d")
        self._values: dict[Name, array[float]] = {}
        #: Samples that go into a point, and those that the last point has.
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
        """Add a sample. Times ascend."""
        if self._times and self._in_last < self._samples_per_point:
            self._times[-1] = at
            for name, value in values.items():
                column = self._column(name)
                column[-1] = _larger(column[-1], value)
        else:
            self._append(at, values)
        self._in_last += 1
        if len(self) > self._max_points:
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
        """Make one point out of each two; of an odd number the last one has room for more samples."""
        odd = len(self) % 2
        for name, column in self._values.items():
            merged = array("d", map(_larger, column[::2], column[1::2]))
            self._values[name] = merged + column[-odd:] if odd else merged
        self._times = self._times[1::2] + (self._times[-odd:] if odd else array("d"))
        if not odd:
            self._in_last += self._samples_per_point
        self._samples_per_point *= 2

    def forget(self, names: Iterable[Name]) -> None:
        """Drop names with all their values."""
        for name in names:
            self._values.pop(name, None)


def _larger(one: float, other: float) -> float:
    """Return the larger of two values; one that is not there is not a number."""
    return other if math.isnan(one) or other > one else one
