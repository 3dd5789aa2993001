"""Offer shards to their owners, and have former owners release shares that have been replaced.

Offers are batched: at most one message to each owner is in flight.

A block of a producer's pool is freed once the owner of its share has released it. An owner from which the
outputs have moved does so when it is asked, even if it never received an offer for the share.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence

from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import call_soon
from dask_gpurt.exchange import Commit, Exchange, Shard
from dask_gpurt.exchange.calls import LONGEST_PAUSE_S
from dask_gpurt.exchange.shard import RunKey
from dask_gpurt.shuffle.messages import GONE, Retire, RunInterrupted, Seal, Stale, Transferred
from dask_gpurt.shuffle.owners import Owners


class Offers:
    """Queue offers by owner, and deliver them. On the event loop.

    ``deliver``: sends a message to an owner; raises one of ``GONE`` if the owner is unreachable.
    ``unreachable``: called with the owner and the error in that case, to reassign its outputs; raises if the
    run is over.
    ``keeps``: returns whether a share is still valid.
    ``failed``: called with any other error.
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
        if (sender := self._senders.get(owner)) is None or sender.done():
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

    @property
    def are_awaited(self) -> bool:
        """Return whether something waits for the offers to be delivered, as the barrier does."""
        return self._waiting > 0

    def cancel(self) -> None:
        """Stop sending."""
        for sender in self._senders.values():
            sender.cancel()


class RetiredShares:
    """Ask former owners to release the shares that this worker has published. On the event loop.

    ``keeps``: returns whether a share is still valid.
    ``deliver``: sends a message to an owner; raises one of ``GONE`` if the owner is unreachable.
    ``is_open``: returns whether the run has neither failed nor been closed.
    ``failed``: called with any other error.
    ``asked``: shares that their former owners are being asked to release.
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
        for _, each in self._exchange.pools.readings(self._run):
            if not self._keeps(each.share) and each.share not in self.asked:
                retired[each.owner].add(each.share)
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


# ---- seals, of a run at its barrier ------------------------------------------------------------------
#
# The worker that runs the barrier sends a :class:`~dask_gpurt.shuffle.messages.Seal` to all owners and
# producers. docs/design/exactly-once.md describes what each of them does with it.


class Sealing:
    """Seal the shares of a run, and report inputs that are missing. On the event loop.

    ``owners``: returns the current owners of the run, as far as this worker knows.
    ``deliver``: sends a seal to a worker; returns the inputs it is missing. Raises one of ``GONE`` if the
    worker is unreachable.
    ``recover``: asks the scheduler to recover from a loss; takes the reason and the arguments of its handler.
    ``catch_up``: fetches the current owners.
    ``check``: raises if the run is over.
    """

    def __init__(
        self,
        run: object,
        exchange: Exchange,
        owners: Callable[[], Owners],
        deliver: Callable[[str, Seal], Awaitable[Sequence[int]]],
        recover: Callable[..., Awaitable[None]],
        catch_up: Callable[[], Awaitable[None]],
        check: Callable[[], None],
    ):
        self._run = run
        self.exchange = exchange
        self._owners = owners
        self._deliver = deliver
        self._recover = recover
        self._catch_up = catch_up
        self._check = check

    async def seal(self, results: Sequence[Transferred]) -> int:
        """Seal all shares; return the epoch in which they are sealed.

        ``results``: the successful attempt at each input.
        Raises RunInterrupted when shards are missing or the owners have changed: the barrier has to run
        again, after the missing inputs have been transferred again.
        """
        epoch = self._owners().epoch
        try:
            missing = await self.seal_all(results, epoch)
        except (Stale, P2PConsistencyError) as error:
            raise RunInterrupted(str(error)) from error
        if missing:
            self.exchange.metrics.add("shuffle.inputs.missing", len(missing))
            lost = [result for result in results if result.source in missing]
            await self._recover(
                inputs_lost(missing),
                inputs=[result.key for result in lost],
                producers=sorted({result.producer for result in lost}),
            )
            raise RunInterrupted(f"inputs {sorted(missing)} are transferred again")
        return epoch

    async def seal_all(self, results: Sequence[Transferred], epoch: int) -> set[int]:
        """Make producers deliver their offers and owners seal; return the missing inputs.

        Both happen in one round, so an owner may seal before the last offers to it arrive, and report them as
        missing. Once all workers have replied, everything has been delivered: such owners get a second round.
        """
        seal = Seal({result.source: result.attempt for result in results})
        owners = {share.owner for share in self._owners().open_shares()}
        producers = {result.producer for result in results}
        missing = await self._round(seal, owners | producers, owners, epoch)
        if missing:
            missing = await self._round(seal, missing.keys(), owners, epoch)
        return {source for sources in missing.values() for source in sources}

    async def _round(
        self, seal: Seal, workers: Collection[str], owners: Collection[str], epoch: int
    ) -> dict[str, Sequence[int]]:
        """Send a seal to workers; return the incomplete inputs by owner.

        Raises Stale if the owners have changed since the barrier began: some inputs are then transferred
        again, and an owner must not seal, or report as missing, the attempts that this barrier knows.
        """
        self.raise_if_moved(epoch)
        workers = sorted(workers)
        answers = await asyncio.gather(
            *(self._deliver(worker, seal) for worker in workers), return_exceptions=True
        )
        self.raise_if_moved(epoch)
        missing: dict[str, Sequence[int]] = {}
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, GONE) and worker in owners:
                self._check()
                await self._recover(str(answer), unreachable=worker)
                raise Stale(str(answer)) from answer
            if not isinstance(answer, BaseException) and answer:
                missing[worker] = answer
        for answer in answers:
            if isinstance(answer, Stale):
                await self._catch_up()
            # GONE is no error from a producer that owns nothing: its undelivered inputs are reported missing.
            if isinstance(answer, BaseException) and not isinstance(answer, GONE):
                raise answer
        return missing

    def raise_if_moved(self, epoch: int) -> None:
        """Raise Stale if outputs have moved since an epoch."""
        if epoch != self._owners().epoch:
            raise Stale(f"the owners of {self._run} have changed")


def inputs_lost(inputs: Collection[int], most: int = 10) -> str:
    """Return a reason with the number of lost inputs first, and then which: the first of many."""
    few = ", ".join(map(str, sorted(inputs)[:most])) + (", …" if len(inputs) > most else "")
    return f"{len(inputs)} input{'s' * (len(inputs) > 1)} lost: {few}"
