"""Make two hosts of one machine: namespaces of the kernel, joined by a link of a known speed.

A host has a network, a name, processes and ``/dev/shm`` of its own, as a container has. It lives for as
long as its first process, which reads until we are gone: nothing outlives this process, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import dask
import psutil

#: Their end of the link, and the addresses there.
LINK, ADDRESSES = "gpurt", ("10.99.0.1", "10.99.0.2")
TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
CLONE_NEWNET = 0x40000000
PATIENCE_S = 60
#: The bytes that a limited link may send at once: so many, and this share of what it sends in a second, for
#: below that the kernel's timers slow a fast link down.
MIN_BURST_BYTES, BURST_S = 64_000, 1e-3


class UnsupportedError(RuntimeError):
    """Report that two hosts cannot be made here, and why."""


def require() -> None:
    """Make sure that two hosts can be made of this machine.

    Raises
    ------
    UnsupportedError
        Without Linux, root, or the programs for it.
    """
    if os.geteuid() != 0 or sys.platform != "linux":
        raise UnsupportedError(
            "two hosts on one machine take Linux, and a user who may make namespaces: root"
        )
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise UnsupportedError(f"two hosts on one machine take {', '.join(missing)} (util-linux, iproute2)")


@dataclass
class Host:
    """Namespaces, and what runs in them.

    Parameters
    ----------
    name, address
        Its name, and its address on the link.
    stack
        Ends its processes.
    environment
        Variables for what :meth:`start` starts, beside those of this process.

    Raises
    ------
    UnsupportedError
        When the kernel forbids namespaces.
    """

    name: str
    address: str
    stack: contextlib.ExitStack
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = ("--net", "--uts", "--ipc", "--pid", "--fork", "--mount", "--mount-proc")
        first = self.stack.enter_context(
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
            raise UnsupportedError(
                f"the kernel forbids two hosts on one machine: {first.stderr.read().decode()}"
            )
        (child,) = psutil.Process(first.pid).children()
        self.pid = child.pid
        self.run("hostname", self.name)
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.run("mount", "-t", "sysfs", "sysfs", "/sys")  # where UCX looks for the devices of a network
        self.configure("ip", "link", "set", "lo", "up")

    def start(self, *command: str, stack: contextlib.ExitStack | None = None) -> None:
        """Start something that runs on; it ends with ``stack`` if given, and with the host at the latest."""
        stack = stack or self.stack
        inherited = {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.global_config)}
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, **self.environment, **inherited}
        enter = ["nsenter", "--target", str(self.pid), "--all", "--wd=."]
        process = subprocess.Popen([*enter, *command], env=environment, stderr=subprocess.DEVNULL)
        stack.callback(process.wait, PATIENCE_S)
        stack.callback(process.kill)

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


def make_hosts(
    stack: contextlib.ExitStack, rate: int | None = None, environment: Mapping[str, str] | None = None
) -> list[Host]:
    """Return two hosts, and join them.

    Parameters
    ----------
    stack
        Ends them.
    rate
        Bytes per second of the link between them in one direction; not limited if not given.
    environment
        Variables for their processes.

    Raises
    ------
    UnsupportedError
        When this machine, this user or the kernel does not allow it.
    """
    require()
    hosts = [Host(f"host-{at}", address, stack, environment or {}) for at, address in enumerate(ADDRESSES)]
    _join(*hosts, rate)
    return hosts


def _join(one: Host, other: Host, rate: int | None) -> None:
    """Lay a link between two hosts."""
    peer = ("peer", "name", LINK, "netns", str(other.pid))
    one.configure("ip", "link", "add", LINK, "type", "veth", *peer)
    for host in (one, other):
        host.configure("ip", "address", "add", f"{host.address}/24", "dev", LINK)
        host.configure("ip", "link", "set", LINK, "up")
        if rate is not None:
            limit(host, LINK, rate)


def limit(host: Host, device: str, rate: int, queue_ms: int = 50) -> None:
    """Have a device of a host's network send so many bytes per second at most, from now on.

    Parameters
    ----------
    queue_ms
        What it holds back before it drops packets, in milliseconds at that rate.
    """
    burst = max(MIN_BURST_BYTES, round(rate * BURST_S))
    bucket = ("tbf", "rate", f"{8 * rate}bit", "burst", f"{burst}b", "latency", f"{queue_ms}ms")
    host.configure("tc", "qdisc", "replace", "dev", device, "root", *bucket)


def host_of(worker: str) -> str:
    """Return the address of the host of a worker."""
    return worker.partition("://")[2].rpartition(":")[0]
