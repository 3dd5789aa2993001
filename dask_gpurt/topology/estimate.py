"""Estimate the speeds of links from transfers, from an initial speed on, and forget slowly.

The first transfer from one worker to another takes longer than those that follow: that is estimated apart.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from dask_gpurt.observe.estimators import WindowedRatio
from dask_gpurt.topology.links import Link, Speed

#: Seconds of transfers that the initial speed counts as ...
PRIOR_S = 0.1
#: ... and seconds of transfers that an estimate extends over.
WINDOW_S = 10.0
#: A pair gets an estimate of its own where its transfers differ from its class by the first factor, and loses
#: it once they are within the second again.
OVERRIDE_FACTOR, RETURN_FACTOR = 2.0, 1.5
#: Seconds that the first transfer takes longer, by class of link, until transfers show others. Classes that
#: are left out take no longer.
FIRST_TRANSFER_S: Mapping[Link, float] = {
    # Measured on four H200, 512 MiB over UCX: 0.28 s, and 0.56 to 0.65 where four began at once;
    # later ones took 0.01. Presumably the receiver maps the pool of the sender, here half of a GPU.
    Link.NVLINK: 0.3,
    # Nominal: the same way to get at the data of another process.
    Link.PCIE: 0.3,
}
#: The weight of the latest first transfer in the average of its class.
FIRST_TRANSFER_WEIGHT = 0.2
#: Senders that are remembered of each worker; the earliest is forgotten first.
MAX_PEERS = 256

Key = TypeVar("Key", bound=Hashable)


class SpeedEstimate:
    """Estimate the speed of a link from its transfers.

    Small transfers tell the latency, large ones the bandwidth: each only what took most of its expected time.

    Parameters
    ----------
    speed
        The one that is known beforehand.
    """

    def __init__(self, speed: Speed):
        self.speed = speed
        transfers = PRIOR_S / speed.latency if speed.latency else 0.0
        self._bytes_per_second = WindowedRatio(speed.bandwidth * PRIOR_S, PRIOR_S, WINDOW_S)
        self._transfers_per_second = WindowedRatio(transfers, PRIOR_S, WINDOW_S)

    def observe(self, nbytes: float, seconds: float, transfers: int) -> None:
        """Take some transfers, with the sums of their bytes and of their seconds."""
        waiting, moving = transfers * self.speed.latency, nbytes / self.speed.bandwidth
        # The rest is at least what was expected to be most of it, however fast the whole was.
        if moving >= waiting:
            self._bytes_per_second.observe(nbytes, max(seconds - waiting, seconds / 2))
            self.speed = Speed(self._bytes_per_second.ratio, self.speed.latency)
        else:
            self._transfers_per_second.observe(transfers, max(seconds - moving, seconds / 2))
            self.speed = Speed(self.speed.bandwidth, self._transfers_per_second.inverse)


def factor(one: Speed, other: Speed) -> float:
    """Return how many times faster one speed is, by bandwidth or by latency, whichever differs more."""
    bandwidths = sorted((one.bandwidth, other.bandwidth))
    latencies = sorted((one.latency, other.latency))
    slower = latencies[1] / latencies[0] if latencies[0] else 1.0
    return max(bandwidths[1] / bandwidths[0], slower)


class PairOverrides(Generic[Key]):
    """Keep the speeds of pairs that differ from their class: a bounded number, the least recently used goes.

    Parameters
    ----------
    most
        The most pairs that are kept.
    """

    def __init__(self, most: int):
        self._most = most
        self._averages: OrderedDict[Key, SpeedEstimate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._averages)

    def speed(self, pair: Key) -> Speed | None:
        """Return the speed of a pair that differs from its class; None of any other."""
        average = self._averages.get(pair)
        return average.speed if average else None

    def observe(self, pair: Key, usual: Speed, nbytes: float, seconds: float, transfers: int) -> None:
        """Take the transfers of a pair, and the ``usual`` speed of its class."""
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
    """Estimate the seconds to set up a connection, which the first transfer between two workers takes.

    Parameters
    ----------
    first
        Seconds by class of link, such as :data:`FIRST_TRANSFER_S`.
    """

    def __init__(self, first: Mapping[Link, float]):
        self._first = dict(first)
        # Senders by receiver: dictionaries without values are sets in order.
        self._met: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def seconds(self, link: Link, source: str, target: str) -> float:
        """Return the seconds that a transfer would take longer than usual now."""
        first = self._first.get(link, 0.0)
        return 0.0 if not first or source in self._met.get(target, ()) else first

    def observe(self, link: Link, source: str, target: str, longer: float) -> bool:
        """Take transfers that are over; tell whether one of them was the first.

        Parameters
        ----------
        longer
            Seconds that they took longer than usual; negative ones count as 0.
        """
        if not self.seconds(link, source, target):
            return False
        peers = self._met[target]
        peers[source] = None
        if len(peers) > MAX_PEERS:
            del peers[next(iter(peers))]
        # Never 0: that would mean that first transfers of this class take no longer.
        self._first[link] += FIRST_TRANSFER_WEIGHT * (max(longer, 1e-6) - self._first[link])
        return True

    def forget(self, worker: str) -> None:
        """Forget a worker that has left."""
        self._met.pop(worker, None)
        for peers in self._met.values():
            peers.pop(worker, None)
