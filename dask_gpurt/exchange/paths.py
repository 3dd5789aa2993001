"""Choose the path of shards between two workers, and keep mapped pools open.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dask_gpurt.device import Device, Mapping, MappingError
from dask_gpurt.device.pool import Buffer, Ticket
from dask_gpurt.topology import Link

COMMS = "comms"
LOCAL = "local"
THROUGH_HOST = "through-host"


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
    staging
        The peer's pool in host memory, into which it copies shards on request.
    """

    name: str
    mapping: Mapping | None
    in_place: bool
    reason: str | None = None
    staging: Mapping | None = None

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


def choose(
    device: Device | None,
    ticket: Ticket | None,
    allowed: frozenset[str],
    link: Link | None = None,
    staging: Mapping | None = None,
) -> Path:
    """Return the best path from a peer's pool that is possible. Blocks while mapping.

    Parameters
    ----------
    device
        This worker's device of the kind of the pool; None if it has none.
    ticket
        The ticket of the peer's pool; None if it has none.
    allowed
        The setting ``gpurt.exchange.paths``.
    link
        The class of link between the two workers; None if unknown.
    staging
        The peer's pool in host memory, if this worker maps it.
    """
    if device is None or ticket is None:
        return Path(COMMS, None, False, "one of the two workers has no such device")
    name = device.shared_path
    if name in allowed:
        try:
            mapping = device.map(ticket)
        except MappingError as error:
            reason = str(error)
        else:
            return Path(name, mapping, device.reads_in_place or link is Link.SAME_DEVICE)
    else:
        reason = f"gpurt.exchange.paths excludes {name}"
    if staging is not None and not device.on_host:
        return Path(THROUGH_HOST, None, False, reason, staging)
    return Path(COMMS, None, False, reason)


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
