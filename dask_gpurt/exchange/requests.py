"""Send requests to the exchanges of peers; each :class:`Exchange` has the handlers.

An owner tells producers which blocks it has read. A producer that is short of room has owners copy the shards
that they would read in place; at the end of a run it has them let go of its shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from dask_gpurt.exchange.endpoint import Endpoint
from dask_gpurt.exchange.outgoing import Outbox
from dask_gpurt.exchange.shard import ExchangeClosed, Peer, PeerLost, RunKey

logger = logging.getLogger(__name__)

#: Seconds until a peer that could not be reached, or has failed to answer, but has not left, is asked again
#: to let a run go, or told again of a release.
PEER_RETRY_INTERVAL_S = 1.0


class Handlers(Protocol):
    """Answer the same requests on this worker, where a call is not needed."""

    closed: bool

    def release(self, kind: str, shards: Sequence[Sequence[int]], to: str) -> None: ...

    def drain(self, producer: list[str]) -> None: ...

    async def forget(self, producer: list[str], run: list[Any]) -> None: ...


class PeerRequests:
    """Send requests to peers until they have arrived or are of no use any more.

    Parameters
    ----------
    here
        The handlers of this worker, which may be its own peer.
    """

    def __init__(self, endpoint: Endpoint, here: Handlers):
        self._end = endpoint
        self._here = here
        #: Releases that are on their way or still to be sent.
        self._released: dict[tuple[Peer, str], list[tuple[int, int]]] = {}

    # ---- of an owner, to the producers of its shards ---------------------------------

    def release_soon(self, producer: Peer, kind: str, shard: int, share: int) -> None:
        """Tell a producer, with others, that a block of its pool is free. From any thread."""
        self._end.worker.loop.add_callback(self._note_release, producer, kind, shard, share)

    async def _note_release(self, producer: Peer, kind: str, shard: int, share: int) -> None:
        to = (producer, kind)
        if to in self._released:  # which are sent by the one that came first
            self._released[to].append((shard, share))
            return
        self._released[to] = [(shard, share)]
        try:
            await asyncio.sleep(0)  # what else is released in this turn goes along
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
        # Until it has arrived, or the pool is gone with the producer: one that waits for room would wait for
        # ever for what got lost. Once this exchange is closed, so are the producers', or else they hear that
        # this worker leaves.
        while not self._here.closed and not await self._has_taken(producer.address, message):
            await asyncio.sleep(PEER_RETRY_INTERVAL_S)

    async def _has_taken(self, producer: str, message: dict[str, Any]) -> bool:
        """Tell a producer of a release; return False if that has to be repeated."""
        try:
            await self._end.calls.call(producer, "gpurt_release", check=self._check_open, **message)
        except ExchangeClosed:
            pass
        except PeerLost:
            return await self._end.calls.has_left(producer)
        except Exception as error:
            me = self._end.me.address
            logger.warning("worker %s has not taken a release of %s: %r", producer, me, error)
            return False
        return True

    def _check_open(self) -> None:
        if self._here.closed:
            raise ExchangeClosed(f"the exchange of {self._end.me.address} is closed")

    # ---- of a producer, to the owners of its shards ----------------------------------

    def ask_for_room(self, owners: set[str]) -> None:
        """Ask owners to copy the shards that they would read in place. From any thread."""
        self._end.worker.loop.add_callback(self._send_drain, owners)

    async def _send_drain(self, owners: set[str]) -> None:
        await asyncio.gather(*map(self._send_drain_to, owners))

    async def _send_drain_to(self, owner: str) -> None:
        if owner == self._end.me.address:
            self._here.drain(producer=list(self._end.me))
            return
        me = list(self._end.me)
        # The owner is asked again soon, for as long as room is short.
        with contextlib.suppress(OSError, PeerLost, ExchangeClosed):
            await self._end.calls.once(owner, "gpurt_drain", check=self._check_open, producer=me)

    async def withdraw(self, run: RunKey) -> None:
        """Free what a run has published, once no owner reads it any more."""
        # An owner that was asking may have had more staged meanwhile.
        while published := self._end.pools.owners(run):
            await asyncio.gather(*(self._withdraw_from(owner, run, outbox) for outbox, owner in published))

    async def _withdraw_from(self, owner: str, run: RunKey, outbox: Outbox) -> None:
        while not (await self._has_let_go(owner, run) or self._here.closed):
            await asyncio.sleep(PEER_RETRY_INTERVAL_S)
        outbox.drop(run, owner)

    async def _has_let_go(self, owner: str, run: RunKey) -> bool:
        """Ask an owner to let go, and wait until it has; return False if it could not be asked."""
        if owner == self._end.me.address:
            await self._here.forget(producer=list(self._end.me), run=list(run))
            return True
        message = {"producer": list(self._end.me), "run": list(run)}
        try:
            await self._end.calls.once(owner, "gpurt_forget", check=self._check_open, **message)
        except PeerLost:
            pass
        except OSError:
            return await self._end.calls.has_left(owner)
        except ExchangeClosed:
            raise
        except Exception as error:
            me = self._end.me.address
            logger.warning("worker %s has not let go of %s of %s: %r", owner, run, me, error)
            return False
        return True
