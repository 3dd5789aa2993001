"""Simulate a recorded run on the same hosts, with placement and without."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.simulate import Capacity, Cluster, Machine, Overheads
from benchmarks.simulate.placements import charged, simulate
from benchmarks.two_hosts.hosts import host_of
from benchmarks.two_hosts.recorded import Recording, replayed
from benchmarks.two_hosts.speeds import Speeds
from dask_gpurt.topology import Link, Place, Speed

#: Simulated placement by side: the runtime is on in both.
PLACEMENTS = {"off": "tiers", "on": "gpurt"}


def seconds(
    name: str,
    recording: Recording,
    workers: Sequence[str],
    speeds: Speeds,
    overheads: Overheads,
    memory: int,
) -> dict[str, float]:
    """Return the virtual seconds of a recorded run, by side.

    The CPU time of the scheduler is measured in a first simulation, and charged in a second. Placement learns
    the speeds of links as it does in a cluster that it does not know.

    Parameters
    ----------
    workers
        Addresses in the recording, those on the first host first.
    speeds
        The measured speeds of links.
    overheads
        Measured overheads.
    memory
        Bytes of each worker.
    """
    cluster = _cluster(workers, speeds, memory)
    workload, found = replayed(name, recording, workers), {}
    for side, placement in PLACEMENTS.items():
        first = simulate(cluster, workload, placement, overheads=overheads)
        ends = simulate(cluster, workload, placement, overheads=charged(first)).ends
        found[side] = ends[-1] - ends[-2]
    return found


def _cluster(workers: Sequence[str], speeds: Speeds, memory: int) -> Cluster:
    machines = [Machine(Place(host_of(worker)), Capacity(0, 0, memory)) for worker in workers]
    known = dict.fromkeys((Link.SHARED_MEMORY, Link.LOOPBACK), speeds.within)
    if speeds.between:
        bandwidths = [speed.bandwidth for speed in speeds.between.values()]
        known[Link.TCP] = Speed(statistics.median(bandwidths), 0.0)
    return Cluster("hosts", machines, speeds=known, believed={}, between=speeds.between)
