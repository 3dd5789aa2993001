"""Send requests to the exchanges of peers; :class:`Exchange` has the handlers.

An owner releases the blocks that it has read. A producer that is short of room, or about to leave, asks
owners to copy the shards that they would read in place, and at the end of a run to release its shards.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.exchange.outgoing import ROOM_RETRY_INTERVAL_S, Outbox
from dask_gpurt.exchange.paths import Endpoint
from dask_gpurt.exchange.shard import ExchangeClosed, Peer, PeerLost, RunKey
from dask_gpurt.memory.waits import WaitLine
from dask_gpurt.protocol import DRAIN_HANDLER, FORGET_HANDLER, RELEASE_HANDLER

if TYPE_CHECKING:
    from dask_gpurt.exchange.exchange import Exchange

logger = logging.getLogger(__name__)

#: Seconds until a release, or the end of a run, is sent again to a peer that has failed to handle it but has
#: not left.
PEER_RETRY_INTERVAL_S = 1.0


class PeerRequests:
    """Send requests to peers, with retries until they succeed or have become pointless.

    ``here``: handles the same requests on this worker, where no call is needed.
    """

    def __init__(self, endpoint: Endpoint, here: Exchange):
        self._end = endpoint
        self._here = here
        #: Releases to be sent, by pool; a key exists while a task is sending its releases.
        self._released: dict[tuple[Peer, str], list[tuple[int, int]]] = {}
        #: Runs to be evacuated, woken whenever a peer releases shards of this worker.
        self._evacuating: WaitLine[RunKey] = WaitLine("peers to release shards", endpoint.metrics.lines)
        #: The owners that are being asked for room.
        self._draining: set[str] = set()

    # ---- from an owner to the producers of its shards --------------------------------

    def release_soon(self, producer: Peer, kind: str, shard: int, share: int) -> None:
        """Release a shard at its producer, batched with other releases. From any thread."""
        self._end.worker.loop.add_callback(self._note_release, producer, kind, shard, share)

    async def _note_release(self, producer: Peer, kind: str, shard: int, share: int) -> None:
        to = (producer, kind)
        if to in self._released:  # a task is sending already, and takes it along
            self._released[to].append((shard, share))
            return
        self._released[to] = [(shard, share)]
        try:
            await asyncio.sleep(0)  # batch the releases of this turn of the loop
            while shards := self._released[to]:
                self._released[to] = []
                await self._send_release(producer, kind, shards)
        finally:
            del self._released[to]

    async def _send_release(self, producer: Peer, kind: str, shards: list[tuple[int, int]]) -> None:
        if producer == self._end.me:
            if not self._here.closed:
                self._here.release(kind=kind, shards=shards, to=producer.incarnation)
            return
        message = {"kind": kind, "shards": shards, "to": producer.incarnation}
        # Retry until the release has arrived or the producer has left: after a lost release, a producer would
        # wait for room forever. When this exchange closes, either those of producers close too, or producers
        # are told that this worker leaves.
        while not self._here.closed and not await self._has_taken(producer.address, message):
            await asyncio.sleep(PEER_RETRY_INTERVAL_S)

    async def _has_taken(self, producer: str, message: dict[str, Any]) -> bool:
        """Send a release to a producer; return False if it has to be repeated."""
        try:
            await self._end.calls.call(producer, RELEASE_HANDLER, check=self._check_open, **message)
        except ExchangeClosed:
            pass
        except PeerLost:
            return await self._end.calls.has_left(producer)
        except Exception as error:
            me = self._end.me.address
            logger.warning("worker %s failed to handle a release from %s: %r", producer, me, error)
            return False
        return True

    def _check_open(self) -> None:
        if self._here.closed:
            raise ExchangeClosed(f"the exchange of {self._end.me.address} is closed")

    # ---- from a producer to the owners of its shards ---------------------------------

    def ask_for_room(self, owners: set[str]) -> None:
        """Ask owners to copy the shards that they would read in place. From any thread."""
        self._end.worker.loop.add_callback(self._send_drain, owners)

    async def _send_drain(self, owners: set[str]) -> None:
        await asyncio.gather(*map(self._send_drain_to, owners))

    async def _send_drain_to(self, owner: str) -> None:
        if owner in self._draining:  # it is silent: further requests would only take connections
            return
        self._draining.add(owner)
        try:
            # Best effort: the request is repeated while room is short.
            with contextlib.suppress(OSError, PeerLost, ExchangeClosed):
                await self._drain(owner)
        finally:
            self._draining.discard(owner)

    async def _drain(self, owner: str) -> None:
        me = list(self._end.me)
        if owner == self._end.me.address:
            self._here.drain(producer=me)
        else:
            await self._end.calls.once(owner, DRAIN_HANDLER, check=self._check_open, producer=me)

    def note_released(self) -> None:
        """Note that a peer has released shards of this worker."""
        self._evacuating.wake()

    async def evacuate(self, run: RunKey) -> None:
        """Ask owners to copy the published shards of a run; return once no other worker may read any."""
        me = self._end.me.address

        async def is_read() -> bool:
            return not self._end.pools.unread(run, me)

        while owners := {each.owner for _, each in self._end.pools.readings(run)} - {me}:
            await self._send_drain(owners)
            with contextlib.suppress(TimeoutError):  # ask again: more may have been offered since
                async with asyncio.timeout(ROOM_RETRY_INTERVAL_S):
                    await self._evacuating.reserve_or_wait_async(run, is_read)

    async def withdraw(self, run: RunKey) -> None:
        """Free the published blocks of a run, once no owner reads them any more."""
        # Loop, since a transfer in progress may have published more in the meantime.
        while published := {(outbox, each.owner) for outbox, each in self._end.pools.readings(run)}:
            await asyncio.gather(*(self._withdraw_from(owner, run, outbox) for outbox, owner in published))

    async def _withdraw_from(self, owner: str, run: RunKey, outbox: Outbox) -> None:
        while not (await self._has_let_go(owner, run) or self._here.closed):
            await asyncio.sleep(PEER_RETRY_INTERVAL_S)
        outbox.drop(run, owner)

    async def _has_let_go(self, owner: str, run: RunKey) -> bool:
        """Ask an owner to release a run's shards, and wait until it has; return False to retry."""
        if owner == self._end.me.address:
            await self._here.forget(producer=list(self._end.me), run=list(run))
            return True
        message: dict[str, Any] = {"producer": list(self._end.me), "run": list(run)}
        try:
            await self._end.calls.once(owner, FORGET_HANDLER, check=self._check_open, **message)
        except PeerLost:
            pass
        except OSError:
            return await self._end.calls.has_left(owner)
        except ExchangeClosed:
            raise
        except Exception as error:
            me = self._end.me.address
            logger.warning("worker %s failed to release run %s of %s: %r", owner, run, me, error)
            return False
        return True
