"""Simulate a recorded run on two hosts, with placement and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.two_hosts.hosts import host_of
from benchmarks.two_hosts.recorded import Recording, replayed
from dask_gpurt.simulate import Capacity, Cluster, Machine, Overheads
from dask_gpurt.simulate.placements import charged, simulate
from dask_gpurt.topology import Link, Place, Speed

#: Simulated placement by side: the runtime is on in both.
PLACEMENTS = {"off": "tiers", "on": "gpurt"}


def seconds(
    name: str,
    recording: Recording,
    workers: Sequence[str],
    links: Mapping[str, Speed],
    overheads: Overheads,
    memory: int,
    always: bool = False,
) -> dict[str, float]:
    """Return the virtual seconds of a recorded run, by side.

    The CPU time of the scheduler is measured in a first simulation, and charged in a second. Placement learns
    the speeds of links as it does in a cluster that it does not know.

    Parameters
    ----------
    workers
        Addresses in the recording, those on the first host first.
    links
        The speed of a transfer ``between`` the hosts and ``within`` one.
    overheads
        Measured overheads.
    memory
        Bytes of each worker.
    always
        Whether placement chooses even when its gate would leave that to Dask.
    """
    machines = [Machine(Place(host_of(worker)), Capacity(0, 0, memory)) for worker in workers]
    within = dict.fromkeys((Link.SHARED_MEMORY, Link.LOOPBACK), links["within"])
    cluster = Cluster("two-hosts", machines, speeds={**within, Link.TCP: links["between"]}, believed={})
    workload, found = replayed(name, recording, workers), {}
    placements = {**PLACEMENTS, "on": "always"} if always else PLACEMENTS
    for side, placement in placements.items():
        first = simulate(cluster, workload, placement, overheads=overheads)
        ends = simulate(cluster, workload, placement, overheads=charged(first)).ends
        found[side] = ends[-1] - ends[-2]
    return found
