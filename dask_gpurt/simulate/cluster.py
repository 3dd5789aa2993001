"""The clusters that are simulated: how fast workers are, what they hold, what joins them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dask_gpurt.simulate.clock import Name
from dask_gpurt.simulate.tiers import Capacity
from dask_gpurt.topology import SHIPPED, Link, Place, Speed, Topology

GB = 10**9
#: Of an H100 or A100 of 80 GB, what dask-cuda takes before it spills, and a host's memory for each of eight.
LARGE = Capacity(device=64 * GB, pinned=8 * GB, host=200 * GB)
#: Of a card of 24 GB.
SMALL = Capacity(device=19 * GB, pinned=4 * GB, host=60 * GB)
#: GPUs of a host.
PER_HOST = 8
#: Hosts of a rack, and how much less than all of their NICs its uplink carries.
PER_RACK, OVERSUBSCRIBED = 8, 2


@dataclass(frozen=True)
class Machine:
    """One worker.

    Parameters
    ----------
    place
        Where it is.
    capacity
        Bytes by tier.
    threads
        Tasks at a time.
    speed
        How many times as fast as a worker of speed 1 it computes.
    """

    place: Place
    capacity: Capacity
    threads: int = 1
    speed: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """Workers and the links between them.

    Parameters
    ----------
    machines
        The workers.
    speeds
        By class of link; what is shipped where left out.
    racks
        By host, its rack, if there are racks.
    uplink
        Bytes per second, in each direction, between a rack and the others.
    """

    name: str
    machines: Sequence[Machine]
    speeds: Mapping[Link, Speed] = field(default_factory=dict)
    racks: Mapping[str, str] = field(default_factory=dict)
    uplink: float = float("inf")

    @property
    def memory(self) -> int:
        """Bytes in the live tiers of all workers."""
        return sum(machine.capacity.live for machine in self.machines)

    def topology(self) -> Topology:
        """A picture of the links, without any worker."""
        return Topology({**SHIPPED, **self.speeds})


def address(index: int, machine: Machine) -> Name:
    """The address of a worker."""
    return Name(f"tcp://{machine.place.host}:{1024 + index}")


def _hosts(workers: int, *, nvlink: bool, rdma: bool, first: int = 0, machine: Machine) -> list[Machine]:
    """Workers on as few hosts as will do, all like one machine."""
    made = []
    for index in range(workers):
        host = f"host{first + index // PER_HOST}"
        place = Place(
            host=host,
            device=f"{host}-gpu{index % PER_HOST}",
            numa=index % PER_HOST // (PER_HOST // 2),
            nvlink=host if nvlink else None,
            rdma=rdma,
        )
        made.append(Machine(place, machine.capacity, machine.threads, machine.speed))
    return made


def _dgx(workers: int) -> Cluster:
    return Cluster("dgx", _hosts(workers, nvlink=True, rdma=True, machine=Machine(Place(""), LARGE)))


def _rdma(workers: int) -> Cluster:
    return Cluster("rdma", _hosts(workers, nvlink=True, rdma=True, machine=Machine(Place(""), LARGE)))


def _tcp(workers: int) -> Cluster:
    machines = _hosts(workers, nvlink=True, rdma=False, machine=Machine(Place(""), LARGE))
    hosts = dict.fromkeys(machine.place.host for machine in machines)
    racks = {host: f"rack{index // PER_RACK}" for index, host in enumerate(hosts)}
    uplink = SHIPPED[Link.TCP].bandwidth * PER_RACK / OVERSUBSCRIBED
    return Cluster("tcp", machines, racks=racks, uplink=uplink)


def _mixed(workers: int) -> Cluster:
    fast = PER_HOST * max(1, workers // PER_HOST // 2) if workers > PER_HOST else workers // 2
    new = _hosts(fast, nvlink=True, rdma=True, machine=Machine(Place(""), LARGE))
    old = _hosts(
        workers - fast,
        nvlink=False,
        rdma=False,
        first=-(-fast // PER_HOST),
        machine=Machine(Place(""), SMALL, speed=0.4),
    )
    return Cluster("mixed", [*new, *old])


@dataclass(frozen=True)
class Shape:
    """A kind of cluster, of any size."""

    build: Callable[[int], Cluster]
    workers: int
    help: str


SHAPES: Mapping[str, Shape] = {
    "dgx": Shape(_dgx, 8, "eight GPUs of one host, NVLink between them"),
    "rdma": Shape(_rdma, 256, "hosts of eight GPUs, RDMA between them"),
    "tcp": Shape(_tcp, 1024, "hosts of eight GPUs in racks of eight, 10 Gbit/s TCP, uplinks for half of it"),
    "mixed": Shape(_mixed, 64, "half of the hosts with NVLink and RDMA, half slower, with less and neither"),
}


def build_cluster(shape: str, workers: int | None = None) -> Cluster:
    """Make a cluster.

    Parameters
    ----------
    shape
        One of :data:`SHAPES`.
    workers
        How many; the number that belongs to the shape when not given.

    Raises
    ------
    ValueError
        For an unknown shape, or for fewer than one worker.
    """
    if shape not in SHAPES:
        raise ValueError(f"no cluster {shape!r}; there are {', '.join(SHAPES)}")
    count = SHAPES[shape].workers if workers is None else workers
    if count < 1:
        raise ValueError(f"a cluster has at least one worker, not {count}")
    return SHAPES[shape].build(count)
