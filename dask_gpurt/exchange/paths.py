"""Find the path from each peer's pools to this worker, and keep mapped pools open.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dask_gpurt._version import __version__
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.device import Device, Mapping, MappingError
from dask_gpurt.device.pool import Buffer, Ticket
from dask_gpurt.exchange.calls import Calls
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.exchange.shard import Peer, PeerError, PeerLost
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import TICKET_HANDLER

COMMS = "comms"
LOCAL = "local"


@dataclass(frozen=True)
class Path:
    """Describe a path along which shards of a peer are read.

    ``name``: "local", "shared-memory", "cuda-ipc" or "comms".
    ``mapping``: the peer's pool; None if its bytes come through a comm.
    ``in_place``: whether shards are read in the peer's pool, without a copy.
    ``reason``: why a better path is not possible.
    """

    name: str
    mapping: Mapping | None
    in_place: bool
    reason: str | None = None

    def describe(self) -> dict[str, Any]:
        return {"path": self.name, "reason": self.reason}

    def hold(self) -> bool:
        """Keep its mapping open until :meth:`let_go`; return False if the peer has left."""
        return self.mapping.hold() if isinstance(self.mapping, HeldMapping) else True

    def let_go(self) -> None:
        """Undo one :meth:`hold`."""
        if isinstance(self.mapping, HeldMapping):
            self.mapping.let_go()


def choose(
    device: Device | None,
    ticket: Ticket | None,
    allowed: frozenset[str],
) -> Path:
    """Return the best path from a peer's pool that is possible. Blocks while mapping.

    ``device``: this worker's device of the kind of the pool; None if it has none.
    ``ticket``: the ticket of the peer's pool; None if it has none.
    ``allowed``: the setting ``gpurt.exchange.paths``.
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
            return Path(name, mapping, device.reads_in_place or device.is_same(ticket))
    else:
        reason = f"gpurt.exchange.paths excludes {name}"
    return Path(COMMS, None, False, reason)


class HeldMapping:
    """Keep a peer's pool mapped for as long as a shard in it is held. Thread-safe.

    When a peer leaves, its mapping is retired, possibly while a pull is in flight:

    - If shards hold the mapping when the event loop retires it, it is closed with the last ``let_go``.
    - If the mapping is not retired at the last ``let_go``, it stays open for the next shard.
    - If a late message offers a shard after the mapping was retired, ``hold`` fails and the shard is refused.

    ``close_soon``: closes the mapping in a thread, where that may block.
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


class PeerClass(StrEnum):
    """Classify peers by distance: the label ``peer`` of metrics."""

    SAME_WORKER = "same-worker"
    SAME_HOST = "same-host"
    OTHER_HOST = "other-host"


def _without_port(address: str) -> str:
    """Return the protocol and the host of an address; for inproc addresses only the protocol."""
    return address.rpartition(":")[0]


def peer_class(me: str, peer: str) -> PeerClass:
    """Return the class of a peer as seen from this worker, by their addresses."""
    if peer == me:
        return PeerClass.SAME_WORKER
    return PeerClass.SAME_HOST if _without_port(peer) == _without_port(me) else PeerClass.OTHER_HOST


# ---- the paths to all peers --------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """Hold the shared components of a worker's exchange."""

    me: Peer
    worker: WorkerServer
    pools: Pools
    calls: Calls
    metrics: Metrics
    offload: Callable[..., Awaitable[Any]]


