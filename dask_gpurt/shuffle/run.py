"""One run of a shuffle on one worker, in the place of Dask's own p2p run.

Dask's ``ShuffleWorkerPlugin`` makes runs, finds them by id, rejects stale messages and ends
them; the methods here are the ones that it calls. ``add_partition`` and
``get_output_partition`` run on the threads of tasks, everything else on the event loop.

What goes from worker to worker, and why each row counts once, is in docs/design/exactly-once.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from dask.context import thread_state
from dask.typing import Key
from distributed.core import ErrorMessage, OKMessage, clean_exception, error_message
from distributed.exceptions import Reschedule
from distributed.utils import sync

from dask_gpurt.dask_hooks.shuffle import ShuffleClosedError
from dask_gpurt.dask_hooks.worker import call_soon, is_finalizing
from dask_gpurt.exchange import Attempt, Commit, Exchange, ExchangeClosed, PeerLost, Shard
from dask_gpurt.exchange.calls import LONGEST_PAUSE_S
from dask_gpurt.shuffle.consumer import Consumed, Consumer
from dask_gpurt.shuffle.producer import Producer
from dask_gpurt.shuffle.spec import ShuffleSpec

logger = logging.getLogger(__name__)

#: What owners are sent: offers of one producer, or at the barrier the attempt that counts at each input.
Message = list[Shard | Commit] | Mapping[int, Attempt]


class RunInterrupted(ShuffleClosedError, Reschedule):
    """Raised to the tasks of a run that begins again: they are to be scheduled again.

    Dask's transfer and unpack tasks take a ShuffleClosedError for that, its barrier task only a Reschedule.
    """


class Transferred(int):
    """The result of a transfer task: the id of its run, and which attempt at which input has succeeded."""

    source: int
    attempt: Attempt

    def __new__(cls, run_id: int, source: int, attempt: Attempt) -> Transferred:
        self = super().__new__(cls, run_id)
        self.source, self.attempt = source, attempt
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Transferred, (int(self), self.source, self.attempt)


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
        self._consumer = Consumer(spec, self._key, exchange, self.raise_if_closed, self.fail)
        #: Offers on their way, by owner: one message at a time, with all that has come up.
        self._outgoing: defaultdict[str, list[Shard | Commit]] = defaultdict(list)
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
        if self._exchange.closed and not is_finalizing(self._worker):
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
        """End the run with an error that everything that waits in it will see. On the event loop.

        Where a peer was lost, the tasks are scheduled again and a new run begins.
        """
        if self.closed or self._exception is not None:
            return
        # An exchange that is closed, while ours is not, is that of a peer.
        if isinstance(exception, PeerLost | ExchangeClosed):
            self._exception = RunInterrupted(f"{self} begins again: {exception}")
            call_soon(self._worker, self._begin_again, str(exception))
        else:
            self._exception = exception
        self._exchange.pools.wake()

    async def close(self) -> None:
        """Give back what the run holds, here and in the pools of others."""
        if self.closed:
            return
        self.closed = True
        self._exchange.run_published(self._key)
        self._exchange.pools.wake()
        for sender in self._senders.values():
            sender.cancel()
        with contextlib.suppress(ExchangeClosed):  # then all is released already
            try:
                await self._exchange.offload(self._consumer.close)
            finally:  # whatever became of what was received, nobody needs what was published
                self._exchange.run_ends(self._key)
                await self._exchange.withdraw(self._key)

    def heartbeat(self) -> dict[str, Any]:
        """What Dask's dashboard shows of a shuffle."""
        waiting = {"memory": 0, "buckets": 0, "written": 0, "read": 0, "active": 0, "memory_limit": 0}
        return {"disk": waiting, "comm": waiting, "start": self.start_time}

    # ---- producing -------------------------------------------------------------------

    def add_partition(self, data: Any, partition_id: int, **_: Any) -> int:
        """Publish an input partition. On the thread of a transfer task."""
        self.raise_if_closed()
        if self.transferred:  # the result of a transfer got lost when all were there
            late = PeerLost(f"input {partition_id} is transferred again after the barrier")
            self._worker.loop.add_callback(self.fail, late)
            raise RunInterrupted(str(late))
        try:
            attempt = self._producer.add(data, partition_id, self._dispatch())
        except Exception:
            self.raise_if_closed()  # what has ended the run meanwhile says more
            raise
        return Transferred(self.run_id, partition_id, attempt)

    def _dispatch(self) -> int:
        """How the scheduler counts the task that runs on this thread."""
        task = self._worker.state.tasks.get(getattr(thread_state, "key", None))
        return -1 if task is None else int(task.run_id)

    def _offer(self, owner: str, offer: Shard | Commit) -> None:
        self._worker.loop.add_callback(self._enqueue, owner, offer)

    def _enqueue(self, owner: str, offer: Shard | Commit) -> None:
        self._outgoing[owner].append(offer)
        sender = self._senders.get(owner)
        if sender is None or sender.done():
            self._senders[owner] = asyncio.create_task(self._send(owner))

    async def _send(self, owner: str) -> None:
        try:
            while offers := self._outgoing.pop(owner, None):
                await self._deliver(owner, offers)
        except Exception as error:  # kept for everything that waits in this run
            self.fail(error)

    async def _deliver(self, owner: str, message: Message) -> list[int]:
        """Send a message to an owner; returns the inputs that it misses, if that was a seal.

        Raises what it fails with there. The same message twice does what it does once.
        """
        if owner == self._worker.address:
            return await self._receive(message)
        reply: OKMessage | ErrorMessage = await self._exchange.calls.call(
            owner,
            "shuffle_receive",
            check=self.raise_if_closed,
            data=pickle.dumps(message),
            shuffle_id=self.id,
            run_id=self.run_id,
        )
        if reply["status"] != "OK":
            raise _exception_of(cast(ErrorMessage, reply))
        return cast(dict[str, list[int]], reply).get("missing", [])

    async def inputs_done(self) -> None:
        """All inputs have been added: deliver what is still on its way."""
        self._raise_unless_interrupted()
        self.transferred = True
        while pending := [sender for sender in self._senders.values() if not sender.done()]:
            await asyncio.wait(pending)
        self._exchange.run_published(self._key)
        self._raise_unless_interrupted()

    def _raise_unless_interrupted(self) -> None:
        # Owners miss shards of an interrupted run, which the barrier finds out. Raised here, Dask's scheduler
        # would make an error of it that fails the barrier.
        if not isinstance(self._exception, RunInterrupted):
            self.raise_if_closed()

    async def barrier(self, run_ids: Sequence[int]) -> int:
        """Close the list of shards on all workers that take part, and see that each has all of its own."""
        self.raise_if_closed()
        consistent = all(run_id == self.run_id for run_id in run_ids)
        await self._worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=consistent)
        if consistent:
            succeeded = {one.source: one.attempt for one in cast(Sequence[Transferred], run_ids)}
            try:
                await self._seal(succeeded)
            except (PeerLost, ShuffleClosedError) as error:
                self.fail(error if isinstance(error, PeerLost) else PeerLost(str(error)))
                self.raise_if_closed()
        return self.run_id

    async def _seal(self, succeeded: Mapping[int, Attempt]) -> None:
        """Tell the owners which attempts count; raises PeerLost if one misses something of them."""
        owners = sorted(set(self._worker_for.values()))
        answers = await asyncio.gather(*(self._deliver(owner, succeeded) for owner in owners))
        if missing := {owner: lacks for owner, lacks in zip(owners, answers, strict=True) if lacks}:
            self._exchange.metrics.add("shuffle.runs.incomplete")
            raise PeerLost(f"shards of these inputs did not arrive, by owner: {missing}")

    # ---- consuming -------------------------------------------------------------------

    async def receive(self, data: bytes) -> OKMessage | ErrorMessage:
        """Take a message of another worker in this run."""
        try:
            missing = await self._receive(pickle.loads(data))
        except Exception as error:
            # The sender raises it where its task can see it.
            return error_message(error)
        return cast(OKMessage, {"status": "OK", "missing": missing})

    async def _receive(self, message: Message) -> list[int]:
        self.raise_if_closed()
        if isinstance(message, Mapping):
            return sorted(self._consumer.seal(message))
        try:
            await self._consumer.receive(message)
        except Exception:
            self.raise_if_closed()  # what has ended the run meanwhile says more
            raise
        return []

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
            reason = f"output {partition_id} is needed once more"
            sync(self._worker.loop, self._begin_again, reason)
            raise Reschedule() from None
        except Exception:
            self.raise_if_closed()  # what was read of a run that had ended may have made no sense
            raise
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

    async def _begin_again(self, reason: str) -> None:
        """Have the scheduler begin a new run, unless it has done so."""
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

    def task_done(self, key: Key) -> None:
        """A task that had read outputs is in memory: let its shards go."""
        if finished := self._consumer.task_done(key):
            self._exchange.discard_soon(finished)


def _exception_of(reply: ErrorMessage) -> Exception:
    _, exception, _ = clean_exception(**reply)
    assert isinstance(exception, Exception)
    return exception
