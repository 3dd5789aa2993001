"""Time the gap between two tasks of a worker, with the runtime and without.

    python -m benchmarks.overlap.between_tasks --tasks 2000 --repeat 10 --json results.json
    python -m benchmarks.overlap.between_tasks --workloads chain,frames --workers 2

One cluster has the runtime switched on and off in turns, so that both run under the same load. Tasks do next
to nothing:

``chain``
    each task needs the previous one, so the scheduler must learn of its end before it sends the next;
``independent``
    independent tasks, of which the scheduler sends a worker one more than it computes;
``ready``
    independent tasks, all of which are on the worker;
``frames``
    as ``chain``, with small frames of many columns and a second frame as input, as in joins;
``shuffle``
    shuffles of a few rows, by the runtime or by Dask's p2p.

A gap is the time from the end of a task's function to the start of the next one on the same thread, as
workers report it to the scheduler. The CPU time per task, of the workers and of the process with scheduler
and client, is shown too: on a host with other load it varies less from run to run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.delayed import delayed
from distributed import Client, wait
from rich.console import Console
from rich.table import Table

import dask_gpurt
from benchmarks.common.budget import Step, TaskLog, take_log
from benchmarks.common.commandline import split_list, write
from benchmarks.common.environment import environment
from dask_gpurt.cli.cluster import local_cluster

#: Columns and rows of a frame.
COLUMNS, ROWS = 16, 10
#: Bootstrap samples for the intervals of ratios.
RESAMPLES = 2000


def pass_on(value: Any, *_: Any) -> Any:
    """Return the argument."""
    return value


def make_frame(seed: int) -> pd.DataFrame:
    """Return a small frame with many columns."""
    return pd.DataFrame({f"c{i}": np.arange(ROWS) + seed for i in range(COLUMNS)})


def next_frame(frame: pd.DataFrame, _: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of a frame."""
    return frame.copy()


def chain(client: Client, tasks: int, _: bool) -> None:
    """Compute a chain of tasks."""
    value = delayed(pass_on)(random.random())
    for _number in range(tasks - 1):
        value = delayed(pass_on)(value)
    wait(client.compute(value, optimize_graph=False))


def independent(client: Client, tasks: int, _: bool) -> None:
    """Compute independent tasks."""
    wait(client.map(pass_on, [random.random() for _number in range(tasks)], pure=False))


def ready(client: Client, tasks: int, _: bool) -> None:
    """Compute independent tasks that bypass the scheduler's queue."""
    workers = list(client.scheduler_info(n_workers=-1)["workers"])  # restricted tasks are never queued
    wait(client.map(pass_on, [random.random() for _number in range(tasks)], pure=False, workers=workers))


def frames(client: Client, tasks: int, _: bool) -> None:
    """Compute a chain of frames, all of which also need one further frame."""
    seed = random.randrange(2**31)
    frame, other = delayed(make_frame)(seed), delayed(make_frame)(seed + 1)
    for _number in range(tasks - 2):
        frame = delayed(next_frame)(frame, other)
    wait(client.compute(frame, optimize_graph=False))


