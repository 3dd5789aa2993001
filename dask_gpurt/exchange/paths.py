"""Enumerate the paths of shards between two workers, select the fastest, and keep mapped pools open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dask_gpurt.device import Device, Mapping, MappingError
from dask_gpurt.device.pool import Buffer, Ticket
from dask_gpurt.topology import SHIPPED, Link, Speed
from dask_gpurt.topology.links import BETWEEN_HOSTS

COMMS = "comms"
LOCAL = "local"
THROUGH_HOST = "through-host"
#: Latency of a request to a producer through Dask's event loops, in seconds.
MESSAGE = SHIPPED[Link.SHARED_MEMORY].latency
#: Links over which a device can read another device's memory.
_BETWEEN_DEVICES = (Link.SAME_DEVICE, Link.NVLINK, Link.PCIE)

#: Returns the speed of a class of link.
SpeedOf = Callable[[Link], Speed]


@dataclass(frozen=True)
class Path:
    """Describe a path along which shards of a peer are read.

    Attributes
    ----------
    name
        "local", "shared-memory", "cuda-ipc", "through-host" or "comms".
    mapping
        The peer's pool; None if its bytes come through a comm or through host memory.
    in_place
        Whether shards are read in the peer's pool, without a copy.
    reason
        Why a better path is not possible.
    steps
        The links that bytes cross in sequence.
    message
        Latency before the transfer starts, in seconds.
    staging
        The peer's pool in host memory, into which it copies shards on request.
    """

    name: str
    mapping: Mapping | None
    in_place: bool
    reason: str | None = None
    steps: tuple[Link, ...] = ()
    message: float = 0.0
    staging: Mapping | None = None

    def seconds(self, nbytes: int, speed: SpeedOf) -> float:
        """Return the estimated time until this many bytes can be read here."""
        return self.message + sum(speed(link).seconds(nbytes) for link in self.steps)

    def describe(self) -> dict[str, Any]:
        return {"path": self.name, "reason": self.reason}

    @property
    def mappings(self) -> tuple[HeldMapping, ...]:
        """Return the mapped pools of the peer that it uses."""
        return tuple(each for each in (self.mapping, self.staging) if isinstance(each, HeldMapping))

    def hold(self) -> bool:
        """Keep its mappings open until :meth:`let_go`; return False if the peer has left."""
        with ExitStack() as undo:
            for mapping in self.mappings:
                if not mapping.hold():
                    return False
                undo.callback(mapping.let_go)
            undo.pop_all()
        return True

    def let_go(self) -> None:
        """Undo one :meth:`hold`."""
        for mapping in self.mappings:
            mapping.let_go()


def least(paths: Iterable[Path], nbytes: int, speed: SpeedOf) -> Path:
    """Return the fastest path; the first one in case of a tie."""
    return min(paths, key=lambda path: path.seconds(nbytes, speed))


@dataclass(frozen=True)
class Between:
    """Describe the connection of two workers.

    Attributes
    ----------
    link
        The class of link between them; None if unknown.
    staging
        The peer's pool in host memory, if this worker maps it.
    carried
        Whether Dask's comms between them send buffers of the device directly.
    """

    link: Link | None = None
    staging: Mapping | None = None
    carried: bool = False


def possible(
    device: Device | None, ticket: Ticket | None, allowed: frozenset[str], between: Between
) -> tuple[Path, ...]:
    """Return the possible paths from a peer's pool, starting with that in place. Blocks while mapping.

    Parameters
    ----------
    device
        This worker's device of the kind of the pool; None if it has none.
    ticket
        The ticket of the peer's pool; None if it has none.
    allowed
        The setting ``gpurt.exchange.paths``.
    """
    if device is None or ticket is None:
        return (Path(COMMS, None, False, "one of the two workers has no such device"),)
    mapped, reason = _mapped(device, ticket, allowed, between.link)
    copies = device.host_links
    found = [mapped] if mapped is not None else []
    if between.staging is not None and copies:
        found.append(
            Path(THROUGH_HOST, None, False, reason, 2 * copies, message=MESSAGE, staging=between.staging)
        )
    network = between.link if between.link in BETWEEN_HOSTS else Link.TCP
    steps = (network,) if between.carried else (*copies, network, *copies)
    return *found, Path(COMMS, None, False, reason, steps)


def _mapped(
    device: Device, ticket: Ticket, allowed: frozenset[str], link: Link | None
) -> tuple[Path | None, str | None]:
    """Return the path through the mapped pool, or the reason why there is none."""
    name = device.shared_path
    if name not in allowed:
        return None, f"gpurt.exchange.paths excludes {name}"
    try:
        mapping = device.map(ticket)
    except MappingError as error:
        return None, str(error)
    if device.reads_in_place or link is Link.SAME_DEVICE:
        return Path(name, mapping, True), None
    crossed = link if link in _BETWEEN_DEVICES else Link.PCIE
    return Path(name, mapping, False, steps=(crossed,)), None


class HeldMapping:
    """Keep a peer's pool mapped for as long as a shard in it is held. Thread-safe.

    When a peer leaves, its mapping is retired, possibly while a pull is in flight:

    - If shards hold the mapping when the event loop retires it, it is closed with the last ``let_go``.
    - If the mapping is not retired at the last ``let_go``, it stays open for the next shard.
    - If a late message offers a shard after the mapping was retired, ``hold`` fails and the shard is refused.

    Parameters
    ----------
    close_soon
        Closes the mapping in a thread, where that may block.
    """

    def __init__(self, mapping: Mapping, close_soon: Callable[[Callable[[], None]], None]):
        self._mapping = mapping
        self._close_soon = close_soon
        self._lock = threading.Lock()
        self._held = 0
        self._retired = False

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a view of a part of the pool; valid while the mapping is held."""
        return self._mapping.view(offset, nbytes)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Drop the pages of a part from the resident set of this process."""
        self._mapping.drop_pages(offset, nbytes)

    def hold(self) -> bool:
        """Keep the pool mapped until :meth:`let_go`; return False if the mapping is retired."""
        with self._lock:
            if self._retired:
                return False
            self._held += 1
            return True

    def let_go(self) -> None:
        """Undo one :meth:`hold`."""
        with self._lock:
            self._held -= 1
            last = self._retired and not self._held
        if last:
            self._close_soon(self._mapping.close)

    def retire(self) -> None:
        """Close the mapping once nothing holds it. Idempotent."""
        with self._lock:
            again, self._retired = self._retired, True
            unused = not again and not self._held
        if unused:
            self._close_soon(self._mapping.close)

    def close(self) -> None:
        """Retire the mapping; see :meth:`retire`."""
        self.retire()