class Peers:
    """Hold the paths by peer and kind of device. On the event loop.

    A path belongs to one incarnation of a peer: after a restart at the same address, the pool is a new one.

    ``allowed``: the setting ``gpurt.exchange.paths``.
    ``close_soon``: closes a mapping in a thread.
    """

    def __init__(
        self, endpoint: Endpoint, allowed: frozenset[str], close_soon: Callable[[Callable[[], None]], None]
    ):
        self._end = endpoint
        self._allowed = allowed
        self._close_soon = close_soon
        self._found: dict[tuple[Peer, str], asyncio.Task[Path]] = {}
        self._closed = False

    async def path(self, peer: Peer, kind: str) -> Path:
        """Return the path from a peer's pool.

        Raises PeerLost if that incarnation of the peer has left or was replaced.
        """
        task = self._found.get((peer, kind))
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._found[peer, kind] = asyncio.create_task(self._connect(peer, kind))
        try:
            return await asyncio.shield(task)
        except PeerLost:
            self._found.pop((peer, kind), None)  # an incarnation never comes back
            raise

    async def _connect(self, peer: Peer, kind: str) -> Path:
        if peer == self._end.me:
            outbox = await self._end.offload(self._end.pools.outbox, kind)
            return Path(LOCAL, outbox.pool, True)
        reply = await self._ticket(peer.address, kind, peer.incarnation)
        device, ticket = self._end.pools.devices.get(kind), reply["ticket"]
        found: Path = await self._end.offload(choose, device, ticket, self._allowed)
        found = self._held(found)
        if self._closed:  # `close` ran while this was being mapped, and did not retire it
            await asyncio.to_thread(_retire_mapping, found)
            raise PeerError(f"the exchange of {self._end.me.address} is closed")
        self._note(found)
        return found

    async def _ticket(self, address: str, kind: str, incarnation: str | None) -> dict[str, Any]:
        """Request the ticket of a worker's pool: of one incarnation, or of the current one for None."""
        reply: dict[str, Any] | None = await self._end.calls.call(
            address, TICKET_HANDLER, check=_never, kind=kind, to=incarnation
        )
        if reply is None:  # Dask's reply to an unknown operation
            raise PeerError(
                f"the runtime is not on at worker {address}: call dask_gpurt.enable(client) again"
            )
        if reply["version"] != __version__:
            raise PeerError(
                f"worker {address} runs dask_gpurt {reply['version']}, worker {self._end.me.address} runs "
                f"{__version__}: install the same version everywhere"
            )
        if incarnation not in (None, reply["incarnation"]):
            raise PeerLost(f"worker {address} was replaced by another one at the same address")
        return reply

    def _held(self, path: Path) -> Path:
        """Wrap the mapping of a path, so that it is closed once nothing holds it."""
        if path.mapping is None:
            return path
        return replace(path, mapping=HeldMapping(path.mapping, self._close_soon))

    def _note(self, path: Path) -> None:
        """Count a fallback if a better path was not possible."""
        if path.reason is not None:
            self._end.metrics.fallback(Fallback.EXCHANGE_COMMS, path.reason)

    async def connect_all(self) -> None:
        """Find the paths from all workers of the cluster."""
        identity = await self._end.worker.scheduler.identity(n_workers=-1)
        connecting = (self._connect_to(address) for address in identity["workers"])
        await asyncio.gather(*connecting, return_exceptions=True)

    async def _connect_to(self, address: str) -> None:
        """Find the paths from the current worker at an address."""
        if address == self._end.me.address:
            peer = self._end.me
        else:
            peer = Peer(address, (await self._ticket(address, "host", None))["incarnation"])
        await asyncio.gather(*(self.path(peer, kind) for kind in self._end.pools.devices))

    def describe(self, kind: str) -> dict[str, dict[str, Any]]:
        """Describe the path from each peer whose pool of a kind is known."""
        return {
            peer.address: {"device": kind, **path.describe()}
            for (peer, of), task in self._found.items()
            if of == kind and (path := _result(task)) is not None
        }

    # ---- life ------------------------------------------------------------------------

    def forget(self, gone: str) -> None:
        """Forget the peers at an address; their mapped pools are closed once nothing reads them."""
        for key in [key for key in self._found if key[0].address == gone and key[0] != self._end.me]:
            task = self._found.pop(key)
            task.add_done_callback(_retire)  # immediately, or once mapping has finished

    def close(self) -> None:
        """Retire all mappings."""
        self._closed = True
        for task in self._found.values():
            _retire(task)
        self._found.clear()


def _retire(task: asyncio.Task[Path]) -> None:
    if (path := _result(task)) is not None:
        _retire_mapping(path)


def _retire_mapping(path: Path) -> None:
    if isinstance(path.mapping, HeldMapping):
        path.mapping.retire()


def _never() -> None:
    """Never cancel a call: later runs need the mapping too."""


def _result(task: asyncio.Task[Path]) -> Path | None:
    """Return the path found by a task; None if it is not done or has failed."""
    return task.result() if task.done() and not task.cancelled() and not task.exception() else None
