"""Tell which attempt at an input has succeeded: the result of a transfer, and its note for the scheduler."""

from __future__ import annotations

from typing import Any

from dask.typing import Key

from dask_gpurt.dask_hooks.types import SchedulerTask
from dask_gpurt.exchange import Attempt

#: Among the metadata of a task, the note of what a transfer has returned.
NOTE = "gpurt-transferred"


class Transferred(int):
    """The result of a transfer task: the id of its run, and which attempt at which input has succeeded.

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
