"""Define the messages between the workers of a run, their errors, and what transfers tell the scheduler.

Messages are sent through Dask's ``shuffle_receive``; docs/design/exactly-once.md says when each is. The
result of a transfer reaches the scheduler as metadata of its task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from dask.typing import Key
from distributed.core import ErrorMessage, OKMessage, clean_exception
from distributed.exceptions import Reschedule

from dask_gpurt.dask_hooks.shuffle import P2PConsistencyError, ShuffleClosedError
from dask_gpurt.dask_hooks.types import SchedulerTask
from dask_gpurt.exchange import Attempt, Commit, ExchangeClosed, PeerLost, Shard
from dask_gpurt.shuffle.balance import InputSizes


class Seal(NamedTuple):
    """Ask a worker to deliver its queued offers, and then to seal its shares."""

    succeeded: Mapping[int, Attempt]


class Retire(NamedTuple):
    """Ask a former owner to release shares that have been replaced."""

    shares: frozenset[int]


#: The messages between workers.
Message = list[Shard | Commit] | Seal | Retire
#: The errors of sending to a worker that has left, is closing, or has ended its part of the run.
GONE = (PeerLost, ExchangeClosed, P2PConsistencyError)


class RunInterrupted(ShuffleClosedError, Reschedule):
    """Reschedule the calling task, because the run restarts or the barrier has to be repeated.

    Dask's transfer and unpack tasks reschedule themselves on ShuffleClosedError, its barrier task on
    Reschedule.
    """


class Stale(Exception):
    """The owners have changed since the barrier started."""


def error_of(reply: OKMessage | ErrorMessage) -> Exception | None:
    """Return the error of a reply; None if it succeeded."""
    if reply["status"] == "OK":
        return None
    _, exception, _ = clean_exception(**cast(ErrorMessage, reply))
    assert isinstance(exception, Exception)
    return exception


# ---- to the scheduler --------------------------------------------------------------------------

#: Key in a task's metadata for the result of a transfer.
NOTE = "gpurt-transferred"
#: Key in a task's metadata for the sizes of the outputs in the input of a transfer.
SIZES = "gpurt-output-sizes"


class Transferred(int):
    """Hold the result of a transfer task: the id of its run, as Dask expects, and the successful attempt."""

    source: int
    attempt: Attempt
    key: Key
    producer: str

    def __new__(cls, run_id: int, source: int, attempt: Attempt, key: Key, producer: str) -> Transferred:
        self = super().__new__(cls, run_id)
        self.source, self.attempt, self.key, self.producer = source, attempt, key, producer
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Transferred, (int(self), self.source, self.attempt, self.key, self.producer)

    def note(self, metadata: dict[str, Any]) -> None:
        """Add the result to the task's metadata, which reach the scheduler when the task ends."""
        metadata[NOTE] = int(self), self.source, *self.attempt, self.producer

    @classmethod
    def of_task(cls, task: SchedulerTask, run_id: int) -> Transferred | None:
        """Return the result of a task in memory from its metadata; None if that is missing or stale.

        ``run_id``: the expected run.
        """
        if task.state != "memory" or (note := (task.metadata or {}).get(NOTE)) is None:
            return None
        of_run, source, dispatch, retry, producer = note
        # A task that was dispatched again may still have the metadata of the previous dispatch.
        if of_run != run_id or dispatch != task.run_id:
            return None
        return cls(run_id, source, Attempt(dispatch, retry), task.key, producer)


def note_sizes(metadata: dict[str, Any], result: Transferred, sizes: InputSizes) -> None:
    """Add the sizes of outputs to the task's metadata; see :meth:`Transferred.note`."""
    heavy = [number for pair in sizes.heavy.items() for number in pair]
    which = int(result), result.source, result.attempt.dispatch
    metadata[SIZES] = *which, sizes.nbytes, sizes.whole, heavy


def sizes_of_task(task: SchedulerTask, run_id: int) -> tuple[int, InputSizes] | None:
    """Return the input of a transfer and the sizes of outputs in it, from the task's metadata.

    Returns None if they are missing, of another run, or of a previous dispatch of the task.
    """
    if (note := (task.metadata or {}).get(SIZES)) is None:
        return None
    of_run, source, dispatch, nbytes, whole, heavy = note
    if of_run != run_id or dispatch != task.run_id:
        return None
    pairs = zip(heavy[::2], heavy[1::2], strict=True)
    return source, InputSizes(nbytes, dict(pairs), whole)
