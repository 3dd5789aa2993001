"""Describe small clusters for the simulator, in round figures."""

from __future__ import annotations

from benchmarks.simulate import Capacity, Cluster, Machine, Overheads
from benchmarks.simulate.links import Link, Place, Speed

NO_OVERHEADS = Overheads(message=0, scheduler=0, task=0, transfer=0)
GB = 10**9
#: Bandwidth of shared memory, in bytes per second.
SPEED = 1e9


def machines(
    workers: int, *, per_host: int = 64, threads: int = 1, speed: float = 1.0, memory: int = 100 * GB
) -> list[Machine]:
    """Return workers without devices."""
    return [
        Machine(Place(f"host{index // per_host}"), Capacity(0, 0, memory), threads, speed)
        for index in range(workers)
    ]


def on_one_host(workers: int) -> Cluster:
    """Return workers on one host, connected by shared memory without latency."""
    return Cluster("one-host", machines(workers), speeds={Link.SHARED_MEMORY: Speed(SPEED, 0.0)})
