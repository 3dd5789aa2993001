"""Make hosts on one machine, each with a link of its own to a switch.

The switch is a bridge in one more namespace.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from benchmarks.two_hosts.hosts import LINK, Host, limit, require

#: The network, and the host number of the switch.
NETWORK, SWITCH = "10.98.0", 250
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
        The n-th is on the port ``port-n`` of the bridge.
    rate
        Bytes per second of each link, in either direction; None for no limit.
    """

    switch: Host
    hosts: tuple[Host, ...]
    rate: int | None

    def _limit(self, at: int, rate: int) -> None:
        limit(self.hosts[at], LINK, rate, QUEUE_MS)
        limit(self.switch, f"port-{at}", rate, QUEUE_MS)


def make_star(stack: contextlib.ExitStack, number: int, rate: int | None) -> Star:
    """Make hosts with links of ``rate`` bytes per second each, or no limit; ``stack`` ends them.

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
    if rate is not None:
        for at in range(number):
            star._limit(at, rate)
    return star
