"""Say which changes of a program would help most. Pure.

Each hint looks at a plan and its run, and says in how many of the run's seconds the change matters. The
seconds order the hints; they do not promise a gain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from dask.utils import format_bytes, format_time

from dask_gpurt.client.explain.plan import Explanation
from dask_gpurt.client.explain.run import Run

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
