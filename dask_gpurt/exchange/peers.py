"""The paths from the pools of peers to this worker: found out once for each, chosen for each shard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any

from dask_gpurt._version import __version__
from dask_gpurt.exchange import paths
from dask_gpurt.exchange.links import Links
from dask_gpurt.exchange.paths import Between, Path
from dask_gpurt.exchange.pools import Pools
from dask_gpurt.exchange.shard import PeerError
from dask_gpurt.observe import Metrics

#: Bytes of a shard as they are on GPUs, for which a path is described.
USUAL = 2**24


class Peers:
    """Paths by peer and kind of device. On the event loop.

    Parameters
    ----------
    worker
        The Dask worker.
    allowed
        The setting ``gpurt.exchange.paths``.
    offload
        Runs what blocks on a thread.
    """

    def __init__(
        self,
        worker: Any,
        pools: Pools,
        links: Links,
        allowed: frozenset[str],
        metrics: Metrics,
        offload: Callable[..., Awaitable[Any]],
    ):
        self._worker = worker
        self._pools = pools
        self._links = links
        self._allowed = allowed
        self._metrics = metrics
        self._offload = offload
        self._found: dict[tuple[str, str], asyncio.Task[tuple[Path, ...]]] = {}

    async def path(self, peer: str, kind: str, nbytes: int) -> Path:
        """The path by which a shard of a peer's pool is there first."""
        return paths.least(await self._possible(peer, kind), nbytes, self._links.speed_from(peer))

    async def _possible(self, peer: str, kind: str) -> tuple[Path, ...]:
        task = self._found.get((peer, kind))
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._found[peer, kind] = asyncio.create_task(self._connect(peer, kind))
        return await asyncio.shield(task)

    async def _connect(self, peer: str, kind: str) -> tuple[Path, ...]:
        if peer == self._worker.address:
            outbox = await self._offload(self._pools.outbox, kind)
            return (Path(paths.LOCAL, outbox.pool, True),)
        reply = await self._worker.rpc(peer).gpurt_ticket(kind=kind)
        if reply is None:  # Dask's answer to an operation that it does not know
            raise PeerError(f"the runtime is not on at worker {peer}: call dask_gpurt.enable(client) again")
        if reply["version"] != __version__:
            raise PeerError(
                f"worker {peer} runs dask_gpurt {reply['version']}, worker {self._worker.address} runs "
                f"{__version__}: install the same version everywhere"
            )
        between = await self._between(peer, kind)
        found: tuple[Path, ...] = await self._offload(
            paths.possible, self._pools.devices.get(kind), reply["ticket"], self._allowed, between
        )
        self._note(paths.least(found, USUAL, self._links.speed_from(peer)))
        return found

    async def _between(self, peer: str, kind: str) -> Between:
        device = self._pools.devices.get(kind)
        if device is None or device.on_host:
            return Between()  # the one path without a copy, or else comms
        known = await self._links.learn(peer)
        by_host = await self._possible(peer, "host")
        return Between(
            known and known.link,
            next((path.mapping for path in by_host if path.mapping is not None), None),
            device.carried_by(str(self._worker.address).partition("://")[0]),
        )

    def _note(self, path: Path) -> None:
        """Count that a path is not the best that there could be."""
        if path.reason is not None:
            ways = {paths.COMMS: "Dask's comms", paths.THROUGH_HOST: "the way through host memory"}
            self._metrics.fallback(f"bytes take {ways[path.name]}", path.reason)

    async def connect_all(self) -> None:
        """Find out the paths to all workers of the cluster."""
        identity = await self._worker.scheduler.identity(n_workers=-1)
        ways = [(peer, kind) for peer in identity["workers"] for kind in self._pools.devices]
        await asyncio.gather(*(self._possible(*way) for way in ways), return_exceptions=True)

    def describe(self, kind: str) -> dict[str, dict[str, Any]]:
        """The path of a usual shard from each peer whose pool of a kind is known."""
        return {
            peer: {
                "device": kind,
                **paths.least(_result(task), USUAL, self._links.speed_from(peer)).describe(),
            }
            for (peer, of), task in self._found.items()
            if of == kind and _result(task)
        }

    # ---- life ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[str]:
        """The peers that paths were found to."""
        return iter({peer for peer, _ in self._found} - {self._worker.address})

    def forget(self, gone: Collection[str]) -> list[Path]:
        """These have left; returns the paths that are to be closed."""
        left = [self._found.pop(key) for key in list(self._found) if key[0] in gone]
        return [path for task in left for path in _result(task)]

    def close(self) -> None:
        """Close all mappings. Blocks."""
        close(path for task in self._found.values() for path in _result(task))


def close(unused: Iterable[Path]) -> None:
    """Close the mappings of paths that nobody takes any more. Blocks."""
    for path in unused:
        if path.mapping is not None:
            path.mapping.close()


def _result(task: asyncio.Task[tuple[Path, ...]]) -> tuple[Path, ...]:
    """The paths that were found, none if that failed."""
    return task.result() if task.done() and not task.cancelled() and not task.exception() else ()
