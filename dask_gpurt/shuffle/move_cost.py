"""Tell how long new owners of outputs take to read what has been cut for the old ones. Pure.

A shard that goes over comms is read as a whole, for whichever of its outputs. So each new owner reads all
that was cut for the worker that it gets an output of; and that worker, if it keeps others, does so too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple


class Link(NamedTuple):
    """Describe the link of a worker to other hosts.

    Attributes
    ----------
    host
        Of the worker.
    rate
        Bytes per second, in either direction, above 0.
    made
        The share of the inputs that is made at this worker.
    """

    host: str
    rate: float
    made: float


def reading_s(
    to: Mapping[int, str],
    owners: Mapping[int, str],
    nbytes: Mapping[int, float],
    cut: float,
    links: Mapping[str, Link],
) -> float:
    """Return the seconds until the last worker has sent, or received, what has to be read once more.

    Parameters
    ----------
    to
        The new owners of outputs that move.
    owners
        The owners of all outputs until now.
    nbytes
        Bytes of each output.
    cut
        The share of the inputs that has been cut by now.
    links
        Of workers, as far as they are known; the others count as fast.
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
