"""Measure where the time of a computation went, by the steps of its plan, and say what would help most. Pure.

The times are those of Dask's task stream, whose keys name the expressions of the plan. Each hint looks at a
plan and its run, and says in how many of the run's seconds the change of the program matters. The seconds
order the hints; they do not promise a gain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    # Dask corrects the times of workers by offsets of their clocks, which are not exact.
    first, last = max(began, first), min(ended, last)
    return Run(ended - began, first - began, last - began, max(1, threads), tuple(steps))


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


# ---- hints ---------------------------------------------------------------------------------------


#: The number of hints that are given.
MOST_HINTS = 3
#: The share of a run's time below which a hint is left out.
LEAST_SHARE = 0.05
#: A task below this many seconds costs about as much as it computes, if there are this many of them.
SHORT_TASK_S, MANY_TASKS = 0.010, 100
#: The bytes of a result from which the way to the client is worth a hint.
LARGE_RESULT = 64 << 20

#: A hint: the seconds of the run that it is about, and its text.
Hint = tuple[float, str]


def advise(plan: Explanation, run: Run) -> tuple[str, ...]:
    """Return the hints that matter most, the first one first."""
    hints = [hint for find in HINTS for hint in find(plan, run)]
    hints = sorted((hint for hint in hints if hint[0] >= LEAST_SHARE * run.seconds), reverse=True)
    return tuple(dict.fromkeys(text for _, text in hints[:MOST_HINTS]))


def functions_of_the_user(plan: Explanation, run: Run) -> Iterator[Hint]:
    """Find Python functions that are called for each row or partition."""
    for step in run.steps:
        for name in re.findall(r"apply [^,]+", step.label):
            text = (
                f"`{name}` is part of tasks that took {format_time(step.computing)}: expressions of columns, "
                "such as `where`, `isin`, `str` and arithmetic, run without Python on each row"
            )
            yield step.computing / run.threads, text


def short_tasks(plan: Explanation, run: Run) -> Iterator[Hint]:
    """Find steps of many tasks that hardly do anything."""
    for step in run.steps:
        mean = step.computing / max(1, step.tasks)
        if step.tasks >= MANY_TASKS and mean < SHORT_TASK_S:
            text = (
                f"{step.tasks:,} tasks of {step.label} take {format_time(mean)} each, no longer than it "
                "takes to schedule one: read fewer, larger partitions (`blocksize`), or `repartition`"
            )
            yield step.tasks * SHORT_TASK_S / run.threads, text


def reads_left(plan: Explanation, run: Run) -> Iterator[Hint]:
    """Find tables that stay in the partitions that Dask makes, although these are more than threads."""
    for read in plan.reads:
        if read.partitions > run.threads and "depend on partitions" in read.why:
            taken = sum(step.computing for step in run.steps if f"read {read.table}" in step.label)
            text = (
                f"{read.table} is read in {read.partitions} partitions, since the result may depend on them "
                "(an order or labels of rows): sort the result, or reset its index, at the end"
            )
            yield taken / run.threads / 2, text


def waiting_for_inputs(plan: Explanation, run: Run) -> Iterator[Hint]:
    """Find steps that wait for data from other workers."""
    for step in run.steps:
        if step.waiting > step.computing:
            text = (
                f"{step.label} waited {format_time(step.waiting)} for data from other workers: leave out "
                "rows and columns before it, or `persist` what is used again"
            )
            yield step.waiting / run.threads, text


def idle_threads(plan: Explanation, run: Run) -> Iterator[Hint]:
    """Find out whether there was too little to do at a time."""
    partitions = max((read.partitions for read in plan.reads), default=0)
    if run.busy < 0.5 and 0 < partitions < run.threads:
        text = (
            f"{run.threads} threads were busy {run.busy:.0%} of the time, since the largest table has "
            f"{partitions} partitions: write it as more files, or read smaller ones (`blocksize`)"
        )
        yield (run.last - run.first) * (1 - run.busy), text


def large_result(plan: Explanation, run: Run) -> Iterator[Hint]:
    """Find results that take long on their way to the client."""
    after = run.seconds - run.last
    size = max((step.bytes / max(1, step.tasks) for step in run.steps), default=0)
    if after > 0 and size >= LARGE_RESULT:
        text = (
            f"the result of {format_bytes(int(size))} took {format_time(after)} to the client: aggregate it "
            "first, `persist` it on the cluster, or write it with `to_parquet`"
        )
        yield after, text


def planning(plan: Explanation, run: Run) -> Iterator[Hint]:
    """Find out whether planning took a large part."""
    if plan.seconds > 0.2 * run.seconds:
        text = (
            f"planning took {format_time(plan.seconds)} of {format_time(run.seconds)}; the next run of an "
            "equal plan finds it in the cache"
        )
        yield plan.seconds, text


def shuffles_left(plan: Explanation, run: Run) -> Iterator[Hint]:
    """Find shuffles that do not go through the runtime."""
    for text in plan.methods:
        taken = sum(step.computing + step.waiting for step in run.steps if "shuffle" in step.label)
        yield taken / run.threads, f"Dask did {text}; `dask gpurt doctor` says how to change that"


#: All that is looked for.
HINTS: tuple[Callable[[Explanation, Run], Iterator[Hint]], ...] = (
    *(functions_of_the_user, short_tasks, reads_left, waiting_for_inputs, idle_threads, large_result),
    *(planning, shuffles_left),
)
