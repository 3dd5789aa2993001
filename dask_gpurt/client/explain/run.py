"""Measure where the time of a computation went, by the steps of its plan. Pure.

The times are those of Dask's task stream, whose keys name the expressions of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dask.utils import format_bytes, format_time

from dask_gpurt.client.explain.plan import Explanation, Printed, prefix_of

#: The most steps that are printed; those that took longest come first.
PRINTED_STEPS = 12


@dataclass(frozen=True)
class StepRun:
    """Say what the tasks of one step of a plan have taken.

    ``label``: what the step does.
    ``tasks``: the number of its tasks.
    ``computing``, ``waiting``: the seconds in which they computed, and in which their inputs came from other
    workers, over all threads.
    ``bytes``: the size of their results.
    """

    label: str
    tasks: int
    computing: float
    waiting: float
    bytes: int


@dataclass(frozen=True)
class Run:
    """Hold what was measured in one computation.

    ``seconds``: the time from the call to the result in the client.
    ``first``, ``last``: when its first task began, and its last one ended, in seconds since the call.
    ``threads``: the number of task threads of the cluster.
    ``steps``: the steps, those that took longest first.
    """

    seconds: float
    first: float
    last: float
    threads: int
    steps: tuple[StepRun, ...]

    @property
    def computing(self) -> float:
        """Return the seconds of all tasks."""
        return sum(step.computing for step in self.steps)

    @property
    def busy(self) -> float:
        """Return the share of the time between first and last task in which threads computed."""
        available = (self.last - self.first) * self.threads
        return min(1.0, self.computing / available) if available > 0 else 0.0


def measure(
    rows: Iterable[Mapping[str, Any]], plan: Explanation, *, began: float, ended: float, threads: int
) -> Run:
    """Sum up the task stream of a computation by the steps of its plan.

    ``rows``: rows of Dask's task stream; those of other computations are left out.
    ``plan``: the plan.
    ``began``, ``ended``: the call and the return, on the clock of the task stream, in seconds.
    ``threads``: the number of task threads.
    """
    sums: dict[str, list[float]] = {}
    first, last = ended, began
    for row in rows:
        prefix = prefix_of(row["key"])
        label = plan.names.get(prefix) or prefix.rpartition("-")[0] or prefix
        into = sums.setdefault(label, [0, 0.0, 0.0, 0])
        spans = [(each["action"], each["start"], each["stop"]) for each in row["startstops"]]
        into[0] += 1
        into[1] += sum(stop - start for action, start, stop in spans if action == "compute")
        into[2] += sum(stop - start for action, start, stop in spans if action == "transfer")
        into[3] += row.get("nbytes") or 0
        first = min([first, *(start for _, start, _ in spans)])
        last = max([last, *(stop for _, _, stop in spans)])
    steps = [
        StepRun(label, int(n), computing, waiting, int(size))
        for label, (n, computing, waiting, size) in sums.items()
    ]
    steps.sort(key=lambda step: -(step.computing + step.waiting))
    return Run(ended - began, max(0.0, first - began), max(0.0, last - began), max(1, threads), tuple(steps))


@dataclass(frozen=True, repr=False)
class Analysis(Printed):
    """Hold the plan of a computation that has run, what was measured, and what to change.

    ``plan``: the plan.
    ``run``: what was measured.
    ``advice``: the changes of the program that would help most, in plain words.
    """

    plan: Explanation
    run: Run
    advice: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield the lines."""
        run = self.run
        yield repr(self.plan)
        yield (
            f"ran in {format_time(run.seconds)}: {format_time(run.first)} until the first task, "
            f"{format_time(max(0.0, run.seconds - run.last))} from the last one to the result; "
            f"{run.threads} threads were busy {run.busy:.0%} of the time between"
        )
        yield "steps:"
        for step in run.steps[:PRINTED_STEPS]:
            waiting = f", waiting for inputs {format_time(step.waiting)}" if step.waiting > 0.01 else ""
            yield (
                f"  {format_time(step.computing)} in {step.tasks:,} x {step.label}{waiting}, "
                f"results of {format_bytes(step.bytes)}"
            )
        if len(run.steps) > PRINTED_STEPS:
            yield f"  and {len(run.steps) - PRINTED_STEPS} more"
        if self.advice:
            yield "what would help most:"
            yield from (f"  {number}. {text}" for number, text in enumerate(self.advice, 1))