def shuffle(client: Client, tasks: int, on: bool) -> None:
    """Compute shuffles of 32 inputs and outputs, one after the other."""
    partitions = 32
    for _number in range(max(1, tasks // (2 * partitions))):
        seed = random.randrange(2**31)
        frame = dd.from_map(make_frame, range(seed, seed + partitions), meta=make_frame(0).iloc[:0])
        with dask.config.set({"dataframe.shuffle.method": "gpurt" if on else "p2p"}):
            wait(client.persist(frame.shuffle("c0")))


WORKLOADS: dict[str, Callable[[Client, int, bool], None]] = {
    "chain": chain,
    "independent": independent,
    "ready": ready,
    "frames": frames,
    "shuffle": shuffle,
}


@dataclass(frozen=True)
class Run:
    """Record one run of a workload.

    Attributes
    ----------
    on
        Whether the runtime was on.
    gap_ms
        Milliseconds between two tasks of a thread: median and 90th percentile.
    wall_us, workers_us, rest_us
        Microseconds per task: wall time, and CPU time of the workers and of the process with scheduler and
        client.
    """

    workload: str
    on: bool
    gap_ms: float
    gap_p90_ms: float
    wall_us: float
    workers_us: float
    rest_us: float


def gaps(steps: Iterable[Step]) -> list[float]:
    """Return the seconds between consecutive tasks of each thread."""
    by_thread: dict[tuple[str, int], list[Step]] = {}
    for step in steps:
        if step.action == "compute":
            by_thread.setdefault(step.thread, []).append(step)
    found = []
    for of in by_thread.values():
        of.sort(key=lambda step: step.start)
        found += [max(0.0, after.start - before.stop) for before, after in pairwise(of)]
    return found


def measure(client: Client, workload: str, tasks: int, on: bool) -> Run:
    """Run a workload once."""
    take_log(client)
    workers, rest, began = _processor_seconds(client), time.process_time(), time.perf_counter()
    WORKLOADS[workload](client, tasks, on)
    wall, rest = time.perf_counter() - began, time.process_time() - rest
    workers = _processor_seconds(client) - workers
    steps = take_log(client).steps
    count = sum(step.action == "compute" for step in steps)
    found = gaps(steps)
    *_, p90 = statistics.quantiles(found, n=10)
    microseconds = 1e6 / count
    return Run(
        workload,
        on,
        1e3 * statistics.median(found),
        1e3 * p90,
        microseconds * wall,
        microseconds * workers,
        microseconds * rest,
    )


def _processor_seconds(client: Client) -> float:
    return float(sum(client.run(time.process_time).values()))


def compare(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the medians on and off, and their ratio with a 95% interval, by workload and figure."""
    compared: dict[str, dict[str, dict[str, Any]]] = {}
    for workload in dict.fromkeys(run.workload for run in runs):
        of = [run for run in runs if run.workload == workload]
        on, off = ([asdict(run) for run in of if run.on is which] for which in (True, False))
        compared[workload] = {
            name: ratio([one[name] for one in on], [one[name] for one in off])
            for name in ("gap_ms", "gap_p90_ms", "wall_us", "workers_us", "rest_us")
        }
    return compared


def ratio(on: list[float], off: list[float]) -> dict[str, Any]:
    """Return the median ratio of paired runs, with a 95% bootstrap interval."""
    draw, pairs = random.Random(0), list(zip(on, off, strict=True))
    ratios = sorted(
        statistics.median(a / b for a, b in draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)
    )
    return {
        "on": statistics.median(on),
        "off": statistics.median(off),
        "ratio": statistics.median(a / b for a, b in pairs),
        "interval": [ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES)]],
    }


def show(compared: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print the figures."""
    table = Table("workload", "figure", "on", "off", "ratio", "95%")
    for workload, figures in compared.items():
        for name, of in figures.items():
            low, high = of["interval"]
            row = (f"{of['on']:.2f}", f"{of['off']:.2f}", f"{of['ratio']:.2f}", f"{low:.2f} to {high:.2f}")
            table.add_row(workload, name, *row)
    Console().print(table)


@click.command(help=__doc__.partition("\n")[0])
@click.option(
    "--tasks", type=click.IntRange(min=100), default=2000, show_default=True, help="Tasks of a run."
)
@click.option("--repeat", type=click.IntRange(min=2), default=10, show_default=True, help="Pairs of runs.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option(
    "--workloads", callback=split_list(list(WORKLOADS)), default=",".join(WORKLOADS), show_default=True
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    tasks: int, repeat: int, workers: int, protocol: str | None, workloads: list[str], output: Path | None
) -> None:
    runs = []
    with local_cluster("pandas", workers, protocol) as cluster, Client(cluster) as client:
        client.register_plugin(TaskLog())
        for number in range(repeat):
            for on in (True, False) if number % 2 else (False, True):
                if on:
                    dask_gpurt.enable(client)
                for workload in workloads:
                    WORKLOADS[workload](client, 100, on)  # warms up
                    runs.append(measure(client, workload, tasks, on))
                if on:
                    dask_gpurt.disable(client)
    compared = compare(runs)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {"tasks": tasks, "repeat": repeat, "workers": workers, "protocol": protocol},
        **environment(),
        "figures": compared,
        "runs": [asdict(run) for run in runs],
    }
    write(results, output)
    show(compared)


if __name__ == "__main__":
    main()
