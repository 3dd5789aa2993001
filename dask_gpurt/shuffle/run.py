"""Run a shuffle on one worker, in place of Dask's own p2p run.

Dask's ``ShuffleWorkerPlugin`` creates runs, looks them up by id, rejects stale messages and closes runs;
:class:`ShuffleRun` has the methods that it calls. ``add_partition`` and ``get_output_partition`` run in task
threads, everything else on the event loop.

docs/design/exactly-once.md describes the messages between workers, and why each row counts exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

from dask.context import thread_state
from dask.typing import Key
from distributed.core import ErrorMessage, OKMessage, error_message
from distributed.exceptions import Reschedule
from distributed.utils import sync

from dask_gpurt.dask_hooks.shuffle import ShuffleClosedError
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import call_scheduler, call_soon, is_closing
from dask_gpurt.exchange import Commit, Exchange, ExchangeClosed, PeerLost, Shard
from dask_gpurt.exchange.calls import FIRST_PAUSE_S, LONGEST_PAUSE_S
from dask_gpurt.protocol import OWNERS_HANDLER, RECOVER_HANDLER, SEALED_OP
from dask_gpurt.shuffle.messages import (
    GONE,
    Message,
    Retire,
    RunInterrupted,
    Seal,
    Transferred,
    error_of,
    note_sizes,
)
from dask_gpurt.shuffle.offers import Offers, RetiredShares, Sealing
from dask_gpurt.shuffle.owners import Owners
from dask_gpurt.shuffle.receiver import NotReceived, Receiver
from dask_gpurt.shuffle.sender import Sender
from dask_gpurt.shuffle.spec import RunSpec

logger = logging.getLogger(__name__)

#: Key in the metadata of a task that has assembled outputs.
ASSEMBLED_KEY = "gpurt-assembled"
#: How long a worker waits for owners to copy its shards until it reports how many are left, in seconds.
EVACUATION_STEP_S = 10.0


class ShuffleRun:
    """Run a worker's part of a shuffle.

    ``run_id``: unique on the scheduler; increases with each run.
    ``owners``: the owner of each output partition when the run starts on this worker.
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
        self._exception: Exception | None = None
        self._ending: asyncio.Future[None] | None = None
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
        self._offers = Offers(self._deliver, self._unreachable, self._keeps, self.fail)
        self._sealing = Sealing(
            self,
            exchange,
            lambda: self._owners,
            self._deliver,
            self._recover,
            self._catch_up,
            self.raise_if_closed,
        )
        self._retired = RetiredShares(
            self._key, worker, exchange, self._keeps, self._deliver, lambda: self.is_open, self.fail
        )
        exchange.metrics.add("shuffle.runs")
        exchange.run_begins(self._key)
        self._note_what_is_left()

    def __repr__(self) -> str:
        error = "" if self._exception is None else f", error={self._exception!r}"
        return f"<{self}, closed={self.closed}, epoch={self._owners.epoch}{error}>"

    def __str__(self) -> str:
        return f"ShuffleRun<{self.id}[{self.run_id}]> on {self._worker.address}"

    # ---- state -----------------------------------------------------------------------

    def raise_if_closed(self) -> None:
        """Raise the error that ended the run, or ShuffleClosedError if it has been closed."""
        if self._exchange.closed and not self._is_closing():
            raise RuntimeError(
                f"the runtime was switched off on {self._worker.address} while shuffle {self.id} "
                "was running: compute it again, and switch off only when nothing is running"
            )
        if self._exception is not None:
            raise self._exception
        if self.closed or self._exchange.closed:
            raise ShuffleClosedError(f"{self} is over")

    def _is_closing(self) -> bool:
        """Return whether the worker itself is closing, in which case its tasks move to other workers."""
        return is_closing(self._worker)

    @property
    def is_open(self) -> bool:
        """Return whether the run has neither failed nor been closed. Callable from any thread."""
        return not self.closed and self._exception is None and not self._exchange.closed

    def fail(self, exception: Exception) -> None:
        """End the run with an error, which every call waiting in it raises. On the event loop.

        If a peer was lost, or the runtime was switched off on it, the run ends with RunInterrupted instead:
        its tasks are rescheduled, and the scheduler starts a new run.
        """
        if self.closed or self._exception is not None:
            return
        # ExchangeClosed is a peer's: if our own exchange were closed, `raise_if_closed` would report that.
        if isinstance(exception, PeerLost | ExchangeClosed):
            self._exception = RunInterrupted(f"{self} restarts: {exception}")
            call_soon(self._worker, self._begin_again, str(exception))
        elif isinstance(exception, OSError):
            # A peer would take an OSError in a reply for a broken connection, and keep retrying.
            self._exception = RuntimeError(f"{self} has failed: {exception}")
            self._exception.__cause__ = exception
        else:
            self._exception = exception
        self._exchange.pools.wake()
        # Peers learn of the failure from the reply to their next offer. A producer that waits for room in its
        # pool sends no offers, and the shards received here would never be read. Nor would those published
        # here whose offers have failed: their owners do not know of them, and so never release them.
        call_soon(self._worker, self._end)

    async def close(self) -> None:
        """Release everything that the run holds, on this worker and in the pools of peers. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._exchange.run_published(self._key)
        self._exchange.pools.wake()
        self._offers.cancel()
        await self._end()

    async def _end(self) -> None:
        """Release all received shards, and withdraw all published ones; once, however often it is called."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._release_all())
        await asyncio.shield(self._ending)

    async def _release_all(self) -> None:
        with contextlib.suppress(ExchangeClosed):  # a closed exchange has released everything
            try:
                await self._exchange.offload(self._receiver.close)
            finally:  # even if that failed, published shards are no longer needed
                self._exchange.run_ends(self._key)
                await self._exchange.requests.withdraw(self._key)

    def heartbeat(self) -> dict[str, Any]:
        """Return the figures for Dask's shuffle dashboard page."""
        return self._progress.for_dask(self._exchange.pools.describe().values())

    # ---- owners ----------------------------------------------------------------------

    def renew(self, owners: Owners) -> None:
        """Switch to new owners; stale ones are ignored. On the event loop."""
        if owners.epoch <= self._owners.epoch or not self.is_open:
            return
        self._owners = owners
        try:
            outdated = self._receiver.renew(owners)
            for owner, offer in self._sender.renew(owners):
                self._offers.add(owner, offer)  # at once, since a seal may follow, which waits for them
            self._note_what_is_left()  # only now: retained blocks that are offered again must not be reused
            self._exchange.discard_soon(outdated)
            self._retired.ask_all()
        except Exception as error:  # the change may be half applied, and is not retried
            self.fail(error)

    async def _catch_up(self) -> None:
        """Fetch the current owners from the scheduler; raise ShuffleClosedError if the run is over."""
        reply = await self._ask_scheduler(OWNERS_HANDLER)
        # A scheduler on which the runtime has been switched off replies None.
        if reply is None or reply["owners"] is None:
            raise ShuffleClosedError(f"{self} is over")
        self.renew(reply["owners"])

    async def _recover(self, reason: str, **what: Any) -> None:
        """Ask the scheduler to recover from a loss, unless it has changed the owners since."""
        logger.warning("%s: %s", self, reason)
        epoch = self._owners.epoch
        try:
            await self._ask_scheduler(RECOVER_HANDLER, epoch=epoch, reason=reason, **what)
            if self._owners.epoch == epoch:
                await self._catch_up()
        except Exception as error:  # every call waiting in this run raises it
            self.fail(error)

    async def _ask_scheduler(self, op: str, **message: Any) -> Any:
        """Call a handler of the scheduler about this run, with retries while the run is open."""

        def wanted() -> bool:
            self.raise_if_closed()
            return True

        wanted()  # once the runtime is off here, the scheduler has no such handler either
        return await self._call_scheduler(op, wanted, **message)

    async def _call_scheduler(self, op: str, wanted: Callable[[], bool], **message: Any) -> Any:
        about = {"id": self.id, "run_id": self.run_id, **message}
        return await call_scheduler(
            self._worker, op, subject=self, pause_s=LONGEST_PAUSE_S, wanted=wanted, **about
        )

    def _shard_failed(self, shard: Shard, error: Exception) -> None:
        """Handle the failed pull of an accepted shard. On the event loop; does not block."""
        if isinstance(error, PeerLost):
            call_soon(self._worker, self._lose, shard, str(error))
        else:
            self.fail(error)

    async def _lose(self, shard: Shard, reason: str) -> None:
        try:
            useless, outputs = self._receiver.lose(shard)
            self._exchange.metrics.add("shuffle.lost.shards")
            self._exchange.discard_soon(useless)
            if outputs:  # otherwise the barrier detects the loss
                producers = [shard.producer.address]
                await self._recover(f"a shard is lost: {reason}", outputs=outputs, producers=producers)
        except Exception as error:
            self.fail(error)

    # ---- producing -------------------------------------------------------------------

    def add_partition(self, data: Any, partition_id: Any, **_: Any) -> int:
        """Publish an input partition. In the thread of a transfer task."""
        self.raise_if_closed()
        # If this input is transferred again after a loss, the retained blocks of others are about to be
        # offered again: this one must not reuse them.
        self._exchange.run_is_read(self._key, False)
        source = self._spec.source_of(partition_id)
        # The task's run_id, which the scheduler increases with each dispatch, orders attempts across workers.
        key: Key = getattr(thread_state, "key", "")
        task = self._worker.state.tasks.get(key)
        try:
            with self._exchange.in_use():
                attempt = self._sender.add(data, source, -1 if task is None else int(task.run_id))
        except Exception:
            self.raise_if_closed()  # the error that ended the run is the cause
            raise
        result = Transferred(self.run_id, source, attempt, key, self._worker.address)
        if task is not None:
            result.note(task.metadata)
            if self._exchange.settings.shuffle.balance:
                self._note_sizes(task.metadata, result)
        return result

    def _note_sizes(self, metadata: dict[str, Any], result: Transferred) -> None:
        """Add the sizes of the outputs to the task's metadata, for the scheduler to balance owners."""
        sizes = self._sender.sizes(result.source, result.attempt)
        if sizes is not None:
            note_sizes(metadata, result, sizes)

    async def evacuate(self, epoch: int) -> int | None:
        """Have owners copy the shards that this worker has published, since it is about to leave.

        Waits for at most ``EVACUATION_STEP_S``.

        ``epoch``: the epoch since which this worker owns no output that is needed.
        Returns the number of shards that are yet to be copied. None if the run has ended: it has withdrawn
        them.
        """
        with contextlib.suppress(TimeoutError, ShuffleClosedError):
            async with asyncio.timeout(EVACUATION_STEP_S):
                if epoch > self._owners.epoch:
                    await self._catch_up()
                await self._offers.sent()
                await self._exchange.requests.evacuate(self._key)
        return self._exchange.pools.unread(self._key, self._worker.address) if self.is_open else None

    def _offer(self, owner: str, offer: Shard | Commit) -> None:
        self._worker.loop.add_callback(self._offers.add, owner, offer)

    def _keeps(self, share: int) -> bool:
        """Return whether a share is still valid, that is, not retired in favour of a new one."""
        return share in self._owners.shares

    async def _unreachable(self, owner: str, error: Exception) -> None:
        """Reassign the outputs of an unreachable owner; raise the error that ended the run, if any."""
        self.raise_if_closed()
        epoch = self._owners.epoch
        await self._recover(str(error), unreachable=owner)
        if self._owners.epoch == epoch:  # the scheduler first waits for other outputs: do not call it at once
            await asyncio.sleep(FIRST_PAUSE_S)
        self._retired.ask_all()
        self.raise_if_closed()

    async def _deliver(self, owner: str, message: Message) -> list[int]:
        """Send a message to a worker of the run; return the inputs it is missing if the message is a seal.

        Raises the error of the receiver. All messages are idempotent, so a worker that is given up as silent
        may still receive them later.
        """
        epoch = self._owners.epoch
        if owner == self._worker.address:
            return await self._receive(owner, epoch, message)
        reply: OKMessage | ErrorMessage = await self._exchange.calls.call(
            owner,
            "shuffle_receive",
            check=self.raise_if_closed,
            awaited_by=lambda: self._key if self._waits_for(message) else None,
            data=pickle.dumps((self._worker.address, epoch, message)),
            shuffle_id=self.id,
            run_id=self.run_id,
        )
        if (error := error_of(reply)) is not None:
            if not isinstance(error, GONE) and await self._exchange.calls.is_closing(owner):
                raise PeerLost(f"worker {owner} is closing ({error})") from error
            raise error
        return cast(dict[str, list[int]], reply).get("missing", [])

    def _waits_for(self, message: Message) -> bool:
        """Return whether the run waits for the reply to a message, so that a silent worker would hold it up.

        It does not wait for offers while inputs are being transferred, nor for a retired share.
        """
        return isinstance(message, Seal) or (isinstance(message, list) and self._offers.are_awaited)

    async def _flush(self) -> None:
        """Deliver all queued offers. At the barrier, on workers that have transferred inputs."""
        await self._offers.sent()
        self._exchange.run_published(self._key)
        self._note_what_is_left()

    async def barrier(self, run_ids: Sequence[int]) -> int:
        """Seal the run; see :meth:`Sealing.seal`. In the barrier task."""
        self.raise_if_closed()
        if any(run_id != self.run_id for run_id in run_ids):
            await self._worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=False)
            return self.run_id
        epoch = await self._sealing.seal(cast(Sequence[Transferred], run_ids))
        self.raise_if_closed()
        # This message and the end of this task use the same stream, so the scheduler gets this message first.
        # If it has moved outputs in the meantime, it has also rescheduled the barrier, and ignores both.
        self._worker.batched_stream.send(
            {"op": SEALED_OP, "id": self.id, "run_id": self.run_id, "epoch": epoch}
        )
        return self.run_id

    # ---- consuming -------------------------------------------------------------------

    async def receive(self, data: bytes) -> OKMessage | ErrorMessage:
        """Handle a message from another worker of this run."""
        try:
            missing = await self._receive(*pickle.loads(data))
        except Exception as error:
            # The sender raises it, where its task sees it.
            return error_message(error)
        return cast(OKMessage, {"status": "OK", "missing": missing})

    async def _receive(self, sender: str, epoch: int, message: Message) -> list[int]:
        self.raise_if_closed()
        if epoch > self._owners.epoch:  # the sender has received new owners before this worker
            await self._catch_up()
        if isinstance(message, Seal):
            await self._flush()
            self.raise_if_closed()  # a closed receiver has no shares, and would report nothing missing
            self._sealing.raise_if_moved(epoch)
            return sorted(self._receiver.seal(message.succeeded))
        if isinstance(message, Retire):
            await self._exchange.forget_shares(sender, self._key, message.shares)
            return []
        try:
            await self._receiver.receive(message)
        except Exception:
            self.raise_if_closed()  # the error that ended the run is the cause
            raise
        return []

    def get_output_partition(self, partition_id: Any, key: Key, **_: Any) -> Any:
        """Assemble an output partition. In the thread of an unpack task."""
        self.raise_if_closed()
        output = self._spec.output_of(partition_id)
        self._ensure_owner(output, key)
        if (task := self._worker.state.tasks.get(key)) is not None:
            task.metadata[ASSEMBLED_KEY] = True
        try:
            with self._exchange.in_use():
                assembled = self._receiver.assemble(output, key)
        except (NotReceived, PeerLost, ExchangeClosed) as error:
            self.raise_if_closed()
            sync(self._worker.loop, self._recover, str(error), outputs=[output])
            raise Reschedule(str(error)) from None
        except Exception:
            self.raise_if_closed()  # once the run has ended, blocks may be reused while they are read
            raise
        # For the same reason, an output that was read after the end of the run may be garbage.
        self.raise_if_closed()
        return assembled

    def _ensure_owner(self, partition: int, key: Key) -> None:
        """Reschedule an unpack task on the owner of its output, if that is another worker."""
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
        """Ask the scheduler to start a new run, unless it has already done so."""
        logger.warning("%s restarts: %s", self, reason)
        if self.closed:
            return
        try:
            await self._call_scheduler("shuffle_barrier", lambda: not self.closed, consistent=False)
        except (KeyError, ValueError, OSError) as error:  # no longer the active run, or closed here
            logger.debug("%s had ended: %s", self, error)
        except Exception as error:
            logger.exception("%s cannot restart", self)
            self._exception = error  # otherwise its rescheduled tasks would find this run forever

    def task_done(self, key: Key) -> None:
        """Release the shards of the outputs that a task has read, now that its result is accepted.

        The scheduler refuses the result if it has rerun the barrier meanwhile: Dask then cancels the tasks
        that depend on the barrier, and sends them again. They need their shards again.
        """
        if finished := self._receiver.task_done(key):
            self._exchange.discard_soon(finished)
            self._note_what_is_left()

    def _note_what_is_left(self) -> None:
        """Tell the exchange whether outputs are left to read here; if not, retained blocks may be reused."""
        if self.is_open:
            self._exchange.run_is_read(self._key, self._receiver.is_read)
