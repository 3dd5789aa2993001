"""Measure the cost of losing a worker during a shuffle, by the phase in which it is killed.

    python -m benchmarks.shuffle.recovery --workers 4 --methods gpurt,p2p --repeat 3 --json results.json

A worker is killed with SIGKILL half-way through the transfers, when the barrier begins, half-way through the
outputs, or once all outputs are in memory. Its nanny restarts it. The time from ``persist`` until all outputs
are in memory (again) is compared with that of an undisturbed shuffle on one worker less ("none"); "whole" is
an undisturbed shuffle on all workers. Every result is checked. The methods take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
from distributed import Client, SchedulerPlugin, wait
from rich.console import Console
from rich.table import Table

import dask_gpurt
from benchmarks.common.commandline import split_list, write
from benchmarks.common.environment import environment
from benchmarks.common.rows import fingerprints, make_random, totals
from dask_gpurt.cli.cluster import local_cluster

METHODS = ("gpurt", "p2p", "tasks")
#: Runs without a loss: with one worker less, and with all of them.
UNDISTURBED = ("none", "whole")
#: Phases in which a worker may be killed, after those.
PHASES = (*UNDISTURBED, "transfer", "barrier", "unpack", "after")
HIGHEST = 2**40
#: Seconds after which a run counts as hung.
LIMIT_S = 300.0


class KillAt(SchedulerPlugin):
    """Kill a worker when a shuffle reaches a phase.

    Parameters
    ----------
    phase
        One of :data:`PHASES`.
    half
        Half the number of transfers or outputs.
    """

    name = "benchmark-kill"

    def __init__(self, phase: str, half: int, pids: dict[str, int]):
        self.phase, self.half, self.pids = phase, half, pids
        self.done = 0
        self.killed: str | None = None

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        name = str(key[0] if isinstance(key, tuple) else key)
        if self.killed is not None or self.phase in UNDISTURBED:
            return
        if self.phase == "barrier":
            reached = name.startswith("shuffle-barrier-") and finish == "processing"
        else:
            prefix = {"transfer": "shuffle-transfer-", "unpack": ("gpurtshuffle-", "p2pshuffle-")}[self.phase]
            self.done += name.startswith(prefix) and finish == "memory"
            reached = self.done >= self.half
        if reached:
            self.killed = next(iter(self.pids))
            os.kill(self.pids[self.killed], signal.SIGKILL)


@dataclass(frozen=True)
class Run:
    """Record one shuffle."""

    method: str
    phase: str
    turn: int
    seconds: float
    right: bool


@contextlib.contextmanager
def cluster_of(method: str, workers: int, backend: str) -> Iterator[Client]:
    """Run a cluster with a shuffle method."""
    with (
        dask.config.set({"dataframe.shuffle.method": method}),
        local_cluster(backend, workers) as cluster,
        Client(cluster) as client,
    ):
        if method == "gpurt":
            dask_gpurt.enable(client)
        yield client


def shuffle(client: Client, method: str, partitions: int, rows: int, backend: str) -> Any:
    """Return a frame that tasks make, and its shuffle."""

    def make(part: int) -> Any:
        return make_random(part, rows, HIGHEST, backend)

    meta = make_random(0, 1, HIGHEST, backend).iloc[:0]
    frame = dd.from_map(make, range(partitions), meta=meta, enforce_metadata=False)
    return frame, frame.shuffle("key", shuffle_method=method)


def run(client: Client, method: str, phase: str, turn: int, size: tuple[int, int], backend: str) -> Run:
    """Shuffle once while a worker is killed, and compare the rows with the inputs."""
    partitions, rows = size
    frame, shuffled = shuffle(client, method, partitions, rows, backend)
    expected = totals(fingerprints(frame))
    pids: dict[str, int] = client.run(os.getpid)
    workers = len(pids)
    kills_itself = phase not in (*UNDISTURBED, "after")
    if kills_itself:
        client.register_plugin(KillAt(phase, partitions // 2, pids))
    start = time.perf_counter()
    out = shuffled.persist()
    wait(out, timeout=LIMIT_S)
    if phase == "after":
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        client.run_on_scheduler(_until_fewer, workers=workers)
        wait(out, timeout=LIMIT_S)
    seconds = time.perf_counter() - start
    right = totals(fingerprints(out)) == expected
    if kills_itself:
        client.unregister_scheduler_plugin(KillAt.name)
    del out
    client.wait_for_workers(workers, timeout=60)
    return Run(method, phase, turn, seconds, right)


async def _until_fewer(workers: int, dask_scheduler: Any) -> None:
    """Block until the scheduler notices the loss; until then it still counts the lost outputs."""
    while len(dask_scheduler.workers) >= workers:
        await asyncio.sleep(0.01)


@click.command()
@click.option("--workers", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--partitions", type=click.IntRange(min=2), default=32, show_default=True)
@click.option(
    "--rows", type=click.IntRange(min=1), default=500_000, show_default=True, help="Rows of a partition."
)
@click.option("--methods", default="gpurt,p2p", show_default=True, callback=split_list(METHODS))
@click.option("--phases", default=",".join(PHASES), show_default=True, callback=split_list(PHASES))
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--backend", type=click.Choice(["pandas", "cudf"]), default="pandas", show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    workers: int,
    partitions: int,
    rows: int,
    methods: list[str],
    phases: list[str],
    repeat: int,
    backend: str,
    output: Path | None,
) -> None:
    """Measure the cost of losing a worker during a shuffle."""
    runs: list[Run] = []
    parameters = {"workers": workers, "partitions": partitions, "rows": rows, "backend": backend}
    for turn, method, phase in itertools.product(range(repeat), methods, phases):
        with cluster_of(method, workers - (phase == "none"), backend) as client:
            run(client, method, "none", -1, (partitions, rows), backend)  # warms up
            runs.append(run(client, method, phase, turn, (partitions, rows), backend))
        # After each run: a later one may be cut off.
        date = datetime.now(UTC).isoformat(timespec="seconds")
        results = {"date": date, "parameters": parameters, **environment(), "runs": list(map(vars, runs))}
        write(results, output)
    _print(runs)


def _print(runs: list[Run]) -> None:
    table = Table("method", "killed", "seconds", "extra", "right")
    for method in dict.fromkeys(each.method for each in runs):
        seconds = {
            phase: sorted(each.seconds for each in runs if (each.method, each.phase) == (method, phase))
            for phase in dict.fromkeys(each.phase for each in runs)
        }
        base = seconds["none"][len(seconds["none"]) // 2] if seconds.get("none") else None
        for phase, found in seconds.items():
            middle = found[len(found) // 2]
            extra = "" if base is None else f"{middle / base - 1:+.0%}"
            right = all(each.right for each in runs if (each.method, each.phase) == (method, phase))
            spread = f"{middle:.2f} ({found[0]:.2f} to {found[-1]:.2f})"
            table.add_row(method, phase, spread, extra, "yes" if right else "NO")
    Console().print(table)


if __name__ == "__main__":
    main()
