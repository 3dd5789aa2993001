"""What the operating system knows: which host this is, its NUMA nodes, its NICs."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from dask_gpurt.topology.hosts import Nic

SYS = Path("/sys")


def host_id() -> str:
    """What processes of one running kernel have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def host_name() -> str:
    """As people call this host."""
    return socket.gethostname()


def here() -> str:
    """An id of this host for :class:`~dask_gpurt.topology.Place`.

    Containers of one machine have names of their own, and mostly can not map each other's memory.
    """
    return f"{host_name()}/{host_id()[:8]}"


# ---- NUMA ----------------------------------------------------------------------------


def numa_nodes(sys: Path = SYS) -> dict[int, set[int]]:
    """The processors of each NUMA node; one node with none where the system does not tell."""
    folder = sys / "devices/system/node"
    nodes = {int(node.name[4:]): _processors(_read(node / "cpulist")) for node in folder.glob("node[0-9]*")}
    return nodes or {0: set()}


def _processors(listed: str) -> set[int]:
    """The numbers in a list such as "0-3,8"."""
    spans = [part.partition("-") for part in listed.split(",") if part]
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}


def own_node(sys: Path = SYS) -> int | None:
    """The NUMA node that this process is bound to, None if it runs on several."""
    nodes = numa_nodes(sys)
    try:
        mine = set(psutil.Process().cpu_affinity())
    except (AttributeError, psutil.Error):  # no such thing on this system
        return None
    within = [node for node, processors in nodes.items() if mine and mine <= processors]
    return within[0] if len(nodes) > 1 and within else None


def node_of_device(bus: str, sys: Path = SYS) -> int | None:
    """The NUMA node of a device by its address on the PCI bus, None where the system does not tell."""
    # NVML writes the domain with eight digits, the kernel with four.
    address = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", bus.lower())
    return _node(sys / "bus/pci/devices" / address / "numa_node") if address else None


def _node(file: Path) -> int | None:
    text = _read(file)
    return int(text) if text.isdecimal() else None  # "-1": the system does not know


# ---- NICs ----------------------------------------------------------------------------


def nics(sys: Path = SYS) -> tuple[Nic, ...]:
    """The network devices that are up, those for RDMA first; the one of the host to itself is none."""
    return (*_rdma(sys), *_ethernet(sys))


def _rdma(sys: Path) -> Iterator[Nic]:
    for device in sorted((sys / "class/infiniband").glob("*")):
        ports = [port for port in device.glob("ports/*") if "ACTIVE" in _read(port / "state")]
        rates = [float(found[0]) for port in ports if (found := re.match(r"[\d.]+", _read(port / "rate")))]
        if ports:
            speed = max(rates, default=0) * 1e9 / 8  # "400 Gb/sec (4X NDR)"
            yield Nic(device.name, speed or None, True, _node(device / "device/numa_node"))


def _ethernet(sys: Path) -> Iterator[Nic]:
    for name, found in sorted(psutil.net_if_stats().items()):
        if found.isup and "loopback" not in found.flags:
            speed = found.speed * 1e6 / 8 if found.speed > 0 else None  # in Mbit/s
            yield Nic(name, speed, False, _node(sys / "class/net" / name / "device/numa_node"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
