"""Describe simulated clusters: speeds and capacities of workers, and the links between them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from benchmarks.simulate.clock import Name
from benchmarks.simulate.links import SHIPPED, Link, Place, Speed, Topology
from benchmarks.simulate.tiers import TIER_SPEEDS, Capacity, TierLink

GB = 10**9
#: An 80 GB GPU (H100, A100): its memory up to dask-cuda's spill limit, and an eighth of its host's memory.
LARGE_GPU = Capacity(device=64 * GB, pinned=8 * GB, host=200 * GB)
#: The same for a 24 GB GPU.
SMALL_GPU = Capacity(device=19 * GB, pinned=4 * GB, host=60 * GB)
#: GPUs per host.
GPUS_PER_HOST = 8
#: Hosts per rack, and the ratio of their total NIC bandwidth to the bandwidth of the rack's uplink.
HOSTS_PER_RACK, OVERSUBSCRIPTION = 8, 2
#: The standard deviation of the logarithms of bandwidths and latencies in :meth:`Cluster.drawn`: links of one
#: class differ by a factor of 1.65 between clusters.
SPREAD = 0.5


@dataclass(frozen=True)
class Machine:
    """Describe one worker.

    Parameters
    ----------
    threads
        Maximum number of concurrent tasks.
    speed
        Relative speed: tasks take their seconds divided by it.
    nvlink
        Whether NVLink joins its GPU with those of its host that have it too.
    """

    place: Place
    capacity: Capacity
    threads: int = 1
    speed: float = 1.0
    nvlink: bool = False


@dataclass(frozen=True)
class Cluster:
    """Describe workers and the links between them.

    Parameters
    ----------
    speeds
        Speeds by class of link; missing classes have the shipped speeds.
    racks
        The rack of each host, if there are racks.
    uplink
        Bytes per second, in each direction, between a rack and all other racks.
    """

    name: str
    machines: Sequence[Machine]
    speeds: Mapping[Link | TierLink, Speed] = field(default_factory=dict)
    racks: Mapping[str, str] = field(default_factory=dict)
    uplink: float = float("inf")

    @property
    def memory(self) -> int:
        """Return the total bytes of all live tiers."""
        return sum(machine.capacity.live for machine in self.machines)

    def topology(self) -> Topology:
        """Return a topology without workers."""
        joined = defaultdict[str, list[str]](list)
        for machine in self.machines:
            if machine.nvlink and machine.place.device is not None:
                joined[machine.place.host].append(machine.place.device)
        nvlinks = {frozenset(pair) for devices in joined.values() for pair in combinations(devices, 2)}
        return Topology({**TIER_SPEEDS, **self.speeds}, nvlinks)

    def drawn(self, rng: random.Random) -> Cluster:
        """Return this cluster with other speeds of links."""
        speeds = {
            link: Speed(
                speed.bandwidth * rng.lognormvariate(0, SPREAD), speed.latency * rng.lognormvariate(0, SPREAD)
            )
            for link, speed in {**SHIPPED, **TIER_SPEEDS, **self.speeds}.items()
        }
        return replace(self, speeds=speeds)


def address(index: int, machine: Machine) -> Name:
    """Return the address of the worker with a number."""
    return Name(f"tcp://{machine.place.host}:{1024 + index}")


def _hosts(
    workers: int,
    *,
    nvlink: bool = True,
    rdma: bool = True,
    first: int = 0,
    capacity: Capacity = LARGE_GPU,
    speed: float = 1.0,
) -> list[Machine]:
    """Return identical workers on as few hosts as possible."""
    made = []
    for index in range(workers):
        host = f"host{first + index // GPUS_PER_HOST}"
        place = Place(
            host=host,
            device=f"{host}-gpu{index % GPUS_PER_HOST}",
            rdma=rdma,
        )
        made.append(Machine(place, capacity, speed=speed, nvlink=nvlink))
    return made


def _tcp(workers: int) -> Cluster:
    machines = _hosts(workers, rdma=False)
    hosts = dict.fromkeys(machine.place.host for machine in machines)
    racks = {host: f"rack{index // HOSTS_PER_RACK}" for index, host in enumerate(hosts)}
    uplink = SHIPPED[Link.TCP].bandwidth * HOSTS_PER_RACK / OVERSUBSCRIPTION
    return Cluster("tcp", machines, racks=racks, uplink=uplink)


def _mixed(workers: int) -> Cluster:
    fast = GPUS_PER_HOST * max(1, workers // GPUS_PER_HOST // 2) if workers > GPUS_PER_HOST else workers // 2
    hosts = -(-fast // GPUS_PER_HOST)
    old = _hosts(workers - fast, nvlink=False, rdma=False, first=hosts, capacity=SMALL_GPU, speed=0.4)
    return Cluster("mixed", [*_hosts(fast), *old])


@dataclass(frozen=True)
class Shape:
    """Describe a kind of cluster of any size."""

    build: Callable[[int], Cluster]
    workers: int
    help: str


SHAPES: Mapping[str, Shape] = {
    "dgx": Shape(
        lambda workers: Cluster("dgx", _hosts(workers)), 8, "eight GPUs of one host, NVLink between them"
    ),
    "rdma": Shape(
        lambda workers: Cluster("rdma", _hosts(workers)), 256, "hosts of eight GPUs, RDMA between them"
    ),
    "tcp": Shape(_tcp, 1024, "hosts of eight GPUs in racks of eight, 10 Gbit/s TCP, uplinks for half of it"),
    "mixed": Shape(_mixed, 64, "half of the hosts with NVLink and RDMA, half slower, with less and neither"),
}


def build_cluster(shape: str, workers: int | None = None, *, seed: int | None = None) -> Cluster:
    """Return a cluster.

    Parameters
    ----------
    shape
        One of :data:`SHAPES`.
    workers
        Number of workers; by default that of the shape.
    seed
        Seed of the speeds of links, see :meth:`Cluster.drawn`; without one, they are the shipped ones.

    Raises
    ------
    ValueError
        If the shape is unknown, or ``workers`` is less than one.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown cluster {shape!r}: expected one of {', '.join(SHAPES)}")
    count = SHAPES[shape].workers if workers is None else workers
    if count < 1:
        raise ValueError(f"a cluster has at least one worker, not {count}")
    cluster = SHAPES[shape].build(count)
    return cluster if seed is None else cluster.drawn(random.Random(seed))
