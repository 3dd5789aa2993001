"""One attempt of a shuffle on one worker, in the place of Dask's own p2p run.

Dask's ``ShuffleWorkerPlugin`` makes runs, finds them by id, rejects stale messages and ends
them; the methods here are the ones that it calls. ``add_partition`` and
``get_output_partition`` run on the threads of tasks, everything else on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

from dask.typing import Key
from distributed.core import ErrorMessage, OKMessage, clean_exception, error_message
from distributed.exceptions import Reschedule
from distributed.shuffle._exceptions import ShuffleClosedError
from distributed.utils import sync

from dask_gpurt.exchange import Exchange, ExchangeClosed, Shard
from dask_gpurt.shuffle.consumer import Consumed, Consumer
from dask_gpurt.shuffle.producer import Producer
from dask_gpurt.shuffle.spec import ShuffleSpec

#: Attempts to make an offer to a peer that does not answer, and the seconds between them.
#: A peer that is lost ends the run well before that.
ATTEMPTS, PAUSE = 30, 1.0


class ShuffleRun:
    """This worker's part of a run.

    Parameters
    ----------
    spec
        The shuffle.
    run_id
        Grows with each run; unique on the scheduler.
    worker_for
        The owner of each output partition.
    """

    def __init__(
        self,
        spec: ShuffleSpec,
        run_id: int,
        span_id: str | None,
        worker_for: dict[int, str],
        worker: Any,
        exchange: Exchange,
    ):
        self.id = spec.id
        self.run_id = run_id
        self.span_id = span_id
        self.closed = False
        self.transferred = False
        self.start_time = time.time()
        self._exception: Exception | None = None
        self._worker = worker
        self._exchange = exchange
        self._worker_for = worker_for
        self._key = (spec.id, run_id)
        self._producer = Producer(spec, self._key, worker_for, exchange, self._offer, self.raise_if_closed)
        self._consumer = Consumer(spec, self._key, exchange, self.raise_if_closed)
        #: Offers on their way, by owner: one message at a time, with all that has come up.
        self._outgoing: defaultdict[str, list[Shard]] = defaultdict(list)
        self._senders: dict[str, asyncio.Task[None]] = {}
        exchange.metrics.add("shuffle.runs")
        exchange.run_begins(self._key)

    def __repr__(self) -> str:
        return f"<{self}, closed={self.closed}, transferred={self.transferred}>"

    def __str__(self) -> str:
        return f"ShuffleRun<{self.id}[{self.run_id}]> on {self._worker.address}"

    # ---- state -----------------------------------------------------------------------

    def raise_if_closed(self) -> None:
        """Raise what ended the run, once it has ended."""
        if self._exchange.closed and not self._worker._is_finalizing():
            raise RuntimeError(
                f"the runtime was switched off on {self._worker.address} while shuffle {self.id} "
                "was running: compute it again, or switch off when nothing runs"
            )
        if self._exception is not None:
            raise self._exception
        if self.closed or self._exchange.closed:
            raise ShuffleClosedError(f"{self} is over")

    @property
    def is_open(self) -> bool:
        """Whether nothing has ended it; from any thread."""
        return not self.closed and self._exception is None and not self._exchange.closed

    def fail(self, exception: Exception) -> None:
        """End the run with an error that everybody who waits in it will see."""
        if not self.closed and self._exception is None:
            self._exception = exception
            self._exchange.pools.wake()

    async def close(self) -> None:
        """Give back what the run holds, here and in the pools of others."""
        if self.closed:
            return
        self.closed = True
        self._exchange.run_ends(self._key)
        self._exchange.pools.wake()
        for sender in self._senders.values():
            sender.cancel()
        with contextlib.suppress(ExchangeClosed):  # then all is released already
            try:
                await self._exchange.offload(self._consumer.close)
            finally:  # whatever became of what was received, nobody needs what was published
                await self._exchange.withdraw(self._key)

    def heartbeat(self) -> dict[str, Any]:
        """What Dask's dashboard shows of a shuffle."""
        waiting = {"memory": 0, "buckets": 0, "written": 0, "read": 0, "active": 0, "memory_limit": 0}
        return {"disk": waiting, "comm": waiting, "start": self.start_time}

    # ---- producing -------------------------------------------------------------------

    def add_partition(self, data: Any, partition_id: int, **_: Any) -> int:
        """Publish an input partition. On the thread of a transfer task."""
        self.raise_if_closed()
        if self.transferred:
            raise RuntimeError(f"no partition can be added to {self} after its barrier")
        self._producer.add(data, partition_id)
        return self.run_id

    def _offer(self, owner: str, shard: Shard) -> None:
        self._worker.loop.add_callback(self._enqueue, owner, shard)

    def _enqueue(self, owner: str, shard: Shard) -> None:
        self._outgoing[owner].append(shard)
        sender = self._senders.get(owner)
        if sender is None or sender.done():
            self._senders[owner] = asyncio.create_task(self._send(owner))

    async def _send(self, owner: str) -> None:
        while shards := self._outgoing.pop(owner, None):
            try:
                reply = await self._deliver(owner, shards)
            except Exception as error:  # kept for everybody who waits in this run
                self.fail(error)
                return
            if reply["status"] != "OK":
                self.fail(_exception_of(cast(ErrorMessage, reply)))
                return

    async def _deliver(self, owner: str, shards: list[Shard]) -> OKMessage | ErrorMessage:
        data = pickle.dumps(shards)
        if owner == self._worker.address:
            return await self.receive(data)
        for attempt in range(ATTEMPTS):
            try:
                reply: OKMessage | ErrorMessage = await self._worker.rpc(owner).shuffle_receive(
                    data=data, shuffle_id=self.id, run_id=self.run_id
                )
                return reply
            except OSError:
                if attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(PAUSE)
                self.raise_if_closed()
        raise AssertionError("unreachable")

    async def inputs_done(self) -> None:
        """All inputs have been added: deliver what is still on its way."""
        self.raise_if_closed()
        self.transferred = True
        while pending := [sender for sender in self._senders.values() if not sender.done()]:
            await asyncio.wait(pending)
        self._exchange.run_ends(self._key)
        self.raise_if_closed()

    async def barrier(self, run_ids: Sequence[int]) -> int:
        """Close the list of shards on all workers that take part."""
        self.raise_if_closed()
        consistent = all(run_id == self.run_id for run_id in run_ids)
        await self._worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=consistent)
        return self.run_id

    # ---- consuming -------------------------------------------------------------------

    async def receive(self, data: bytes) -> OKMessage | ErrorMessage:
        """Take offers of a producer of this run."""
        try:
            self.raise_if_closed()
            for shard in pickle.loads(data):
                await self._consumer.accept(shard, self.fail)
        except Exception as error:
            # The producer raises it where its task can see it.
            return error_message(error)
        return {"status": "OK"}

    def get_output_partition(self, partition_id: int, key: Key, **_: Any) -> Any:
        """Put an output partition together. On the thread of an unpack task."""
        self.raise_if_closed()
        self._ensure_owner(partition_id, key)
        if not self.transferred:
            raise RuntimeError(f"partition {partition_id} of {self} was asked for before the barrier")
        try:
            frame = self._consumer.assemble(partition_id, key)
        except ExchangeClosed as error:
            self.raise_if_closed()
            raise ShuffleClosedError(str(error)) from error
        except Consumed:
            sync(self._worker.loop, self._begin_again)
            raise Reschedule() from None
        # What was read of a run that had ended meanwhile may be anything.
        self.raise_if_closed()
        return frame

    def _ensure_owner(self, partition: int, key: Key) -> None:
        """Send a task that was started on another worker than its owner there."""
        owner = self._worker_for[partition]
        if owner == self._worker.address:
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
        if reply["status"] != "OK":
            raise _exception_of(reply)
        raise Reschedule()

    async def _begin_again(self) -> None:
        """An output is asked for a second time after its shards have gone: run again."""
        await self._worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=False)

    def task_done(self, key: Key) -> None:
        """A task that had read outputs is in memory: let its shards go."""
        if finished := self._consumer.task_done(key):
            self._exchange.discard_soon(finished)


def _exception_of(reply: ErrorMessage) -> Exception:
    _, exception, _ = clean_exception(**reply)
    assert isinstance(exception, Exception)
    return exception
