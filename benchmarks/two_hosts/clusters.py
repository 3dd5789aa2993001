"""Run clusters with and without placement on the same two hosts, and measure the link."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import dask
import numpy as np
from distributed import Client, wait

import dask_gpurt
from benchmarks.two_hosts.hosts import ADDRESSES, PATIENCE_S, Host, host_of, make_hosts
from dask_gpurt.topology import Speed

#: Whether placement is on. The runtime is on in both.
SIDES = ("off", "on")
#: Of their schedulers: 8787 is where the first one serves HTTP.
PORTS = dict(zip(SIDES, (8786, 8796), strict=True))
WORKERS_PER_HOST = 2
MEMORY_LIMIT = "2 GiB"
#: Bytes and number of the transfers that measure a link; the first ones open connections.
PROBE_BYTES, PROBES = 16_000_000, 5
#: Fused tasks would hide inputs of shuffles from the recording, and tasks from placement.
SETTINGS = {"gpurt.planning.fuse": False, "distributed.comm.timeouts.connect": "60s"}


@contextlib.contextmanager
def clusters(
    scratch: Path, rate: int | None, always: bool, one_host: bool = False
) -> Iterator[dict[str, Client]]:
    """Yield a cluster for each side, on the same two hosts.

    Parameters
    ----------
    scratch
        Folder for the workers' files.
    rate
        Bytes per second of the link in one direction; None for no limit.
    always
        Whether placement chooses even when its gate would leave that to Dask.
    one_host
        Whether all workers are on the first host.
    """
    with contextlib.ExitStack() as stack:
        one, other = make_hosts(stack, rate)
        hosts = (one, one if one_host else other)
        made = {}
        for side, port in PORTS.items():
            placement = {"gpurt.placement.enabled": side == "on", "gpurt.placement.always": always}
            with dask.config.set({**SETTINGS, **placement}):
                made[side] = stack.enter_context(_cluster(hosts, port, scratch / side))
        yield made


@contextlib.contextmanager
def _cluster(hosts: Sequence[Host], port: int, scratch: Path) -> Iterator[Client]:
    """Run a scheduler on the first host and workers on both, with the runtime on."""
    scheduler, command = f"tcp://{ADDRESSES[0]}:{port}", (sys.executable, "-m", "dask")
    hosts[0].start(*command, "scheduler", "--host", ADDRESSES[0], "--port", str(port), "--no-dashboard")
    for host in hosts:
        options = ("--host", host.address, "--no-nanny", "--no-dashboard", "--nthreads", "1")
        where = ("--memory-limit", MEMORY_LIMIT, "--local-directory", str(scratch))
        for _ in range(WORKERS_PER_HOST):
            host.start(*command, "worker", scheduler, *options, *where)
    with hosts[0].network():
        client = Client(scheduler, timeout=PATIENCE_S, set_as_default=False)
    with client:
        client.wait_for_workers(len(hosts) * WORKERS_PER_HOST, timeout=2 * PATIENCE_S)
        dask_gpurt.enable(client)
        try:
            yield client
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                dask_gpurt.disable(client)


def addresses(client: Client) -> list[str]:
    """Return the addresses of the workers, those on the first host first."""
    return sorted(client.nthreads(), key=lambda worker: (ADDRESSES.index(host_of(worker)), worker))


def measure_links(client: Client) -> dict[str, Speed]:
    """Return the speed of Dask's comms ``between`` the hosts and ``within`` one, on an idle cluster."""
    workers = addresses(client)
    ends = {"between": workers[-1], "within": workers[1]}
    return {name: _measure(client, workers[0], target) for name, target in ends.items()}


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
