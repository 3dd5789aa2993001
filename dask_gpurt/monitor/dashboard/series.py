"""Keep values over time in bounded memory, with a resolution that decreases with the length. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

#: Maximum number of points of a history, as many as a screen can show.
MAX_POINTS = 512

Name = TypeVar("Name", bound=Hashable)


class History(Generic[Name]):
    """Keep several named series with common times.

    When there are too many points, pairs of neighbours are merged into one point with the later time and the
    larger value, which preserves peaks. From then on each point holds twice as many samples.

    Parameters
    ----------
    max_points
        Maximum number of points, at least 2.
    """

    def __init__(self, max_points: int = MAX_POINTS):
        if max_points < 2:
            raise ValueError(f"max_points={max_points}: expected at least 2")
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
        """Merge each pair of points; of an odd number, the last stays and takes more samples."""
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
    """Return the larger of two values; NaN stands for a missing value."""
    return other if math.isnan(one) or other > one else one
