"""Find the path from each peer's pools to this worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from dask_gpurt._version import __version__
from dask_gpurt.exchange import paths
from dask_gpurt.exchange.endpoint import Endpoint
from dask_gpurt.exchange.paths import HeldMapping, Path
from dask_gpurt.exchange.shard import Peer, PeerError, PeerLost
from dask_gpurt.observe import Fallback
from dask_gpurt.protocol import TICKET_HANDLER


class Peers:
    """Hold the paths by peer and kind of device. On the event loop.

    A path belongs to one incarnation of a peer: after a restart at the same address, the pool is a new one.

    Parameters
    ----------
    allowed
        The setting ``gpurt.exchange.paths``.
    close_soon
        Closes a mapping in a thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        allowed: frozenset[str],
        close_soon: Callable[[Callable[[], None]], None],
    ):
        self._end = endpoint
        self._allowed = allowed
        self._close_soon = close_soon
        self._found: dict[tuple[Peer, str], asyncio.Task[Path]] = {}
        self._closed = False

    async def path(self, peer: Peer, kind: str) -> Path:
        """Return the path from a peer's pool.

        Raises
        ------
        PeerLost
            If that incarnation of the peer has left or was replaced.
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
            return Path(paths.LOCAL, outbox.pool, True)
        reply = await self._ticket(peer.address, kind, peer.incarnation)
        device, ticket = self._end.pools.devices.get(kind), reply["ticket"]
        link = staging = None
        if device is not None and not device.on_host:  # else read in place, or through comms
            link = await self._end.links.learn(peer.address)
            staging = (await self.path(peer, "host")).mapping
        found: Path = await self._end.offload(paths.choose, device, ticket, self._allowed, link, staging)
        found = self._held(found)
        if self._closed:  # `close` ran while this was being mapped, and did not retire it
            await asyncio.to_thread(_retire_mappings, found)
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
            ways = {
                paths.COMMS: Fallback.EXCHANGE_COMMS,
                paths.THROUGH_HOST: Fallback.EXCHANGE_THROUGH_HOST,
            }
            self._end.metrics.fallback(ways[path.name], path.reason)

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

    def __iter__(self) -> Iterator[str]:
        """Yield the addresses of connected peers."""
        return iter({peer.address for peer, _ in self._found} - {self._end.me.address})

    def forget(self, gone: Collection[str]) -> None:
        """Forget peers that have left; their mapped pools are closed once nothing reads them."""
        for key in [key for key in self._found if key[0].address in gone and key[0] != self._end.me]:
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
        _retire_mappings(path)


def _retire_mappings(path: Path) -> None:
    for mapping in path.mappings:
        mapping.retire()


def _never() -> None:
    """Never cancel a call: later runs need the mapping too."""


def _result(task: asyncio.Task[Path]) -> Path | None:
    """Return the path found by a task; None if it is not done or has failed."""
    return task.result() if task.done() and not task.cancelled() and not task.exception() else None
