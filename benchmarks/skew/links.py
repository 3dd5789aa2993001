"""Put each worker on a host of its own, whose link to the others can be slowed down.

Hosts are namespaces of this machine's kernel, and a bridge in one more of them joins them, as a switch does.
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

#: The network, and the number of the switch in it, where schedulers are too.
NETWORK, SWITCH = "10.98.0", 250
#: The port of the first scheduler, and how far those of others are apart: it serves HTTP at the next one.
PORT, PORTS_APART = 8786, 10
#: How many times slower a slow link is.
SLOWER = 10
#: What a link holds back before it drops packets, in milliseconds at its rate: a network card at 100 Mbit/s
#: queues 1,000 packets.
QUEUE_MS = 120


@dataclass(frozen=True)
class Star:
    """Hosts around a switch.

    Parameters
    ----------
    switch
        Where the bridge is.
    hosts
        Of a worker each; the n-th is on the port ``port-n`` of the bridge.
    rate
        Bytes per second of each link, in either direction.
    """

    switch: Host
    hosts: tuple[Host, ...]
    rate: int

    @contextlib.contextmanager
    def slow(self, worker: str) -> Iterator[None]:
        """Have the link of a worker be slow, in both directions, until the end of the block."""
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
    """Return hosts, with links that carry ``rate`` bytes per second each; ``stack`` ends them.

    Raises
    ------
    UnsupportedError
        When this machine, this user or the kernel does not allow it.
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
    """Run the scheduler of a cluster at the switch, and a worker on each host.

    Parameters
    ----------
    number
        Tells clusters on the same hosts apart.
    """
    port, dask = PORT + PORTS_APART * number, (sys.executable, "-m", "dask")
    scheduler = f"tcp://{star.switch.address}:{port}"
    where = ("--host", star.switch.address, "--port", str(port), "--no-dashboard")
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = stack.enter_context(contextlib.ExitStack())  # ends before its files do
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
    """Return the bytes that the link of each worker has sent and received until now; none without links."""
    found: dict[str, tuple[int, int]] = client.run(_sent_and_received)
    return found


def _sent_and_received() -> tuple[int, int]:
    counts = Path(f"/sys/class/net/{LINK}/statistics")
    if not counts.exists():
        return 0, 0
    return int((counts / "tx_bytes").read_text()), int((counts / "rx_bytes").read_text())
