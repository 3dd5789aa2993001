"""Run each worker on a host of its own with a link that can be slowed down.

Hosts are namespaces of this machine's kernel, joined by a bridge in one more namespace, which acts as a
switch.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distributed import Client

from benchmarks.two_hosts.hosts import LINK, PATIENCE_S, Host, host_of, limit, require

if TYPE_CHECKING:
    from benchmarks.skew.clusters import Plan

#: The network, and the host number of the switch, which also runs the schedulers.
NETWORK, SWITCH = "10.98.0", 250
#: The port of the first scheduler, and the distance to the next: each serves HTTP on the port after its own.
PORT, PORTS_APART = 8786, 10
#: Slowdown of a slow link.
SLOWER = 10
#: Queue of a link in milliseconds at its rate, before it drops packets: about the 1,000 packets that a
#: network card queues at 100 Mbit/s.
QUEUE_MS = 120


@dataclass(frozen=True)
class Star:
    """Hosts around a switch.

    Parameters
    ----------
    switch
        The host of the bridge.
    hosts
        One host per worker; the n-th is on the port ``port-n`` of the bridge.
    rate
        Bytes per second of each link, in either direction.
    """

    switch: Host
    hosts: tuple[Host, ...]
    rate: int

    @contextlib.contextmanager
    def slow(self, worker: str) -> Iterator[None]:
        """Slow down the link of a worker in both directions until the end of the block."""
        at = [host.address for host in self.hosts].index(host_of(worker))
        self._limit(at, self.rate // SLOWER)
        try:
            yield
        finally:
            self._limit(at, self.rate)

    def _limit(self, at: int, rate: int) -> None:
        limit(self.hosts[at], LINK, rate, QUEUE_MS)
        limit(self.switch, f"port-{at}", rate, QUEUE_MS)


def make_star(stack: contextlib.ExitStack, number: int, rate: int) -> Star:
    """Make hosts with links of ``rate`` bytes per second each; ``stack`` ends them.

    Raises
    ------
    UnsupportedError
        If this machine, this user or the kernel does not allow it.
    """
    require()
    switch = Host("switch", f"{NETWORK}.{SWITCH}", stack)
    switch.configure("ip", "link", "add", LINK, "type", "bridge")
    switch.configure("ip", "address", "add", f"{switch.address}/24", "dev", LINK)
    switch.configure("ip", "link", "set", LINK, "up")
    hosts = tuple(Host(f"host-{at}", f"{NETWORK}.{at + 1}", stack) for at in range(number))
    for at, host in enumerate(hosts):
        port, peer = f"port-{at}", ("peer", "name", LINK, "netns", str(host.pid))
        switch.configure("ip", "link", "add", port, "type", "veth", *peer)
        switch.configure("ip", "link", "set", port, "master", LINK, "up")
        host.configure("ip", "address", "add", f"{host.address}/24", "dev", LINK)
        host.configure("ip", "link", "set", LINK, "up")
    star = Star(switch, hosts, rate)
    for at in range(number):
        star._limit(at, rate)
    return star


@contextlib.contextmanager
def cluster_on(star: Star, plan: Plan, number: int) -> Iterator[Client]:
    """Run a scheduler on the switch and a worker on each host, and yield a client.

    Parameters
    ----------
    number
        Number of the cluster on these hosts, which selects its ports.
    """
    port, dask = PORT + PORTS_APART * number, (sys.executable, "-m", "dask")
    scheduler = f"tcp://{star.switch.address}:{port}"
    where = ("--host", star.switch.address, "--port", str(port), "--no-dashboard")
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = stack.enter_context(contextlib.ExitStack())  # exits before the scratch folder is removed
        star.switch.start(*dask, "scheduler", *where, stack=processes)
        for host in star.hosts:
            limits = ("--nthreads", str(plan.threads), "--memory-limit", str(plan.memory_limit))
            options = ("--host", host.address, "--no-nanny", "--no-dashboard", *limits)
            files = ("--local-directory", str(scratch))
            host.start(*dask, "worker", scheduler, *options, *files, stack=processes)
        with star.switch.network():
            client = Client(scheduler, timeout=PATIENCE_S, set_as_default=False)
        with client:
            client.wait_for_workers(len(star.hosts), timeout=2 * PATIENCE_S)
            yield client


def link_bytes(client: Client) -> dict[str, tuple[int, int]]:
    """Return the bytes sent and received by each worker's link so far; 0 without links."""
    found: dict[str, tuple[int, int]] = client.run(_sent_and_received)
    return found


def _sent_and_received() -> tuple[int, int]:
    counts = Path(f"/sys/class/net/{LINK}/statistics")
    if not counts.exists():
        return 0, 0
    return int((counts / "tx_bytes").read_text()), int((counts / "rx_bytes").read_text())
