"""Have former owners release shares that have been replaced, so that no block waits for them.

A block of a producer's pool is freed once the owner of its share has released it. An owner from which the
outputs have moved does so when it is asked, even if it never received an offer for the share.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import call_soon
from dask_gpurt.exchange import Exchange
from dask_gpurt.exchange.calls import LONGEST_PAUSE_S
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.shuffle.messages import GONE, Retire


class RetiredShares:
    """Ask former owners to release the shares that this worker has published. On the event loop.

    Parameters
    ----------
    keeps
        Returns whether a share is still valid.
    deliver
        Sends a message to an owner; raises one of ``GONE`` if the owner is unreachable.
    is_open
        Returns whether the run has neither failed nor been closed.
    failed
        Called with any other error.

    Attributes
    ----------
    asked
        Shares that their former owners are being asked to release.
    """

    def __init__(
        self,
        run: RunKey,
        worker: WorkerServer,
        exchange: Exchange,
        keeps: Callable[[int], bool],
        deliver: Callable[[str, Retire], Awaitable[object]],
        is_open: Callable[[], bool],
        failed: Callable[[Exception], None],
    ):
        self.asked: set[int] = set()
        self._run = run
        self._worker = worker
        self._exchange = exchange
        self._keeps = keeps
        self._deliver = deliver
        self._is_open = is_open
        self._failed = failed

    def ask_all(self) -> None:
        """Begin to ask for all published shares that have been replaced."""
        retired = defaultdict[str, set[int]](set)
        for share, owner in self._exchange.pools.shares(self._run).items():
            if not self._keeps(share) and share not in self.asked:
                retired[owner].add(share)
        for owner, shares in retired.items():
            self.asked |= shares
            call_soon(self._worker, self.ask, owner, frozenset(shares))

    async def ask(self, owner: str, shares: frozenset[int]) -> None:
        """Ask a former owner to release shares, even if it never received an offer for them."""
        try:
            while self._is_open():
                try:
                    await self._deliver(owner, Retire(shares))
                except GONE:  # it is leaving, or its run has ended and ours is about to
                    if not await self._exchange.calls.has_left(owner):
                        await asyncio.sleep(LONGEST_PAUSE_S)
                        continue
                self._exchange.pools.drop_shares(self._run, shares)
                return
        except Exception as error:  # otherwise these blocks would fill the pool
            self._failed(error)
        finally:
            self.asked -= shares
