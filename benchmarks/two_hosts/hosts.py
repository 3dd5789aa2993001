"""Make hosts on one machine, which are kernel namespaces, and join two of them by a link of known speed.

Like a container, a host has its own network, host name, processes and ``/dev/shm``. It lives as long as its
first process, which blocks on a pipe from this process: nothing outlives this process, however it ends.
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

#: Name of the link's device on each host, and the addresses of two hosts.
LINK, ADDRESSES = "gpurt", ("10.99.0.1", "10.99.0.2")
TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
CLONE_NEWNET = 0x40000000
PATIENCE_S = 60
#: Burst of a limited link: at least so many bytes, and at least so many seconds at its rate. With less, the
#: kernel's timers slow a fast link down.
MIN_BURST_BYTES, BURST_S = 64_000, 1e-3


class UnsupportedError(RuntimeError):
    """Raised if hosts cannot be made on this machine."""


def require() -> None:
    """Check that hosts can be made on this machine.

    Raises
    ------
    UnsupportedError
        Without Linux, root, or the required programs.
    """
    if os.geteuid() != 0 or sys.platform != "linux":
        raise UnsupportedError("hosts on one machine need Linux and root, to create namespaces")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise UnsupportedError(f"hosts on one machine need {', '.join(missing)} (util-linux, iproute2)")


@dataclass
class Host:
    """Namespaces and the processes in them.

    Parameters
    ----------
    name, address
        Host name, and address on the link.
    stack
        Ends the host's processes.
    environment
        Variables for processes of :meth:`start`, in addition to those of this process.

    Raises
    ------
    UnsupportedError
        If the kernel forbids namespaces.
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
            raise UnsupportedError(f"the kernel forbids hosts on one machine: {first.stderr.read().decode()}")
        (child,) = psutil.Process(first.pid).children()
        self.pid = child.pid
        self.run("hostname", self.name)
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.run("mount", "-t", "sysfs", "sysfs", "/sys")  # where UCX looks for the devices of a network
        self.configure("ip", "link", "set", "lo", "up")

    def start(self, *command: str, stack: contextlib.ExitStack | None = None) -> None:
        """Start a process in the background; it ends with ``stack`` if given, at the latest with the host."""
        stack = stack or self.stack
        inherited = {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.global_config)}
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, **self.environment, **inherited}
        enter = ["nsenter", "--target", str(self.pid), "--all", "--wd=."]
        process = subprocess.Popen([*enter, *command], env=environment, stderr=subprocess.DEVNULL)
        stack.callback(process.wait, PATIENCE_S)
        stack.callback(process.kill)

    def run(self, *command: str, within: str = "--all") -> None:
        """Run a command to completion."""
        enter = ["nsenter", "--target", str(self.pid), within, "--"]
        done = subprocess.run([*enter, *command], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def configure(self, *command: str) -> None:
        """Run a command in the host's network, with process ids of the outside."""
        self.run(*command, within="--net")

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Move this thread, and threads that it starts, into the network of this host."""
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
    """Make two hosts, and join them.

    Parameters
    ----------
    stack
        Ends the hosts.
    rate
        Bytes per second of the link in one direction; None for no limit.
    environment
        Variables for the hosts' processes.

    Raises
    ------
    UnsupportedError
        If this machine, this user or the kernel does not allow it.
    """
    require()
    hosts = [Host(f"host-{at}", address, stack, environment or {}) for at, address in enumerate(ADDRESSES)]
    _join(*hosts, rate)
    return hosts


def _join(one: Host, other: Host, rate: int | None) -> None:
    """Connect two hosts by a link."""
    peer = ("peer", "name", LINK, "netns", str(other.pid))
    one.configure("ip", "link", "add", LINK, "type", "veth", *peer)
    for host in (one, other):
        host.configure("ip", "address", "add", f"{host.address}/24", "dev", LINK)
        host.configure("ip", "link", "set", LINK, "up")
        if rate is not None:
            limit(host, LINK, rate)


def limit(host: Host, device: str, rate: int, queue_ms: int = 50) -> None:
    """Limit a network device of a host to ``rate`` bytes per second.

    Parameters
    ----------
    queue_ms
        Queue before it drops packets, in milliseconds at that rate.
    """
    burst = max(MIN_BURST_BYTES, round(rate * BURST_S))
    bucket = ("tbf", "rate", f"{8 * rate}bit", "burst", f"{burst}b", "latency", f"{queue_ms}ms")
    host.configure("tc", "qdisc", "replace", "dev", device, "root", *bucket)


def host_of(worker: str) -> str:
    """Return the host part of a worker's address."""
    return worker.partition("://")[2].rpartition(":")[0]
