"""Define simulated tasks: their dependencies, durations and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulate.clock import Name
from dask_gpurt.dask_hooks.types import Alias, GraphNode, Task, TaskRef


@dataclass(frozen=True, slots=True)
class Work:
    """Describe a task.

    Parameters
    ----------
    key
        A stringified tuple: ``('prefix-token', 0)``.
    seconds
        Its duration on a worker of speed 1.
    workspace
        Bytes that it needs while running, besides its inputs and its result.
    worker
        The number of the only worker that may run it; None if any worker may.
    alias
        Whether it only names its one input, as graphs on persisted collections do.
    """

    key: Name
    needs: tuple[Name, ...]
    seconds: float
    nbytes: int
    workspace: int = 0
    worker: int | None = None
    alias: bool = False

    def task(self) -> GraphNode:
        """Return the task for Dask's scheduler. A task without inputs is a data producer, like a read."""
        if self.alias:
            return Alias(self.key, *self.needs)
        return Task(
            self.key, _do_nothing, *[TaskRef(need) for need in self.needs], _data_producer=not self.needs
        )


def _do_nothing(*inputs: object) -> None:
    """Serve as the function of all tasks; never called."""


@dataclass(frozen=True)
class Submission:
    """Describe a graph that a client submits when the previous one has finished.

    Parameters
    ----------
    works
        Its tasks, which may need results kept from earlier submissions.
    keep
        Whether the client keeps the results, as after ``persist``.
    """

    works: Sequence[Work]
    wanted: frozenset[Name]
    keep: bool = False


@dataclass(frozen=True)
class Workload:
    """Hold graphs that a client submits one after the other."""

    name: str
    submissions: Sequence[Submission]

    @property
    def works(self) -> dict[str, Work]:
        """Return all tasks by their keys."""
        return {work.key: work for submission in self.submissions for work in submission.works}
