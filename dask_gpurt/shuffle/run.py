"""Run a shuffle on one worker, in the place of Dask's own p2p run.

Dask's ``ShuffleWorkerPlugin`` makes runs, finds them by id, rejects stale messages and ends
them; the methods here are the ones that it calls. ``add_partition`` and
``get_output_partition`` run on the threads of tasks, everything else on the event loop.

docs/design/exactly-once.md has the messages from worker to worker, and the reason why each row counts once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, cast

from dask.context import thread_state
from dask.typing import Key
from distributed.core import ErrorMessage, OKMessage, error_message
from distributed.exceptions import Reschedule
from distributed.utils import sync

from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError, ShuffleClosedError
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import call_soon, is_closing
from dask_gpurt.exchange import Commit, Exchange, ExchangeClosed, PeerLost, Shard
from dask_gpurt.exchange.calls import LONGEST_PAUSE_S
from dask_gpurt.shuffle.messages import (
    GONE,
    Message,
    Retire,
    RunInterrupted,
    Seal,
    Stale,
    error_of,
)
from dask_gpurt.shuffle.offers import Offers
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.receiver import NotReceived, Receiver
from dask_gpurt.shuffle.sender import Sender
from dask_gpurt.shuffle.spec import RunSpec
from dask_gpurt.shuffle.transferred import Transferred, note_sizes

logger = logging.getLogger(__name__)

#: Handlers of the scheduler; see `dask_gpurt.plugins.recovery`.
OWNERS, RECOVER = "gpurt_owners", "gpurt_recover"
#: Notes of barriers to the scheduler, on the stream of their worker.
SEALED = "gpurt-sealed"
#: Messages of the scheduler to workers as owners change.
RENEW = "gpurt-renew"


class ShuffleRun:
    """Run a worker's part of a shuffle.

    Parameters
    ----------
    spec
        The shuffle.
    run_id
        Grows with each run; unique on the scheduler.
    owners
        The owner of each output partition, as the run begins here.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: int,
        span_id: str | None,
        owners: Owners,
        worker: WorkerServer,
        exchange: Exchange,
    ):
        self.id = spec.id
        self._spec = spec
        self.run_id = run_id
        self.span_id = span_id
        self.closed = False
        self.start_time = time.time()
        self._exception: Exception | None = None
        self._worker = worker
        self._exchange = exchange
        self._owners = owners
        self._key = (spec.id, run_id)
        self._progress = exchange.recent_runs.begin(self._key)
        self._sender = Sender(
            spec, self._key, owners, exchange, self._offer, self.raise_if_closed, self._progress
        )
        self._receiver = Receiver(
            spec, self._key, owners, exchange, self.raise_if_closed, self._shard_failed, self._progress
        )
        self._disk_before = exchange.disk_traffic()
        self._offers = Offers(self._deliver, self._unreachable, self._keeps, self.fail)
        #: Shares that their owners have been asked to let go of.
        self._retiring: set[int] = set()
        exchange.metrics.add("shuffle.runs")
        exchange.run_begins(self._key)
        self._note_what_is_left()

    def __repr__(self) -> str:
        return f"<{self}, closed={self.closed}, epoch={self._owners.epoch}>"

    def __str__(self) -> str:
        return f"ShuffleRun<{self.id}[{self.run_id}]> on {self._worker.address}"

    # ---- state -----------------------------------------------------------------------

    def raise_if_closed(self) -> None:
        """Raise what ended the run, once it has ended."""
        if self._exchange.closed and not self._is_closing():
            raise RuntimeError(
                f"the runtime was switched off on {self._worker.address} while shuffle {self.id} "
                "was running: compute it again, or switch off when nothing runs"
            )
        if self._exception is not None:
            raise self._exception
        if self.closed or self._exchange.closed:
            raise ShuffleClosedError(f"{self} is over")

    def _is_closing(self) -> bool:
        """Return whether the worker ends, and the runtime with it; the tasks of the run go on elsewhere."""
        return is_closing(self._worker)

    @property
    def is_open(self) -> bool:
        """Return whether nothing has ended it; from any thread."""
        return not self.closed and self._exception is None and not self._exchange.closed

    def fail(self, exception: Exception) -> None:
        """End the run with an error that everything that waits in it will see. On the event loop.

        Where the runtime was switched off at a peer, the tasks are scheduled again and a new run begins.
        """
        if self.closed or self._exception is not None:
            return
        # An exchange that is closed, while ours is not, is that of a peer.
        if isinstance(exception, PeerLost | ExchangeClosed):
            self._exception = RunInterrupted(f"{self} begins again: {exception}")
            call_soon(self._worker, self._begin_again, str(exception))
        elif isinstance(exception, OSError):
            # A peer that gets one as an answer takes it for a broken connection, and calls again for long.
            self._exception = RuntimeError(f"{self} has failed: {exception}")
            self._exception.__cause__ = exception
        else:
            self._exception = exception
        self._exchange.pools.wake()
        # A producer that waits for room in its pool offers nothing meanwhile, so it would not hear of this:
        # it waits for the release of what was received here, which nothing will read.
        call_soon(self._worker, self._let_go)

    async def _let_go(self) -> None:
        """Release all shards that have been received."""
        with contextlib.suppress(ExchangeClosed):  # which lets go of all
            await self._exchange.offload(self._receiver.close)

    async def close(self) -> None:
        """Release all that the run holds, here and in the pools of peers."""
        if self.closed:
            return
        self.closed = True
        self._exchange.run_published(self._key)
        self._exchange.pools.wake()
        self._offers.cancel()
        with contextlib.suppress(ExchangeClosed):  # then all is released already
            try:
                await self._exchange.offload(self._receiver.close)
            finally:  # whatever became of what was received, what was published is not needed
                self._exchange.run_ends(self._key)
                await self._exchange.withdraw(self._key)

    def heartbeat(self) -> dict[str, Any]:
        """Report to Dask's own page of shuffles, with what stands in the place of its buffers.

        The exchange pools, from which shards are sent, are its buffer for comms; all runs of the worker share
        them. It has none for disks: what is spilled is written at once. The bytes of files are all that the
        worker has moved since this run began.
        """
        figures, exchange = self._progress.snapshot(), self._exchange
        pools = exchange.pools.describe().values()
        written, read = (
            now - before for now, before in zip(exchange.disk_traffic(), self._disk_before, strict=True)
        )
        shards = max(1, figures["offered_shards"])
        return {
            "comm": {
                "memory": sum(pool["used"] - pool["retained"] for pool in pools),
                "memory_limit": sum(pool["capacity"] for pool in pools),
                "total": figures["offered_bytes"],
                "buckets": len(exchange.pools.shares(self._key)),
                "written": figures["offered_bytes"],
                "read": figures["received_bytes"],
                "avg_size": figures["offered_bytes"] / shards,
                "avg_duration": figures["packing"] / shards,
            },
            "disk": {
                **dict.fromkeys(("memory", "memory_limit", "buckets", "avg_size", "avg_duration"), 0),
                **{"total": written, "written": written, "read": read},
            },
            "start": self.start_time,
        }

    # ---- owners ----------------------------------------------------------------------

    def renew(self, owners: Owners) -> None:
        """Go on with other owners, if these are newer than those that are known. On the event loop."""
        if owners.epoch <= self._owners.epoch or not self.is_open:
            return
        self._owners = owners
        try:
            outdated = self._receiver.renew(owners)
            self._note_what_is_left()
            self._sender.renew(owners)
            self._exchange.discard_soon(outdated)
            self._retire_all()
        except Exception as error:  # half of it may have been done, and will not be done again
            self.fail(error)

    def _retire_all(self) -> None:
        """Retire published shares that have other owners now: their blocks must not wait for the old ones."""
        retired = defaultdict[str, set[int]](set)
        for share, owner in self._exchange.pools.shares(self._key).items():
            if share not in self._owners.shares and share not in self._retiring:
                retired[owner].add(share)
        for owner, shares in retired.items():
            self._retiring |= shares
            call_soon(self._worker, self._retire, owner, frozenset(shares))

    async def _retire(self, owner: str, shares: frozenset[int]) -> None:
        """Ask an owner to let go of shares that it no longer owns, also if it never heard of them."""
        try:
            while self.is_open:
                try:
                    await self._deliver(owner, Retire(shares))
                except GONE:  # it is about to leave, or its run is over and ours will be before long
                    if not await self._exchange.calls.has_left(owner):
                        await asyncio.sleep(LONGEST_PAUSE_S)
                        continue
                self._exchange.pools.drop_shares(self._key, shares)
                return
        except Exception as error:  # else these blocks would fill the pool
            self.fail(error)
        finally:
            self._retiring -= shares

    async def _catch_up(self) -> None:
        """Ask the scheduler for the owners as they are now; raise ShuffleClosedError when the run is over."""
        reply = await self._ask_scheduler(OWNERS)
        # None is the answer of a scheduler on which the runtime has been switched off.
        if reply is None or reply["owners"] is None:
            raise ShuffleClosedError(f"{self} is over")
        self.renew(reply["owners"])

    async def _recover(self, reason: str, **what: Any) -> None:
        """Ask the scheduler to recover from a loss, unless it has changed owners since."""
        logger.warning("%s: %s", self, reason)
        epoch = self._owners.epoch
        try:
            await self._ask_scheduler(RECOVER, epoch=epoch, reason=reason, **what)
            if self._owners.epoch == epoch:
                await self._catch_up()
        except Exception as error:  # kept for everything that waits in this run
            self.fail(error)

    async def _ask_scheduler(self, op: str, **message: Any) -> Any:
        """Call a handler of the scheduler: again where the connection breaks, while the run goes on."""
        while True:
            try:
                return await getattr(self._worker.scheduler, op)(id=self.id, run_id=self.run_id, **message)
            except OSError as error:
                logger.warning("%s can not reach the scheduler and tries again: %s", self, error)
            await asyncio.sleep(LONGEST_PAUSE_S)
            self.raise_if_closed()

    def _shard_failed(self, shard: Shard, error: Exception) -> None:
        """Note that a shard that was accepted can not be had. On the event loop; does not wait."""
        if isinstance(error, PeerLost):
            call_soon(self._worker, self._lose, shard, str(error))
        else:
            self.fail(error)

    async def _lose(self, shard: Shard, reason: str) -> None:
        try:
            useless, outputs = self._receiver.lose(shard)
            self._exchange.metrics.add("shuffle.lost.shards")
            self._exchange.discard_soon(useless)
            if outputs:  # else the barrier finds what is missing
                producers = [shard.producer.address]
                await self._recover(f"a shard is lost: {reason}", outputs=outputs, producers=producers)
        except Exception as error:
            self.fail(error)

    # ---- producing -------------------------------------------------------------------

    def add_partition(self, data: Any, partition_id: Any, **_: Any) -> int:
        """Publish an input partition. On the thread of a transfer task."""
        self.raise_if_closed()
        source = self._spec.source_of(partition_id)
        # The scheduler counts the times that it sends a task to a worker.
        key: Key = getattr(thread_state, "key", "")
        task = self._worker.state.tasks.get(key)
        try:
            attempt = self._sender.add(data, source, -1 if task is None else int(task.run_id))
        except Exception:
            self.raise_if_closed()  # what has ended the run meanwhile says more
            raise
        result = Transferred(self.run_id, source, attempt, key, self._worker.address)
        if task is not None:
            result.note(task.metadata)
            if self._exchange.settings.shuffle.balance:
                self._note_sizes(task.metadata, result)
        return result

    def _note_sizes(self, metadata: dict[str, Any], result: Transferred) -> None:
        """Note how large outputs are, while their owners may still change for that."""
        sizes = self._sender.sizes(result.source, result.attempt)
        if sizes is not None:
            note_sizes(metadata, result, sizes)

    def _offer(self, owner: str, offer: Shard | Commit) -> None:
        self._worker.loop.add_callback(self._offers.add, owner, offer)

    def _keeps(self, share: int) -> bool:
        """Return whether a share has not been given to others."""
        return share in self._owners.shares

    async def _unreachable(self, owner: str, error: Exception) -> None:
        """Let others have the outputs of an owner that can not be reached; raise what has ended the run."""
        self.raise_if_closed()
        await self._recover(str(error), unreachable=owner)
        self._retire_all()
        self.raise_if_closed()

    async def _deliver(self, owner: str, message: Message) -> list[int]:
        """Send a message to an owner; returns the inputs that it misses, if that was a seal.

        Raises what it fails with there. The same message twice does what it does once.
        """
        epoch = self._owners.epoch
        if owner == self._worker.address:
            return await self._receive(owner, epoch, message)
        reply: OKMessage | ErrorMessage = await self._exchange.calls.call(
            owner,
            "shuffle_receive",
            check=self.raise_if_closed,
            data=pickle.dumps((self._worker.address, epoch, message)),
            shuffle_id=self.id,
            run_id=self.run_id,
        )
        if (error := error_of(reply)) is not None:
            if not isinstance(error, GONE) and await self._exchange.calls.is_closing(owner):
                raise PeerLost(f"worker {owner} closes ({error})") from error
            raise error
        return cast(dict[str, list[int]], reply).get("missing", [])

    async def _flush(self) -> None:
        """Deliver what is still on its way. At the barrier, on workers that have transferred inputs."""
        await self._offers.sent()
        self._exchange.run_published(self._key)

    async def barrier(self, run_ids: Sequence[int]) -> int:
        """Close the lists of shards on all workers that take part, and see that each has all of its own.

        Raises
        ------
        RunInterrupted
            When the barrier has to be run again, after what is missing has been transferred again.
        """
        self.raise_if_closed()
        if any(run_id != self.run_id for run_id in run_ids):
            await self._worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=False)
            return self.run_id
        results = cast(Sequence[Transferred], run_ids)
        epoch = self._owners.epoch
        try:
            missing = await self._seal_all(results)
        except (Stale, P2PConsistencyError) as error:
            raise RunInterrupted(str(error)) from error
        if missing:
            self._exchange.metrics.add("shuffle.inputs.missing", len(missing))
            lost = [result for result in results if result.source in missing]
            await self._recover(
                f"shards of inputs {sorted(missing)} are missing",
                inputs=[result.key for result in lost],
                producers=sorted({result.producer for result in lost}),
            )
            raise RunInterrupted(f"inputs {sorted(missing)} are transferred again")
        self.raise_if_closed()
        # The scheduler hears of it before it hears of the end of this task, which comes on the same stream.
        # Has it moved outputs meanwhile, it has had the barrier run again too, and takes neither.
        self._worker.batched_stream.send({"op": SEALED, "id": self.id, "run_id": self.run_id, "epoch": epoch})
        return self.run_id

    async def _seal_all(self, results: Sequence[Transferred]) -> set[int]:
        """Have all workers deliver what they have, and owners seal; return the inputs that are missing.

        Both are asked for at once. An owner that another worker still had something for misses that at
        first; by the time all have answered, everything is delivered, and it is asked once more.
        """
        seal = Seal({result.source: result.attempt for result in results})
        owners = {share.owner for share in self._owners.open_shares()}
        producers = {result.producer for result in results}
        missing = await self._seal(seal, owners | producers, owners)
        if missing:
            missing = await self._seal(seal, missing.keys(), owners)
        return {source for sources in missing.values() for source in sources}

    async def _seal(
        self, seal: Seal, workers: Collection[str], owners: Collection[str]
    ) -> dict[str, Sequence[int]]:
        """Send a seal to workers; return the inputs that something is missing of, by owner."""
        workers = sorted(workers)
        answers = await asyncio.gather(
            *(self._deliver(worker, seal) for worker in workers), return_exceptions=True
        )
        missing: dict[str, Sequence[int]] = {}
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, GONE) and worker in owners:
                self.raise_if_closed()
                await self._recover(str(answer), unreachable=worker)
                raise Stale(str(answer)) from answer
            if not isinstance(answer, BaseException) and answer:
                missing[worker] = answer
        for answer in answers:
            if isinstance(answer, Stale):
                await self._catch_up()
            # Inputs that were not delivered by a worker that has left, and owns nothing, are missing.
            if isinstance(answer, BaseException) and not isinstance(answer, GONE):
                raise answer
        return missing

    # ---- consuming -------------------------------------------------------------------

    async def receive(self, data: bytes) -> OKMessage | ErrorMessage:
        """Take a message of another worker in this run."""
        try:
            missing = await self._receive(*pickle.loads(data))
        except Exception as error:
            # The sender raises it where its task can see it.
            return error_message(error)
        return cast(OKMessage, {"status": "OK", "missing": missing})

    async def _receive(self, sender: str, epoch: int, message: Message) -> list[int]:
        self.raise_if_closed()
        if epoch > self._owners.epoch:  # the sender has heard of new owners first
            await self._catch_up()
        if isinstance(message, Seal):
            await self._flush()
            self.raise_if_closed()  # else it would miss nothing, since nothing is left
            if epoch != self._owners.epoch:
                raise Stale(f"{self} has other owners by now")
            return sorted(self._receiver.seal(message.succeeded))
        if isinstance(message, Retire):
            await self._exchange.forget_shares(sender, self._key, message.shares)
            return []
        try:
            await self._receiver.receive(message)
        except Exception:
            self.raise_if_closed()  # what has ended the run meanwhile says more
            raise
        return []

    def get_output_partition(self, partition_id: Any, key: Key, **_: Any) -> Any:
        """Put an output partition together. On the thread of an unpack task."""
        self.raise_if_closed()
        output = self._spec.output_of(partition_id)
        self._ensure_owner(output, key)
        try:
            assembled = self._receiver.assemble(output, key)
        except (NotReceived, PeerLost, ExchangeClosed) as error:
            self.raise_if_closed()
            sync(self._worker.loop, self._recover, str(error), outputs=[output])
            raise Reschedule(str(error)) from None
        except Exception:
            self.raise_if_closed()  # what was read of a run that had ended may have made no sense
            raise
        # Data that were read after the run had ended may be anything.
        self.raise_if_closed()
        return assembled

    def _ensure_owner(self, partition: int, key: Key) -> None:
        """Send a task that was started on another worker than its owner there."""
        if self._owners[partition] == self._worker.address:
            return
        sync(self._worker.loop, self._catch_up)
        if (owner := self._owners[partition]) == self._worker.address:
            return
        self._exchange.metrics.add("shuffle.tasks.redirected")
        reply = sync(
            self._worker.loop,
            self._worker.scheduler.shuffle_restrict_task,
            id=self.id,
            run_id=self.run_id,
            key=key,
            worker=owner,
        )
        if (error := error_of(reply)) is not None:
            raise error
        raise Reschedule()

    async def _begin_again(self, reason: str) -> None:
        """Ask the scheduler to begin a new run, unless it has done so."""
        logger.warning("%s begins again: %s", self, reason)
        while not self.closed:
            try:
                await self._worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=False)
                return
            except (KeyError, ValueError) as error:  # it is not the active run any more
                logger.debug("%s had ended: %s", self, error)
                return
            except OSError as error:
                logger.warning("%s can not reach the scheduler and tries again: %s", self, error)
                await asyncio.sleep(LONGEST_PAUSE_S)
            except Exception as error:
                logger.exception("%s can not begin again", self)
                self._exception = error  # its tasks, scheduled again, would find the same run for ever
                return

    def task_done(self, key: Key) -> None:
        """Release the shards of a task that has read outputs and is in memory."""
        if finished := self._receiver.task_done(key):
            self._exchange.discard_soon(finished)
            self._note_what_is_left()

    def _note_what_is_left(self) -> None:
        """Let retained blocks make room for other runs while this worker has no output to read."""
        if not self.closed:
            self._exchange.run_is_read(self._key, self._receiver.is_read)
