"""Run clusters with and without placement on the same hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import dask
from distributed import Client

import dask_gpurt
from benchmarks.two_hosts.hosts import Host, host_of, make_hosts
from benchmarks.two_hosts.servers import link_bytes, servers
from benchmarks.two_hosts.star import make_star

#: Whether placement is on. The runtime is on in both.
SIDES = ("off", "on")
#: Of their schedulers: 8787 is where the first one serves HTTP.
PORTS = dict(zip(SIDES, (8786, 8796), strict=True))
WORKERS_PER_HOST = 2
#: Fused tasks would hide inputs of shuffles from the recording, and tasks from placement.
SETTINGS = {"gpurt.planning.optimise": False, "distributed.comm.timeouts.connect": "60s"}


@dataclass(frozen=True)
class Plan:
    """Describe the hosts and the clusters on them.

    Parameters
    ----------
    hosts
        Number of hosts: two are joined by one link, more have one each to a switch.
    rate
        Bytes per second of a link in one direction; None for no limit.
    memory_limit
        Bytes of each worker.
    one_host
        Whether all workers are on the first host.
    """

    hosts: int
    rate: int | None
    memory_limit: int
    one_host: bool = False


@contextlib.contextmanager
def clusters(plan: Plan, scratch: Path) -> Iterator[dict[str, Client]]:
    """Yield a cluster for each side, on the same hosts, with the workers' files in a folder."""
    with contextlib.ExitStack() as stack:
        hosts = _hosts(plan, stack)
        made = {}
        for side, port in PORTS.items():
            placement = {"gpurt.placement.enabled": side == "on"}
            with dask.config.set({**SETTINGS, **placement}):
                made[side] = stack.enter_context(_cluster(hosts, port, scratch / side, plan.memory_limit))
        yield made


def _hosts(plan: Plan, stack: contextlib.ExitStack) -> Sequence[Host]:
    if plan.hosts == 2:
        hosts = make_hosts(stack, plan.rate)
    else:
        hosts = list(make_star(stack, plan.hosts, plan.rate).hosts)
    return hosts[:1] * plan.hosts if plan.one_host else hosts


@contextlib.contextmanager
def _cluster(hosts: Sequence[Host], port: int, scratch: Path, memory_limit: int) -> Iterator[Client]:
    """Run a scheduler on the first host and workers on all, with the runtime on."""
    with servers(hosts[0], [*hosts] * WORKERS_PER_HOST, port, scratch, memory_limit) as client:
        dask_gpurt.enable(client)
        try:
            yield client
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                dask_gpurt.disable(client)


def addresses(client: Client) -> list[str]:
    """Return the addresses of the workers by host, those on the first host first."""
    return sorted(client.nthreads(), key=lambda worker: (ip_address(host_of(worker)), worker))


def bytes_between(client: Client) -> int:
    """Return the bytes that all hosts together have sent to others so far."""
    one_of_each = {host_of(worker): worker for worker in addresses(client)}
    return sum(sent for sent, _ in link_bytes(client, list(one_of_each.values())).values())
