"""Estimate how long new owners take to read the shards that were packed for the former owners. Pure.

A shard that is fetched over comms is always read as a whole. So each new owner reads all shards that were
packed for the former owner of its new outputs; and the former owner reads them too, if it keeps any output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple


class HostLink(NamedTuple):
    """Describe the link of a worker to other hosts.

    Attributes
    ----------
    host
        The host of the worker.
    rate
        Bytes per second in each direction, above 0.
    made
        The share of the inputs that are transferred on this worker.
    """

    host: str
    rate: float
    made: float


def reading_s(
    to: Mapping[int, str],
    owners: Mapping[int, str],
    nbytes: Mapping[int, float],
    cut: float,
    links: Mapping[str, HostLink],
) -> float:
    """Return the seconds until the last worker has sent and received the shards that are read again.

    Parameters
    ----------
    to
        The new owners of outputs that move.
    owners
        The current owners of all outputs.
    nbytes
        Bytes of each output.
    cut
        The share of the inputs split so far.
    links
        The known links of workers; unknown links count as infinitely fast.
    """
    held = defaultdict[str, float](float)
    for output, owner in owners.items():
        held[owner] += nbytes.get(output, 0.0)
    sends, receives = defaultdict[str, float](float), defaultdict[str, float](float)
    for old, new in {(owners[output], worker) for output, worker in to.items()}:
        here = links[new].host if new in links else None
        for producer, link in links.items():
            if link.host != here and producer != new:
                sends[producer] += cut * link.made * held[old]
                receives[new] += cut * link.made * held[old]
    return max(
        (max(sends[worker], receives[worker]) / link.rate for worker, link in links.items()), default=0.0
    )
