"""Measure the overhead of a task by thread, with the runtime and without.

    python -m benchmarks.overlap.overhead --tasks 2000 --repeat 8 --json results.json
    python -m benchmarks.overlap.overhead --workloads frames --functions 20

One cluster of two single-threaded workers has the runtime off, on without tiers, and on with its defaults, in
turns. Tasks do next to nothing:

``ready``
    independent tasks, all of which are on the workers;
``chains``
    many chains of tasks;
``frames``
    as ``chains``, with frames of a few kB, so that sizes of results are measured.

CPU time is read from each thread's own clock, so other load on the host matters little; ratios compare
consecutive runs. Call counts come from one more run under a profiler, which slows down Python calls more than
anything else. They do not depend on the host, and show where to look.
"""

from __future__ import annotations

import cProfile
import pstats
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
import pandas as pd
from dask.delayed import delayed
from distributed import Client, wait
from rich.console import Console
from rich.table import Table

import dask_gpurt
from benchmarks.common.commandline import split_list, write
from benchmarks.common.environment import environment
from benchmarks.overlap.between_tasks import make_frame, pass_on, ratio, ready
from dask_gpurt.cli.cluster import local_cluster

WORKERS = 2
#: Tasks per chain.
CHAIN = 20
#: Seconds between checks whether all results are released.
LOOK_INTERVAL_S = 0.02
#: Settings of each way to switch the runtime on; None leaves it off. The first is the baseline.
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "no tiers": {"gpurt.memory.tiers": False},
    "on": {},
}
#: Kinds of threads: the event loops of scheduler and workers, task threads, and the rest.
SCHEDULER, LOOP, TASKS, OTHERS = "scheduler", "worker loop", "tasks", "others"
#: All threads together, and messages between workers and scheduler.
ALL, MESSAGES = "all", "messages"
#: Attribute that keeps a profiler between two calls.
_PROFILER = "overhead_profiler"


