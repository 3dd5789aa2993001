"""Describe what all processes are waiting for, when an operation hangs."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any

from distributed import Client

from dask_gpurt.chaos.faults import Site
from dask_gpurt.dask_hooks.shuffle import active_runs

#: Maximum number of tasks and coroutines described per process.
MAX_DESCRIBED = 60


def describe(site: Site) -> str:
    """Describe scheduler, workers and this process: stacks, and tasks that are not in memory."""
    sections = [("scheduler", _scheduler(site))]
    replies = site.ask(describe_worker)
    for address in site.addresses():
        sections.append(
            (f"worker {address}", replies.get(address, "does not answer: stopped, or its loop is"))
        )
    sections.append(("nannies", "\n".join(site.log.lines)))
    sections.append(("client: threads", threads()))
    return "\n".join(f"==== {title}\n{text}\n" for title, text in sections)


def threads() -> str:
    """Return the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"-- {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def coroutines() -> str:
    """Return the stacks of the tasks of this event loop."""
    out = io.StringIO()
    for task in list(asyncio.all_tasks())[:MAX_DESCRIBED]:
        task.print_stack(file=out)
    return out.getvalue()


def _scheduler(site: Site) -> str:
    try:
        found: str = site.client.sync(_ask_scheduler, site.client, callback_timeout=10)
    except (OSError, TimeoutError) as error:
        return f"does not answer: {error!r}"
    return found


async def _ask_scheduler(client: Client) -> str:
    said: str = await client.run_on_scheduler(describe_scheduler)
    return said


async def describe_scheduler(dask_scheduler: Any) -> str:
    """Describe the workers, and each task that is not in memory with the tasks that it waits for."""
    waiting = [task for task in dask_scheduler.tasks.values() if task.state not in ("memory", "forgotten")]
    lines = [_describe_task(task) for task in waiting[:MAX_DESCRIBED]]
    more = [f"and {len(waiting) - MAX_DESCRIBED} more"] if len(waiting) > MAX_DESCRIBED else []
    return "\n".join([*_describe_workers(dask_scheduler), *lines, *more, coroutines()])


def _describe_workers(scheduler: Any) -> Iterable[str]:
    for address, worker in scheduler.workers.items():
        yield f"{address}: {worker.status.name}, {len(worker.processing)} tasks, seen {worker.last_seen:.1f}"


def _describe_task(task: Any) -> str:
    where = f" on {task.processing_on.address}" if task.processing_on else ""
    missing = [str(other.key) for other in task.waiting_on or ()]
    waits = f", waits for {len(missing)}: {', '.join(missing[:3])}" if missing else ""
    return f"{task.key}: {task.state}{where}{waits}"


async def describe_worker(dask_worker: Any) -> str:
    """Describe a worker's tasks, runs and pools, with the stacks of its threads and coroutines."""
    state = dask_worker.state
    lines = [f"state: {dask_worker.status.name}, {len(state.tasks)} tasks"]
    for name in ("executing", "long_running", "ready", "waiting", "in_flight_tasks", "missing_dep_flight"):
        if found := [str(task.key) for task in list(getattr(state, name, ()))[:MAX_DESCRIBED]]:
            lines.append(f"{name}: {', '.join(found)}")
    if (shuffles := dask_worker.plugins.get("shuffle")) is not None:
        lines += [f"run: {run!r}" for run in active_runs(shuffles).values()]
    if hasattr(
        runtime := dask_worker.plugins.get("gpurt"), "exchange"
    ):  # missing while it is being switched on
        lines.append(f"pools: {runtime.exchange.pools.describe()}")
        lines += [f"{part}: {known}" for part, known in runtime.waiting().items()]
    return "\n".join([*lines, "coroutines:", coroutines(), "threads:", threads()])
