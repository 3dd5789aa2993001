"""Define tasks of known duration and size, without code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dask_gpurt.dask_hooks.graph import Task, TaskRef
from dask_gpurt.simulate.clock import Name


@dataclass(frozen=True, slots=True)
class Work:
    """Describe a task.

    Parameters
    ----------
    key
        Of the form of a stringified tuple: ``('prefix-token', 0)``.
    needs
        Keys of its inputs.
    seconds
        Its duration on a worker of speed 1.
    nbytes
        Bytes of its result.
    workspace
        Bytes that it needs beside its inputs and its result while it runs.
    worker
        The number of the only worker that may run it; any may if not given.
    shards
        Bytes that an output of one of the runtime's shuffles takes from each of the transfers, by their keys.
        It needs the barrier as an input, which needs the transfers.
    """

    key: Name
    needs: tuple[Name, ...]
    seconds: float
    nbytes: int
    workspace: int = 0
    worker: int | None = None
    shards: Mapping[Name, int] = field(default_factory=dict)

    def task(self) -> Task:
        """Return the task for Dask's scheduler; one without inputs is a data producer, as reading is."""
        return Task(
            self.key, _do_nothing, *[TaskRef(need) for need in self.needs], _data_producer=not self.needs
        )


def _do_nothing(*inputs: object) -> None:
    """Stand for the function of every task: it is never called."""


@dataclass(frozen=True)
class Submission:
    """Describe a graph that a client submits when the one before has ended.

    Parameters
    ----------
    works
        Its tasks; they may need tasks of earlier submissions that are kept.
    wanted
        Keys that the client waits for.
    keep
        Whether the client keeps the results, as after ``persist``.
    """

    works: Sequence[Work]
    wanted: frozenset[Name]
    keep: bool = False


@dataclass(frozen=True)
class Workload:
    """List graphs that a client submits one after the other."""

    name: str
    submissions: Sequence[Submission]

    @property
    def works(self) -> dict[str, Work]:
        """Return all tasks by their keys."""
        return {work.key: work for submission in self.submissions for work in submission.works}
