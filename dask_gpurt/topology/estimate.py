"""Estimate the speeds of links from transfers, starting from a prior and discounting old transfers.

Ratios are estimated online, from noisy samples that drift: the whole module is pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from dask_gpurt.topology.links import Speed


class WindowedRatio:
    """Estimate the ratio of two quantities that are measured in pairs, such as bytes and seconds.

    Both are summed. When the sum of ``measure`` exceeds the window, both sums are scaled down to it, so older
    pairs are discounted exponentially, by size rather than by number.

    Parameters
    ----------
    amount, measure
        The initial sums: a prior pair.
    window
        Maximum of the sum of ``measure``, in its unit.
    """

    __slots__ = ("_amount", "_measure", "_window")

    def __init__(self, amount: float, measure: float, window: float):
        self._amount, self._measure, self._window = amount, measure, window

    def observe(self, amount: float, measure: float) -> None:
        """Add a pair, or the sums of several pairs."""
        amount, measure = self._amount + amount, self._measure + measure
        scale = self._window / max(self._window, measure)
        self._amount, self._measure = amount * scale, measure * scale

    @property
    def ratio(self) -> float:
        """Return amount per measure."""
        return self._amount / self._measure

    @property
    def inverse(self) -> float:
        """Return measure per amount."""
        return self._measure / self._amount


#: Weight of the initial speed, in seconds of transfers.
PRIOR_S = 0.1
#: Window of an estimate, in seconds of transfers.
WINDOW_S = 10.0
#: A pair gets its own estimate if its transfers differ from its class by more than the first factor, and
#: loses it once they are within the second factor again.
OVERRIDE_FACTOR, RETURN_FACTOR = 2.0, 1.5
Key = TypeVar("Key", bound=Hashable)


class SpeedEstimate:
    """Estimate the speed of a link from its transfers.

    Transfers update either the latency or the bandwidth, whichever dominates their expected time.
    """

    def __init__(self, speed: Speed):
        self.speed = speed
        transfers = PRIOR_S / speed.latency if speed.latency else 0.0
        self._bytes_per_second = WindowedRatio(speed.bandwidth * PRIOR_S, PRIOR_S, WINDOW_S)
        self._transfers_per_second = WindowedRatio(transfers, PRIOR_S, WINDOW_S)

    def observe(self, nbytes: float, seconds: float, transfers: int) -> None:
        """Add transfers, with their total bytes and seconds."""
        waiting, moving = transfers * self.speed.latency, nbytes / self.speed.bandwidth
        # Attribute at least half of the time to the dominant term, even if both are faster than expected.
        if moving >= waiting:
            self._bytes_per_second.observe(nbytes, max(seconds - waiting, seconds / 2))
            self.speed = Speed(self._bytes_per_second.ratio, self.speed.latency)
        else:
            self._transfers_per_second.observe(transfers, max(seconds - moving, seconds / 2))
            self.speed = Speed(self.speed.bandwidth, self._transfers_per_second.inverse)


def factor(one: Speed, other: Speed) -> float:
    """Return the factor by which two speeds differ, in bandwidth or in latency, whichever is larger."""
    bandwidths = sorted((one.bandwidth, other.bandwidth))
    latencies = sorted((one.latency, other.latency))
    slower = latencies[1] / latencies[0] if latencies[0] else 1.0
    return max(bandwidths[1] / bandwidths[0], slower)


class PairOverrides(Generic[Key]):
    """Keep the speeds of pairs that differ from their class, up to a bound; evict the least recently used."""

    def __init__(self, most: int):
        self._most = most
        self._averages: OrderedDict[Key, SpeedEstimate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._averages)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._averages)

    def speed(self, pair: Key) -> Speed | None:
        """Return the speed of a pair if it differs from its class, else None."""
        average = self._averages.get(pair)
        return average.speed if average else None

    def observe(self, pair: Key, usual: Speed, nbytes: float, seconds: float, transfers: int) -> None:
        """Add transfers of a pair, given the ``usual`` speed of its class."""
        average = self._averages.pop(pair, None)
        known = average is not None
        if average is None:
            expected = usual.seconds(nbytes, transfers)
            if expected / OVERRIDE_FACTOR <= seconds <= expected * OVERRIDE_FACTOR:
                return
            average = SpeedEstimate(usual)
        average.observe(nbytes, seconds, transfers)
        if not known or factor(average.speed, usual) > RETURN_FACTOR:
            self._averages[pair] = average
            if len(self._averages) > self._most:
                self._averages.popitem(last=False)
