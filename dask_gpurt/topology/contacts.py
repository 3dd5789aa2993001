"""What the first transfer from one worker to another takes longer than those that follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from dask_gpurt.topology.links import Link

#: Seconds by class of link, until transfers have shown others. Classes that are left out take no longer.
FIRST: Mapping[Link, float] = {
    # Measured on four H200, 512 MiB over UCX: 0.28 s, and 0.56 to 0.65 where four began at once; those that
    # followed took 0.01. It seems that the receiver maps the pool that the data lie in, here half of a GPU.
    Link.NVLINK: 0.3,
    # Nominal: the same way to get at the data of another process.
    Link.PCIE: 0.3,
}
#: The weight of the last first transfer in the average of its class.
WEIGHT = 0.2
#: From how many others each worker is remembered to have had data; the one met first is forgotten first.
MOST_PEERS = 256


class Contacts:
    """Who has sent data to whom, by Dask's comms.

    Parameters
    ----------
    first
        Seconds by class of link, as :data:`FIRST`.
    """

    def __init__(self, first: Mapping[Link, float]):
        self._first = dict(first)
        # By the worker that has got data, from whom: dictionaries without values are sets in order.
        self._met: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def seconds(self, link: Link, source: str, target: str) -> float:
        """How much longer than usual a transfer would take now."""
        first = self._first.get(link, 0.0)
        return 0.0 if not first or source in self._met.get(target, ()) else first

    def observe(self, link: Link, source: str, target: str, longer: float) -> bool:
        """Take transfers that are over; tell whether one of them was the first.

        Parameters
        ----------
        longer
            Seconds that they took longer than usual. Below 0 counts as 0.
        """
        if not self.seconds(link, source, target):
            return False
        peers = self._met[target]
        peers[source] = None
        if len(peers) > MOST_PEERS:
            del peers[next(iter(peers))]
        # Never nothing: then the class would be one whose first transfers are like the others.
        self._first[link] += WEIGHT * (max(longer, 1e-6) - self._first[link])
        return True

    def forget(self, worker: str) -> None:
        """A worker has left."""
        self._met.pop(worker, None)
        for peers in self._met.values():
            peers.pop(worker, None)
