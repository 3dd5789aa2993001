"""Estimate the speeds of links from transfers, starting from a prior and discounting old transfers.

Ratios are estimated online, from noisy samples that drift: the whole module is pure. The first transfer from
one worker to another takes longer than later ones; its extra time is estimated separately.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from dask_gpurt.topology.links import Link, Speed


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
#: Initial estimate of the extra seconds of a first transfer, by class of link; 0 for missing classes.
FIRST_TRANSFER_S: Mapping[Link, float] = {
    # Measured on two H200s over UCX (fetch-copies-2xh200.json): 12 to 14 ms instead of 2. The receiver maps
    # the memory for copies. Without copies it would map the pool of the sender, which takes half a second.
    Link.NVLINK: 0.01,
    # Nominal: data of another process is accessed in the same way.
    Link.PCIE: 0.01,
}
#: The weight of the latest first transfer in the average of its class.
FIRST_TRANSFER_WEIGHT = 0.2
#: Maximum number of known senders per worker; the earliest is dropped first.
MAX_PEERS = 256

Key = TypeVar("Key", bound=Hashable)


class SpeedEstimate:
    """Estimate the speed of a link from its transfers.

    Transfers update either the latency or the bandwidth, whichever dominates their expected time.

    Parameters
    ----------
    speed
        The initial speed.
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
    """Keep the speeds of pairs that differ from their class, up to a bound; evict the least recently used.

    Parameters
    ----------
    most
        Maximum number of pairs.
    """

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


class ConnectionSetup:
    """Estimate the time to set up a connection, which adds to the first transfer between two workers.

    Parameters
    ----------
    first
        Seconds by class of link, such as :data:`FIRST_TRANSFER_S`.
    """

    def __init__(self, first: Mapping[Link, float]):
        self._first = dict(first)
        # Senders by receiver; dictionaries without values serve as ordered sets.
        self._met: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def seconds(self, link: Link, source: str, target: str) -> float:
        """Return the extra seconds of the next transfer: 0 unless it is the first."""
        first = self._first.get(link, 0.0)
        return 0.0 if not first or source in self._met.get(target, ()) else first

    def observe(self, link: Link, source: str, target: str, longer: float) -> bool:
        """Add completed transfers; return whether one of them was the first between the two workers.

        Parameters
        ----------
        longer
            Extra seconds over the usual time; negative values count as 0.
        """
        if not self.seconds(link, source, target):
            return False
        peers = self._met[target]
        peers[source] = None
        if len(peers) > MAX_PEERS:
            del peers[next(iter(peers))]
        # Keep the estimate above 0, which would mean that first transfers of this class take no longer.
        self._first[link] += FIRST_TRANSFER_WEIGHT * (max(longer, 1e-6) - self._first[link])
        return True

    def forget(self, worker: str) -> None:
        """Forget a worker that has left."""
        self._met.pop(worker, None)
        for peers in self._met.values():
            peers.pop(worker, None)
