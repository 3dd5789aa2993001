"""Seal a run at its barrier: check that every owner has received all of its shards, and accept no others.

The worker that runs the barrier sends a :class:`~dask_gpurt.shuffle.messages.Seal` to all owners and
producers. docs/design/exactly-once.md describes what each of them does with it.

Decisions and their figures: ``docs/decisions/shuffle.md``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError
from dask_gpurt.exchange import Exchange
from dask_gpurt.shuffle.messages import GONE, RunInterrupted, Seal, Stale, Transferred
from dask_gpurt.shuffle.owners import Owners


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
