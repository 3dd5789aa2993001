"""Send offers of shards to their owners, batched: at most one message to each owner is in flight."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

from dask_gpurt.exchange import Commit, Shard
from dask_gpurt.shuffle.messages import GONE


class Offers:
    """Queue offers by owner, and deliver them. On the event loop.

    Parameters
    ----------
    deliver
        Sends a message to an owner; raises one of ``GONE`` if the owner is unreachable.
    unreachable
        Called with the owner and the error in that case, to reassign its outputs; raises if the run is over.
    keeps
        Returns whether a share is still valid.
    failed
        Called with any other error.
    """

    def __init__(
        self,
        deliver: Callable[[str, list[Shard | Commit]], Awaitable[object]],
        unreachable: Callable[[str, Exception], Awaitable[None]],
        keeps: Callable[[int], bool],
        failed: Callable[[Exception], None],
    ):
        self._deliver = deliver
        self._unreachable = unreachable
        self._keeps = keeps
        self._failed = failed
        self._queued: defaultdict[str, list[Shard | Commit]] = defaultdict(list)
        self._senders: dict[str, asyncio.Task[None]] = {}
        #: The number of callers that wait for all offers to be delivered.
        self._waiting = 0

    def add(self, owner: str, offer: Shard | Commit) -> None:
        """Queue an offer, and start sending unless a message to that owner is in flight."""
        self._queued[owner].append(offer)
        if not self.is_sending(owner):
            self._senders[owner] = asyncio.create_task(self._send(owner))

    async def _send(self, owner: str) -> None:
        try:
            while offers := self._queued.pop(owner, None):
                try:
                    await self._deliver(owner, offers)
                except GONE as error:
                    await self._unreachable(owner, error)
                    # `Sender.renew` offers moved outputs to their new owners. The rest is retried here.
                    self._queued[owner][:0] = [offer for offer in offers if self._keeps(offer.share)]
        except Exception as error:
            self._failed(error)

    async def sent(self) -> None:
        """Wait until all queued offers have been delivered."""
        self._waiting += 1
        try:
            while pending := [sender for sender in self._senders.values() if not sender.done()]:
                await asyncio.wait(pending)
        finally:
            self._waiting -= 1

    def is_sending(self, owner: str) -> bool:
        """Return whether offers to an owner have yet to be delivered."""
        sender = self._senders.get(owner)
        return sender is not None and not sender.done()

    @property
    def are_awaited(self) -> bool:
        """Return whether something waits for the offers to be delivered, as the barrier does."""
        return self._waiting > 0

    def cancel(self) -> None:
        """Stop sending."""
        for sender in self._senders.values():
            sender.cancel()
