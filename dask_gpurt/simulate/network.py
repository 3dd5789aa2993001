"""Transfers in virtual time, which share the ports that they pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping

from dask_gpurt.simulate.clock import Clock
from dask_gpurt.topology import Link, Topology

#: A port shares itself out anew when so large a part of its transfers has come or gone: exactly up to
#: 16 transfers, and beyond that without a new account of all of them for each.
STEP = 1 / 16
#: Seconds of a transfer that are no more than an error of rounding.
NOTHING = 1e-9


class Port:
    """One direction of a link at one end: its transfers have equal parts of it."""

    __slots__ = ("bandwidth", "shared", "transfers")

    def __init__(self, bandwidth: float):
        self.bandwidth = bandwidth
        self.transfers: dict[Transfer, None] = {}
        self.shared = 0

    @property
    def share(self) -> float:
        """Bytes per second for each transfer."""
        return self.bandwidth / len(self.transfers)


class Transfer:
    """Bytes on their way from a worker to another."""

    __slots__ = (
        "bandwidth", "done", "due", "left", "link", "lost", "nbytes", "over", "ports", "rate", "since",
        "source", "target",
    )  # fmt: skip

    def __init__(self, source: str, target: str, link: Link, nbytes: int):
        self.source, self.target, self.link, self.nbytes = source, target, link, nbytes
        self.bandwidth = self.rate = self.since = 0.0
        self.left, self.due = float(nbytes), float("inf")
        self.ports: tuple[Port, ...] = ()
        self.done: Callable[[], None] = _nothing
        self.lost: Callable[[], None] = _nothing
        self.over = False


def _nothing() -> None:
    """What nobody waits for."""


class Network:
    """The links between workers, each transfer at the pace of its narrowest port.

    NVLink, PCIe, shared memory and RDMA have a port in and one out at each worker, since hosts of many
    devices have a NIC for RDMA by each; TCP has one pair at each host; between racks there are uplinks.

    Parameters
    ----------
    clock
        Tells and makes the time.
    topology
        Which link joins two workers, and its speed when nobody else is there.
    racks
        By host, the rack that it is in, if there are racks.
    uplink
        Bytes per second, in each direction, between a rack and all others.
    moved
        Called with each transfer that has arrived.
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
        self._of_worker: defaultdict[str, dict[Transfer, None]] = defaultdict(dict)

    def send(
        self,
        source: str,
        target: str,
        nbytes: int,
        done: Callable[[], None] = _nothing,
        lost: Callable[[], None] = _nothing,
    ) -> None:
        """Begin a transfer; ``done`` is called when it has arrived, ``lost`` if an end is gone first."""
        speed = self._topology.speed(source, target)
        transfer = Transfer(source, target, self._topology.link(source, target), nbytes)
        transfer.done, transfer.lost = done, lost
        transfer.bandwidth = speed.bandwidth
        transfer.ports = tuple(self._passed(transfer))
        self._of_worker[source][transfer] = None
        self._of_worker[target][transfer] = None
        self._clock.after(speed.latency, self._start, transfer)

    def cut(self, worker: str) -> None:
        """End all transfers of a worker that is gone."""
        gone = list(self._of_worker.pop(worker, ()))
        for transfer in gone:
            self._end(transfer)
        for transfer in gone:
            transfer.lost()

    # ---- ports -----------------------------------------------------------------------

    def _passed(self, transfer: Transfer) -> Iterator[Port]:
        """The ports of a transfer."""
        if transfer.link is Link.SAME_DEVICE:
            return
        ends: tuple[str, str] = (transfer.source, transfer.target)
        places = self._topology.place(transfer.source), self._topology.place(transfer.target)
        if transfer.link is Link.TCP and places[0] and places[1]:
            ends = places[0].host, places[1].host
        yield self._port((transfer.link, "out", ends[0]), transfer.bandwidth)
        yield self._port((transfer.link, "in", ends[1]), transfer.bandwidth)
        if places[0] and places[1]:
            racks = self._racks.get(places[0].host), self._racks.get(places[1].host)
            if racks[0] != racks[1]:
                yield self._port(("uplink", "out", racks[0]), self._uplink)
                yield self._port(("uplink", "in", racks[1]), self._uplink)

    def _port(self, name: Hashable, bandwidth: float) -> Port:
        return self._ports.setdefault(name, Port(bandwidth))

    # ---- a transfer ------------------------------------------------------------------

    def _start(self, transfer: Transfer) -> None:
        if transfer.over:
            return
        transfer.since = self._clock.now
        for port in transfer.ports:
            port.transfers[transfer] = None
        self._account(transfer)
        self._expect(transfer)
        self._share(transfer.ports)

    def _share(self, ports: tuple[Port, ...]) -> None:
        """Tell the transfers of ports where enough has come or gone what they have now."""
        for port in ports:
            count = len(port.transfers)
            if abs(count - port.shared) > port.shared * STEP:
                port.shared = count
                for transfer in port.transfers:
                    self._account(transfer)
                    self._expect(transfer)

    def _account(self, transfer: Transfer) -> None:
        """Take off what has been moved, and go on at the pace of now."""
        now = self._clock.now
        transfer.left -= transfer.rate * (now - transfer.since)
        transfer.since = now
        transfer.rate = min([transfer.bandwidth, *[port.share for port in transfer.ports]])

    def _expect(self, transfer: Transfer) -> None:
        due = self._clock.now + max(0.0, transfer.left) / transfer.rate
        if due < transfer.due:  # when it is later, that is found out at the time that was expected before
            transfer.due = due
            self._clock.at(due, self._expected, transfer, due)

    def _expected(self, transfer: Transfer, due: float) -> None:
        if transfer.over or due != transfer.due:
            return
        self._account(transfer)
        if transfer.left > transfer.rate * NOTHING:
            transfer.due = float("inf")
            self._expect(transfer)
            return
        self._end(transfer)
        self._moved(transfer)
        transfer.done()

    def _end(self, transfer: Transfer) -> None:
        transfer.over = True
        for worker in (transfer.source, transfer.target):
            if worker in self._of_worker:
                self._of_worker[worker].pop(transfer, None)
        for port in transfer.ports:
            port.transfers.pop(transfer, None)
        self._share(transfer.ports)
