"""What this host has, and where in it this process is."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from dask_gpurt.topology import nvml, system
from dask_gpurt.topology.hosts import Host
from dask_gpurt.topology.places import Place


def discover(library: Any | None = None) -> Host:
    """Ask NVML and the operating system. It may take a second.

    Parameters
    ----------
    library
        ``pynvml`` or something like it; found by itself if not given. Without it no GPU is known.
    """
    library = library or nvml.library()
    host = Host(system.host_name(), nics=system.nics(), numa_nodes=len(system.numa_nodes()))
    if library is None:
        return host
    known = nvml.Nvml(library, system.node_of_device)
    gpus = known.gpus()
    return replace(host, gpus=gpus, joins=known.joins(gpus))


def visible_devices() -> str | None:
    """Which devices CUDA shows to this process, None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def own_place(host: Host, visible: str | None, *, on_gpu: bool, rdma: bool, by_tcp: bool = False) -> Place:
    """Where this process is.

    Parameters
    ----------
    host
        This one.
    visible
        Its ``CUDA_VISIBLE_DEVICES``.
    on_gpu
        Whether it keeps its data on the first of them.
    rdma
        Whether it sends by RDMA where there is a NIC for it.
    by_tcp
        Whether Dask's comms to it are TCP.
    """
    gpu = host.find(visible) if on_gpu else None
    return host.place(system.here(), gpu, numa=system.own_node(), rdma=rdma, by_tcp=by_tcp)
