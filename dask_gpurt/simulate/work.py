"""What there is to do: tasks of known length and size, without the code that would do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dask_gpurt.dask_hooks.graph import Task, TaskRef
from dask_gpurt.simulate.clock import Name


@dataclass(frozen=True, slots=True)
class Work:
    """A task.

    Parameters
    ----------
    key
        Of the form that a stringified tuple has: ``('prefix-token', 0)``.
    needs
        Keys of its inputs.
    seconds
        For how long it runs on a worker of speed 1.
    nbytes
        Size of its result.
    workspace
        Bytes that it takes beside its inputs and its result while it runs.
    """

    key: Name
    needs: tuple[Name, ...]
    seconds: float
    nbytes: int
    workspace: int = 0

    def task(self) -> Task:
        """What Dask's scheduler takes for it; what has no inputs makes data, as reading does."""
        return Task(
            self.key, _do_nothing, *[TaskRef(need) for need in self.needs], _data_producer=not self.needs
        )


def _do_nothing(*inputs: object) -> None:
    """The function of every task: it is never called."""


@dataclass(frozen=True)
class Submission:
    """A graph that a client submits when the one before is done.

    Parameters
    ----------
    works
        Its tasks; they may need those of earlier submissions that were kept.
    wanted
        Keys that the client waits for.
    keep
        Whether the client goes on wanting them, as after ``persist``.
    """

    works: Sequence[Work]
    wanted: frozenset[Name]
    keep: bool = False


@dataclass(frozen=True)
class Workload:
    """Graphs, one after the other."""

    name: str
    submissions: Sequence[Submission]

    @property
    def works(self) -> dict[str, Work]:
        """All tasks by their keys."""
        return {work.key: work for submission in self.submissions for work in submission.works}
