"""Describe the successful attempt at an input: the result of a transfer, and its notes for the scheduler."""

from __future__ import annotations

from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks.types import SchedulerTask
from dask_gpurt.exchange import Attempt
from dask_gpurt.shuffle.balance import InputSizes

#: Among the metadata of a task, the note of what a transfer has returned.
NOTE = "gpurt-transferred"
#: The same for how large the outputs are in the input of a transfer.
SIZES = "gpurt-output-sizes"


class Transferred(int):
    """Hold the result of a transfer task: the id of its run, and the attempt that succeeded at which input.

    Attributes
    ----------
    source, attempt
        The input, and the attempt.
    key
        The task.
    producer
        The address of its worker.
    """

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
        """Note the result in what a worker tells the scheduler with the end of its task."""
        metadata[NOTE] = int(self), self.source, *self.attempt, self.producer

    @classmethod
    def of_task(cls, task: SchedulerTask, run_id: int) -> Transferred | None:
        """Return the result of a task in memory, as its worker has noted it; None if that can not be told.

        Parameters
        ----------
        run_id
            The run that it has to be of.
        """
        if task.state != "memory" or (note := (task.metadata or {}).get(NOTE)) is None:
            return None
        of_run, source, dispatch, retry, producer = note
        # A task that was sent to a worker again may have the note of the time before.
        if of_run != run_id or dispatch != task.run_id:
            return None
        return cls(run_id, source, Attempt(dispatch, retry), task.key, producer)


def note_sizes(metadata: dict[str, Any], result: Transferred, sizes: InputSizes) -> None:
    """Note the sizes of outputs in what a worker tells the scheduler with the end of a transfer."""
    heavy = [number for pair in sizes.heavy.items() for number in pair]
    which = int(result), result.source, result.attempt.dispatch
    metadata[SIZES] = *which, sizes.nbytes, sizes.seconds, sizes.whole, heavy, sizes.arriving


def sizes_of_task(task: SchedulerTask, run_id: int) -> tuple[int, InputSizes] | None:
    """Return the input of a transfer and the sizes of outputs in it, as its worker has noted them.

    None where they can not be told, or are of another run, or of a time before the task was sent to a worker
    once more.
    """
    if (note := (task.metadata or {}).get(SIZES)) is None:
        return None
    of_run, source, dispatch, nbytes, seconds, whole, heavy, arriving = note
    if of_run != run_id or dispatch != task.run_id:
        return None
    pairs = zip(heavy[::2], heavy[1::2], strict=True)
    return source, InputSizes(nbytes, dict(pairs), seconds, whole, arriving)
