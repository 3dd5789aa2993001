"""Transfer bytes in virtual time. Transfers share the bandwidth of the ports that they pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.links import Link, Topology

#: A port recomputes its shares when more than this fraction of its transfers has started or ended: each time
#: with up to 16 transfers, less often beyond that, since all transfers of the port have to be updated.
RESHARE_FRACTION = 1 / 16
#: Remaining seconds of a transfer that count as a rounding error.
ROUNDING_ERROR_S = 1e-9


class Port:
    """Divide the bandwidth of one end and direction of a link equally among its transfers."""

    __slots__ = ("bandwidth", "shared", "transfers")

    def __init__(self, bandwidth: float):
        self.bandwidth = bandwidth
        self.transfers: dict[Transfer, None] = {}
        self.shared = 0

    @property
    def share(self) -> float:
        """Return the bytes per second available to each transfer."""
        return self.bandwidth / len(self.transfers)


class Transfer:
    """Track a transfer in flight from one worker to another."""

    __slots__ = (
        "bandwidth", "done", "due", "ended", "link", "nbytes", "ports", "rate", "remaining", "sent",
        "since", "source", "target",
    )  # fmt: skip

    def __init__(self, source: str, target: str, link: Link, nbytes: int):
        self.source, self.target, self.link, self.nbytes = source, target, link, nbytes
        self.bandwidth = self.rate = self.sent = self.since = 0.0
        self.remaining, self.due = float(nbytes), float("inf")
        self.ports: tuple[Port, ...] = ()
        self.done: Callable[[], None] = _nothing
        self.ended = False


def _nothing() -> None:
    """Ignore the end of a transfer."""


class Network:
    """Move bytes between workers, each transfer at the rate of its narrowest port.

    NVLink, PCIe, shared memory and RDMA have an inbound and an outbound port at each worker, since hosts with
    many devices have an RDMA NIC per device. TCP has one pair of ports per host. Racks are joined by uplinks.

    ``topology``: the links between workers, with their speeds for a single transfer.
    ``racks``: the rack of each host, if there are racks.
    ``uplink``: bytes per second, in each direction, between a rack and all other racks.
    """

    def __init__(
        self,
        clock: Clock,
        topology: Topology,
        *,
        racks: Mapping[str, str] | None = None,
        uplink: float = float("inf"),
        moved: Callable[[Transfer], None] = lambda transfer: None,
    ):
        self._clock = clock
        self._topology = topology
        self._racks = racks or {}
        self._uplink = uplink
        self._moved = moved
        self._ports: dict[Hashable, Port] = {}

    def send(self, source: str, target: str, nbytes: int, done: Callable[[], None] = _nothing) -> None:
        """Start a transfer; call ``done`` when it completes."""
        link, speed = self._topology.way(source, target)
        transfer = Transfer(source, target, link, nbytes)
        transfer.done = done
        transfer.bandwidth, transfer.sent = speed.bandwidth, self._clock.now
        transfer.ports = tuple(self._passed(transfer))
        self._clock.after(speed.latency, self._start, transfer)

    # ---- ports -----------------------------------------------------------------------

    def _passed(self, transfer: Transfer) -> Iterator[Port]:
        """Yield the ports that a transfer passes."""
        if transfer.link is Link.SAME_DEVICE:
            return
        ends: tuple[str, str] = (transfer.source, transfer.target)
        places = self._topology.place(transfer.source), self._topology.place(transfer.target)
        if transfer.link is Link.TCP:
            ends = places[0].host, places[1].host
        for end, way in zip(ends, ("out", "in"), strict=True):
            yield self._port((transfer.link, way, end), transfer.bandwidth)
        racks = self._racks.get(places[0].host), self._racks.get(places[1].host)
        if racks[0] != racks[1]:
            yield self._port(("uplink", "out", racks[0]), self._uplink)
            yield self._port(("uplink", "in", racks[1]), self._uplink)

    def _port(self, name: Hashable, bandwidth: float) -> Port:
        return self._ports.setdefault(name, Port(bandwidth))

    # ---- a transfer ------------------------------------------------------------------

    def _start(self, transfer: Transfer) -> None:
        transfer.since = self._clock.now
        for port in transfer.ports:
            port.transfers[transfer] = None
        self._account(transfer)
        self._schedule(transfer)
        self._share(transfer.ports)

    def _share(self, ports: tuple[Port, ...]) -> None:
        """Update the rates of transfers at ports where enough transfers have started or ended."""
        for port in ports:
            count = len(port.transfers)
            if abs(count - port.shared) > port.shared * RESHARE_FRACTION:
                port.shared = count
                for transfer in port.transfers:
                    self._account(transfer)
                    self._schedule(transfer)

    def _account(self, transfer: Transfer) -> None:
        """Subtract the bytes moved since the last update, and continue at the current rate."""
        now = self._clock.now
        transfer.remaining -= transfer.rate * (now - transfer.since)
        transfer.since = now
        transfer.rate = min([transfer.bandwidth, *[port.share for port in transfer.ports]])

    def _schedule(self, transfer: Transfer) -> None:
        due = self._clock.now + max(0.0, transfer.remaining) / transfer.rate
        if due < transfer.due:  # a later end is detected when the earlier one is due
            transfer.due = due
            self._clock.at(due, self._on_due, transfer, due)

    def _on_due(self, transfer: Transfer, due: float) -> None:
        if transfer.ended or due != transfer.due:
            return
        self._account(transfer)
        if transfer.remaining > transfer.rate * ROUNDING_ERROR_S:
            transfer.due = float("inf")
            self._schedule(transfer)
            return
        self._end(transfer)
        self._moved(transfer)
        transfer.done()

    def _end(self, transfer: Transfer) -> None:
        transfer.ended = True
        for port in transfer.ports:
            port.transfers.pop(transfer, None)
        self._share(transfer.ports)