def copy_frame(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of a frame."""
    return frame.copy()


def _chains(client: Client, tasks: int, first: Callable[[int], Any], then: Callable[[Any], Any]) -> None:
    ends = []
    for seed in random.sample(range(2**31), tasks // CHAIN):
        value = delayed(first, pure=False)(seed)
        for _number in range(CHAIN - 1):
            value = delayed(then, pure=False)(value)
        ends.append(value)
    wait(client.compute(ends, optimize_graph=False))


def chains(client: Client, tasks: int) -> None:
    """Compute chains of tasks."""
    _chains(client, tasks, pass_on, pass_on)


def frames(client: Client, tasks: int) -> None:
    """Compute chains of frames."""
    _chains(client, tasks, make_frame, copy_frame)


WORKLOADS: dict[str, Callable[[Client, int], None]] = {
    "ready": lambda client, tasks: ready(client, tasks, True),
    "chains": chains,
    "frames": frames,
}


# ---- in the processes of the cluster ---------------------------------------------------------------


def worker_seconds() -> dict[str, float]:
    """Return the CPU seconds of a worker's threads; must run on its event loop."""
    found = {LOOP: 0.0, TASKS: 0.0, OTHERS: 0.0}
    for thread in threading.enumerate():
        if thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            found[_thread_kind(thread)] += time.clock_gettime(clock)
    return found


def _thread_kind(thread: threading.Thread) -> str:
    if thread is threading.current_thread():
        return LOOP
    return TASKS if "Dask-Default-Threads" in thread.name else OTHERS


def keys_left(dask_worker: Any) -> int:
    """Return the number of tasks in a worker's state."""
    return len(dask_worker.state.tasks)


def worker_messages(dask_worker: Any) -> int:
    """Return the number of batches that a worker has sent to the scheduler."""
    return int(dask_worker.batched_stream.batch_count)


def scheduler_figures(dask_scheduler: Any) -> tuple[float, int]:
    """Return the CPU seconds of the scheduler's thread, and its batches sent to workers."""
    return time.thread_time(), sum(stream.batch_count for stream in dask_scheduler.stream_comms.values())


def _begin(server: Any, thread: str) -> None:
    profiler = cProfile.Profile()
    setattr(server, _PROFILER, profiler)
    if thread == TASKS:
        server.executors["default"].submit(profiler.enable).result()
    else:
        profiler.enable()


def _end(server: Any, thread: str) -> dict[Any, Any]:
    profiler = getattr(server, _PROFILER)
    delattr(server, _PROFILER)
    if thread == TASKS:
        server.executors["default"].submit(profiler.disable).result()
    else:
        profiler.disable()
    found: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    return {place: figures[:4] for place, figures in found.items()}


def begin_on_worker(dask_worker: Any, thread: str) -> None:
    """Start profiling a thread of a worker."""
    _begin(dask_worker, thread)


def end_on_worker(dask_worker: Any, thread: str) -> dict[Any, Any]:
    """Stop profiling; return primitive and total calls, and own and cumulative seconds, by function."""
    return _end(dask_worker, thread)


def begin_on_scheduler(dask_scheduler: Any) -> None:
    """Start profiling the scheduler."""
    _begin(dask_scheduler, SCHEDULER)


def end_on_scheduler(dask_scheduler: Any) -> dict[Any, Any]:
    """Stop profiling the scheduler, as :func:`end_on_worker`."""
    return _end(dask_scheduler, SCHEDULER)


# ---- from the client -------------------------------------------------------------------------------


def run(client: Client, workload: str, tasks: int) -> None:
    """Run a workload once, and block until the workers have released its results."""
    WORKLOADS[workload](client, tasks)
    while any(client.run(keys_left).values()):
        time.sleep(LOOK_INTERVAL_S)


def measure(client: Client, workload: str, tasks: int) -> dict[str, float]:
    """Run a workload once; return CPU microseconds by thread, and messages, per task."""
    before = _figures(client)
    run(client, workload, tasks)
    after = _figures(client)
    return {name: (after[name] - before[name]) / tasks for name in after}


def _figures(client: Client) -> dict[str, float]:
    """Return CPU microseconds by thread, and messages between workers and scheduler, so far."""
    seconds, written = client.run_on_scheduler(scheduler_figures)
    found = defaultdict[str, float](float, {SCHEDULER: 1e6 * seconds})
    for threads in client.run(worker_seconds).values():
        for thread, its_seconds in threads.items():
            found[thread] += 1e6 * its_seconds
    found[ALL] = sum(found.values())
    found[MESSAGES] = written + sum(client.run(worker_messages).values())
    return dict(found)


def profile(client: Client, workload: str, tasks: int, thread: str) -> dict[Any, tuple[float, float, float]]:
    """Run a workload once with a thread profiled; return calls, own and cumulative seconds by function."""
    if thread == SCHEDULER:
        client.run_on_scheduler(begin_on_scheduler)
    else:
        client.run(begin_on_worker, thread=thread)
    run(client, workload, tasks)
    if thread == SCHEDULER:
        profiles = [client.run_on_scheduler(end_on_scheduler)]
    else:
        profiles = list(client.run(end_on_worker, thread=thread).values())
    found: defaultdict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for each in profiles:
        for place, (_, calls, own, cumulative) in each.items():
            for at, figure in enumerate((calls, own, cumulative)):
                found[place][at] += figure
    return {place: (calls, own, cumulative) for place, (calls, own, cumulative) in found.items()}


@contextmanager
def switched(client: Client, contender: str) -> Iterator[None]:
    """Switch the runtime on with a contender's settings."""
    settings = CONTENDERS[contender]
    if settings is None:
        yield
        return
    with dask.config.set(settings):
        dask_gpurt.enable(client)
    try:
        yield
    finally:
        dask_gpurt.disable(client)


def compare(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians of each workload, contender and figure, and of the baseline."""
    rows = []
    for workload in dict.fromkeys(run["workload"] for run in runs):
        of = {
            contender: [
                run["figures"] for run in runs if (run["workload"], run["contender"]) == (workload, contender)
            ]
            for contender in CONTENDERS
        }
        for contender in list(of)[1:]:
            for name in (SCHEDULER, LOOP, TASKS, ALL, MESSAGES):  # OTHERS may be 0
                on, off = ([figures[name] for figures in of[which]] for which in (contender, "off"))
                rows.append({"workload": workload, "contender": contender, "figure": name, **ratio(on, off)})
    return rows


def show(rows: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]) -> None:
    """Print the figures."""
    table = Table("workload", "runtime", "µs a task of", "it", "off", "ratio", "95%")
    for row in rows:
        low, high = row["interval"]
        figures = (f"{row['on']:.2f}", f"{row['off']:.2f}", f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}")
        table.add_row(row["workload"], row["contender"], row["figure"], *figures)
    Console().print(table)
    table = Table("workload", "runtime", "thread", "calls a task")
    for row in calls:
        table.add_row(row["workload"], row["contender"], row["thread"], f"{row['calls']:.0f}")
    Console().print(table)


def _profiles(
    client: Client, contender: str, workload: str, tasks: int, functions: int
) -> Iterator[dict[str, Any]]:
    for thread in (SCHEDULER, LOOP, TASKS):
        found = profile(client, workload, tasks, thread)
        longest = sorted(found.items(), key=lambda item: -item[1][1])[:functions]
        yield {
            "workload": workload,
            "contender": contender,
            "thread": thread,
            "calls": sum(calls for calls, _, _ in found.values()) / tasks,
            "functions": [
                {
                    "function": f"{Path(file).name}:{line}({name})",
                    "calls": calls / tasks,
                    "own_us": 1e6 * own / tasks,
                    "us": 1e6 * cumulative / tasks,
                }
                for (file, line, name), (calls, own, cumulative) in longest
            ],
        }


@click.command(help=__doc__.partition("\n")[0])
@click.option("--tasks", type=click.IntRange(min=CHAIN), default=2000, show_default=True, help="Of a run.")
@click.option("--repeat", type=click.IntRange(min=1), default=8, show_default=True, help="Runs of each.")
@click.option("--functions", default=25, show_default=True, help="Functions of each profile to keep.")
@click.option(
    "--workloads", callback=split_list(list(WORKLOADS)), default=",".join(WORKLOADS), show_default=True
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(tasks: int, repeat: int, functions: int, workloads: list[str], output: Path | None) -> None:
    runs: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    # Connect by address, so that the client has an event loop of its own and not the scheduler's.
    with local_cluster("pandas", WORKERS, None) as cluster, Client(cluster.scheduler_address) as client:
        for number in range(repeat + 1):
            for contender in CONTENDERS if number % 2 else reversed(CONTENDERS):
                with switched(client, contender):
                    for workload in workloads:
                        run(client, workload, 10 * CHAIN)  # warms up
                        if number < repeat:
                            figures = measure(client, workload, tasks)
                            runs.append({"workload": workload, "contender": contender, "figures": figures})
                        else:
                            calls += _profiles(client, contender, workload, tasks, functions)
    rows = compare(runs)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {"tasks": tasks, "repeat": repeat, "workers": WORKERS},
        **environment(),
        "figures": rows,
        "calls": calls,
        "runs": runs,
    }
    write(results, output)
    show(rows, calls)


if __name__ == "__main__":
    main()
