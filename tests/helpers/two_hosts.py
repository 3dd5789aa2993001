"""Run a cluster on two hosts of one machine, with the runtime on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client

import dask_gpurt
from benchmarks.two_hosts.hosts import ADDRESSES, LINK, PATIENCE_S, UnsupportedError, host_of, make_hosts
from tests.helpers.clusters import QUICK, instrument

__all__ = ["ADDRESSES", "host_of", "on_other_host", "two_hosts"]

#: The scheduler's ports by protocol; the client, which is on neither host, uses the first one.
PORTS = {"tcp": 8786, "ucx": 8788}
#: UCX uses TCP over the link, within a host too: it takes two namespaces of one kernel for one host.
UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}


@contextlib.contextmanager
def two_hosts(scratch: Path, workers: int = 2, *, protocol: str = "tcp") -> Iterator[Client]:
    """Run a cluster with the runtime enabled, with ``workers`` workers on each of two hosts.

    The scheduler runs on the first host.

    ``scratch``: folder of the workers' files.
    ``protocol``: protocol of the workers' comms; "ucx" runs over TCP.
    """
    with dask.config.set(QUICK), contextlib.ExitStack() as stack:
        try:
            hosts = make_hosts(stack, None, UCX)
        except UnsupportedError as error:
            pytest.skip(str(error))
        dask_command = (sys.executable, "-m", "dask")
        hosts[0].start(
            *dask_command, "scheduler", "--host", ADDRESSES[0], "--no-dashboard", *_doors(protocol)
        )
        for host in hosts:
            options = ("--host", host.address, "--no-nanny", "--no-dashboard", "--nthreads", "1")
            for _ in range(workers):
                where = ("--protocol", protocol, "--local-directory", str(scratch))
                host.start(*dask_command, "worker", _scheduler(protocol), *options, *where)
        with hosts[0].network():
            client = stack.enter_context(Client(_scheduler("tcp"), timeout=PATIENCE_S))
        client.wait_for_workers(2 * workers, timeout=PATIENCE_S)
        instrument(client)
        dask_gpurt.enable(client)
        try:
            yield client
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                dask_gpurt.disable(client)


def _scheduler(protocol: str) -> str:
    return f"{protocol}://{ADDRESSES[0]}:{PORTS[protocol]}"


def _doors(protocol: str) -> tuple[str, ...]:
    """Return the options of a scheduler that listens on TCP and on the protocol of its workers."""
    protocols = list(dict.fromkeys(("tcp", protocol)))
    ports = ",".join(str(PORTS[each]) for each in protocols)
    return "--protocol", ",".join(protocols), "--port", ports


def on_other_host(client: Client) -> list[str]:
    """Return the workers that are not on the scheduler's host."""
    workers = client.nthreads()
    return [worker for worker in workers if host_of(worker) != ADDRESSES[0]]
