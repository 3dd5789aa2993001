"""Measure the speeds of Dask's comms within a host and from each host to each other."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Client, wait

from benchmarks.two_hosts.hosts import host_of
from dask_gpurt.topology import Speed

#: Bytes and number of the transfers that measure a link; the first ones open connections.
PROBE_BYTES, PROBES = 16_000_000, 5


@dataclass(frozen=True)
class Speeds:
    """Hold the measured speeds of links.

    Parameters
    ----------
    within
        The speed between two workers of one host.
    between
        The speed from one host to another, by their addresses.
    """

    within: Speed
    between: Mapping[tuple[str, str], Speed]

    def bandwidths(self) -> dict[str, Any]:
        """Return bytes per second, for a file of results."""
        between = {f"{one} to {other}": speed.bandwidth for (one, other), speed in self.between.items()}
        return {"within": self.within.bandwidth, "between": between}


def measure_speeds(client: Client, workers: Sequence[str]) -> Speeds:
    """Return the speeds of links on an idle cluster; the first two ``workers`` are on one host."""
    first: dict[str, str] = {}
    for worker in workers:
        first.setdefault(host_of(worker), worker)
    pairs = itertools.permutations(first, 2)
    return Speeds(
        _measure(client, workers[0], workers[1]),
        {(one, other): _measure(client, first[one], first[other]) for one, other in pairs},
    )


def _measure(client: Client, source: str, target: str) -> Speed:
    small, large = (
        statistics.median([_seconds(client, source, target, nbytes) for _ in range(PROBES)][1:])
        for nbytes in (1, PROBE_BYTES)
    )
    return Speed(PROBE_BYTES / max(large - small, 1e-4), 0.0)


def _seconds(client: Client, source: str, target: str, nbytes: int) -> float:
    """Return the seconds in which a worker fetches ``nbytes`` bytes from another."""
    made = client.submit(np.ones, nbytes, dtype="u1", workers=[source], pure=False)
    wait(made)
    start = time.perf_counter()
    wait(client.submit(len, made, workers=[target], pure=False))
    return time.perf_counter() - start
