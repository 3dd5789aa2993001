"""Make two hosts of one machine: namespaces of the kernel, joined by a link of a known speed.

A host has a network, a name, processes and ``/dev/shm`` of its own, as a container has. It lives for as
long as its first process, which reads until we are gone: nothing outlives the test, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client

import dask_gpurt
from tests.helpers.clusters import QUICK, instrument

#: Their end of the link, and the addresses there.
LINK, ADDRESSES = "gpurt", ("10.99.0.1", "10.99.0.2")
TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
#: The scheduler's ports by protocol: the client, which is on neither host, takes the first one.
PORTS = {"tcp": 8786, "ucx": 8788}
#: UCX goes by TCP over the link, within a host too: it takes two namespaces of one kernel for one host.
UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}
CLONE_NEWNET = 0x40000000
PATIENCE_S = 60


class Host:
    """Namespaces, and what runs in them."""

    def __init__(self, name: str, address: str, stack: contextlib.ExitStack):
        self.name = name
        self.address = address
        self._stack = stack
        kinds = ("--net", "--uts", "--ipc", "--pid", "--fork", "--mount", "--mount-proc")
        first = stack.enter_context(
            subprocess.Popen(
                ["unshare", *kinds, "sh", "-c", "echo here; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        assert first.stdout is not None
        assert first.stderr is not None
        if first.stdout.readline() != b"here\n":
            pytest.skip(f"the kernel forbids two hosts on one machine: {first.stderr.read().decode()}")
        (child,) = psutil.Process(first.pid).children()
        self.pid = child.pid
        self.run("hostname", name)
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.run("mount", "-t", "sysfs", "sysfs", "/sys")  # where UCX looks for the devices of a network
        self.configure("ip", "link", "set", "lo", "up")

    def start(self, *command: str) -> None:
        """Start something that runs on; it ends with the host."""
        inherited = {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.global_config)}
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, **UCX, **inherited}
        enter = ["nsenter", "--target", str(self.pid), "--all", "--wd=."]
        process = subprocess.Popen([*enter, *command], env=environment, stderr=subprocess.DEVNULL)
        self._stack.callback(process.wait, PATIENCE_S)
        self._stack.callback(process.kill)

    def run(self, *command: str, within: str = "--all") -> None:
        """Run something to its end."""
        enter = ["nsenter", "--target", str(self.pid), within, "--"]
        done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def configure(self, *command: str) -> None:
        """Change its network, with process ids as they are outside."""
        self.run(*command, within="--net")

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Put this thread, and threads that it starts, in the network of this host."""
        with open("/proc/thread-self/ns/net") as outside, open(f"/proc/{self.pid}/ns/net") as inside:
            _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(outside.fileno())


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def two_hosts(
    scratch: Path, workers: int = 2, *, rate: int | None = None, protocol: str = "tcp", **settings: Any
) -> Iterator[Client]:
    """Run a cluster with the runtime on, of so many workers on each of two hosts.

    The scheduler is on the first.

    Parameters
    ----------
    scratch
        Where the workers have their files.
    rate
        Bytes per second of the link between them in one direction; not limited if not given.
    protocol
        Of the comms of workers; "ucx" goes over TCP.
    settings
        Keys under ``gpurt``.
    """
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("two hosts on one machine take Linux, and a user who may make namespaces: root")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"two hosts on one machine take {', '.join(missing)} (util-linux, iproute2)")
    nested = {f"gpurt.{name.replace('__', '.')}": value for name, value in settings.items()}
    with dask.config.set({**QUICK, **nested}), contextlib.ExitStack() as stack:
        hosts = [Host(f"host-{at}", address, stack) for at, address in enumerate(ADDRESSES)]
        _join(*hosts, rate)
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
    """Return options of a scheduler that speaks TCP, and what its workers do."""
    protocols = list(dict.fromkeys(("tcp", protocol)))
    ports = ",".join(str(PORTS[each]) for each in protocols)
    return "--protocol", ",".join(protocols), "--port", ports


def _join(one: Host, other: Host, rate: int | None) -> None:
    """Lay a link between two hosts."""
    peer = ("peer", "name", LINK, "netns", str(other.pid))
    one.configure("ip", "link", "add", LINK, "type", "veth", *peer)
    for host in (one, other):
        host.configure("ip", "address", "add", f"{host.address}/24", "dev", LINK)
        host.configure("ip", "link", "set", LINK, "up")
        if rate is not None:
            limit = ("tbf", "rate", f"{8 * rate}bit", "burst", "64kb", "latency", "50ms")
            host.configure("tc", "qdisc", "add", "dev", LINK, "root", *limit)


def host_of(worker: str) -> str:
    """Return the address of the host of a worker."""
    return worker.partition("://")[2].rpartition(":")[0]


def on_other_host(client: Client) -> list[str]:
    """Return the workers that are not on the scheduler's host."""
    workers = client.nthreads()
    return [worker for worker in workers if host_of(worker) != ADDRESSES[0]]
