"""Identify the reasons why a shuffle goes through the runtime, or is left to Dask.

``dask gpurt doctor`` and :func:`dask_gpurt.report` show the count of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

from dask_gpurt.observe.counting import Metrics

#: The topic of Dask's events with which clients report their choices to the scheduler.
METHOD_TOPIC = "gpurt-shuffle-methods"


class MethodChoice(Enum):
    """Identify a choice of the shuffle method by a stable id and a human-readable text.

    Parameters
    ----------
    id
        The last part of the metrics ``shuffle.taken.{why}`` and ``shuffle.left.{why}``.
    taken
        Whether the shuffle goes through the runtime.
    text
        The reason, as a clause.
    """

    DEFAULT = "default", True, "no method is set"
    NAMED = "named", True, "the method is 'gpurt'"
    CONFIGURED_TASKS = "configured-tasks", True, "'tasks' is configured"
    ARGUMENT_TASKS = "argument-tasks", True, "'tasks' is an argument, and 'gpurt.takeover' is 'all'"

    ONLY_CONFIGURED = "only-configured", False, "'tasks' is an argument, and 'gpurt.takeover' is not 'all'"
    TAKEOVER_OFF = "takeover-off", False, "'gpurt.takeover' is false"
    EXPLICIT_COMMS = "explicit-comms", False, "'explicit-comms' of dask-cuda is on"
    LOCAL_SCHEDULER = "local-scheduler", False, "'scheduler' is one of Dask's own in the client's process"
    UNSUPPORTED_FRAMES = "unsupported-frames", False, "the frames are neither pandas nor cudf"
    COLUMN_LEVELS = "column-levels", False, "the columns have several levels"
    COLUMN_TAKEN = "column-taken", False, "a column has the name under which Dask adds output partitions"
    OTHER_METHOD = "other-method", False, "another Dask method is set"

    def __init__(self, id: str, taken: bool, text: str):
        self.id = id
        self.taken = taken
        self.text = text

    def count(self, metrics: Metrics) -> None:
        """Count this choice."""
        if self.taken:
            metrics.add("shuffle.taken.{why}", 1, self.id)
        else:
            metrics.add("shuffle.left.{why}", 1, self.id)

    def counted(self, counters: Mapping[str, float]) -> int:
        """Return the count of this choice in the counters of a report."""
        return int(counters.get(f"shuffle.{'taken' if self.taken else 'left'}.{self.id}", 0))


class Choices:
    """Report choices of shuffle methods, and record those that are made in planning a query.

    A plan that another process has made is used without choosing again; then the recorded ones are reported.

    Parameters
    ----------
    report
        Called with the name of an expression and the choice for it.
    """

    def __init__(self, report: Callable[[str, MethodChoice], None]):
        self._report = report
        self._recorded: ContextVar[list[tuple[str, MethodChoice]] | None] = ContextVar(
            "gpurt-choices", default=None
        )

    def __call__(self, expression: str, choice: MethodChoice) -> None:
        """Report a choice, and record it if that is asked for."""
        if (recorded := self._recorded.get()) is not None:
            recorded.append((expression, choice))
        self._report(expression, choice)

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[str, MethodChoice]]]:
        """Record the choices that are made in the context."""
        found: list[tuple[str, MethodChoice]] = []
        token = self._recorded.set(found)
        try:
            yield found
        finally:
            self._recorded.reset(token)

    def report_again(self, recorded: Iterable[tuple[str, MethodChoice]]) -> None:
        """Report recorded choices again."""
        for expression, choice in recorded:
            self._report(expression, choice)
