"""Compare makespans on real clusters with Dask's choices and with ours, on skewed data.

    python -m benchmarks.placement.clusters --repeat 5 --json placement-real.json

Two clusters of four single-threaded processes run at the same time, both with the runtime and its shuffle on,
one of them with placement. They take turns, in an order that alternates. The first run on each is reported
separately: it imports modules, and task durations are still unknown. Results must be equal.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
from dask.utils import format_bytes, parse_bytes
from distributed import Client
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import dask_gpurt
from benchmarks.common.commandline import write
from benchmarks.common.faults import differing_links
from benchmarks.common.moved import moved
from benchmarks.placement import simulator
from benchmarks.placement.workloads import WORKLOADS, Workload
from dask_gpurt.cli.environment import environment

#: The sides, by what decides.
SIDES = ("stock", "gpurt")
#: A worker's memory, large enough that none spills: a multiple of its part of the data, and a minimum, since
#: a process that has imported RAPIDS takes 0.8 GiB without any data.
MEMORY_FACTOR, MIN_MEMORY_BYTES = 8, 4 << 30
#: The width of the table, in characters: on a terminal, and in a file too.
WIDTH = 116


@dataclass(frozen=True)
class Run:
    """Record a timed run. ``turn`` 0 is the first run of its workload on its cluster.

    ``cpu`` is the CPU time of all processes of the cluster, in seconds.
    """

    workload: str
    side: str
    turn: int
    seconds: float
    moved: int
    cpu: float


@contextlib.contextmanager
def clusters(workers: int, nbytes: int) -> Iterator[dict[str, Client]]:
    """Yield a cluster for each side."""
    with contextlib.ExitStack() as stack:
        yield {side: stack.enter_context(cluster(workers, nbytes, side == "gpurt")) for side in SIDES}


@contextlib.contextmanager
def cluster(workers: int, nbytes: int, placement: bool) -> Iterator[Client]:
    """Run a cluster with the runtime on, and yield its client."""
    settings = {"gpurt.placement.enabled": placement}
    memory = max(MIN_MEMORY_BYTES, MEMORY_FACTOR * nbytes // workers)
    with differing_links(), dask.config.set(settings), simulator.cluster(workers, memory) as client:
        dask_gpurt.enable(client)
        try:
            yield client
        finally:
            dask_gpurt.disable(client)


def measure(clients: Mapping[str, Client], name: str, nbytes: int, repeat: int) -> list[Run]:
    """Run a workload on all sides in turn.

    Raises
    ------
    ValueError
        If the sides have computed different results.
    """
    workload, runs, results = WORKLOADS[name], [], []
    for turn in range(repeat + 1):
        for side in SIDES if turn % 2 else reversed(SIDES):
            with prepared(clients[side], workload, nbytes, turn) as data:
                run, result = timed(clients[side], name, side, turn, data)
            runs.append(run)
            results.append(result)
    if any(result != results[0] for result in results):
        raise ValueError(f"{name}: results differ between sides: {results}")
    return runs


@contextlib.contextmanager
def prepared(client: Client, workload: Workload, nbytes: int, turn: int) -> Iterator[Any]:
    """Hold the data of a workload while it runs, on the same workers on both sides in a turn."""
    with client.as_current():
        yield workload.prepare(client, nbytes, random.Random(turn))


def timed(client: Client, name: str, side: str, turn: int, data: Any) -> tuple[Run, Any]:
    """Run a workload, and return the timed run and its result."""
    before, spent = moved(client), cpu(client)
    with client.as_current():
        start = time.perf_counter()
        result = WORKLOADS[name].run(client, data)
        seconds = time.perf_counter() - start
    spent = cpu(client) - spent
    return Run(name, side, turn, seconds, moved(client) - before, spent), result


def cpu(client: Client) -> float:
    """Return the CPU seconds so far of workers and of this process (client and scheduler)."""
    return time.process_time() + sum(client.run(time.process_time).values())


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Return a workload's figures: medians and spread of warm runs, and how often ours was as fast."""
    warm = {side: [run.seconds for run in runs if run.side == side and run.turn] for side in SIDES}
    pairs = [stock / ours for stock, ours in zip(*warm.values(), strict=True)]
    medians = {side: statistics.median(seconds) for side, seconds in warm.items()}
    return {
        "workload": runs[0].workload,
        **{
            side: {
                "first": next(run.seconds for run in runs if run.side == side),
                "median": medians[side],
                "min": min(seconds),
                "max": max(seconds),
                "moved": statistics.median(run.moved for run in runs if run.side == side and run.turn),
                "cpu": statistics.median(run.cpu for run in runs if run.side == side and run.turn),
            }
            for side, seconds in warm.items()
        },
        "ratio": medians["stock"] / medians["gpurt"],
        "pairs": {"min": min(pairs), "max": max(pairs)},
    }


def table(figures: Sequence[Mapping[str, Any]]) -> Table:
    """Format the figures as a table."""
    made = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="Medians: seconds (least to most); MiB moved; CPU seconds",
    )
    made.add_column("workload", no_wrap=True)
    for heading in ("Dask's", "moved", "cores", "ours", "moved", "cores", "as fast", "in pairs"):
        made.add_column(heading, justify="right", no_wrap=True)
    for each in figures:
        sides = (
            cell
            for side in SIDES
            for cell in (
                f"{each[side]['median']:.2f} ({each[side]['min']:.2f} to {each[side]['max']:.2f})",
                f"{each[side]['moved'] / 2**20:.0f}",
                f"{each[side]['cpu']:.1f}",
            )
        )
        low, high = each["pairs"]["min"], each["pairs"]["max"]
        made.add_row(each["workload"], *sides, f"{each['ratio']:.2f}", f"{low:.2f} to {high:.2f}")
    return made


def fallbacks(clients: Mapping[str, Client]) -> dict[str, Any]:
    """Return the placement decisions that fell back to Dask, with reasons."""
    known = dask_gpurt.report(clients["gpurt"]).fallbacks.to_dict()
    return {what: told for what, told in known.items() if what.startswith("placement")}


@click.command(help=__doc__.partition("\n")[0])
@click.option("--workers", default=4, show_default=True)
@click.option("--size", default="256MiB", show_default=True, callback=lambda _, __, text: parse_bytes(text))
@click.option("--repeat", default=5, show_default=True, type=click.IntRange(min=1), help="Warm runs.")
@click.option("--workload", "names", multiple=True, type=click.Choice(list(WORKLOADS)), help="[default: all]")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(workers: int, size: int, repeat: int, names: Sequence[str], path: Path | None) -> None:
    runs, figures, console = [], [], Console(width=WIDTH)
    with clusters(workers, size) as clients:
        for name in names or WORKLOADS:
            runs += (measured := measure(clients, name, size, repeat))
            figures.append(summarise(measured))
            Console(stderr=True).print(f"{name}: {figures[-1]['ratio']:.2f}", style="dim")
        left_to_dask = fallbacks(clients)
    console.print(f"{format_bytes(size)} on {workers} workers each")
    console.print(table(figures))
    if left_to_dask:
        console.print(f"Left to Dask: {left_to_dask}")
    if path:
        results = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "parameters": {"workers": workers, "size": size, "repeat": repeat},
            "load": os.getloadavg()[0],
            "figures": figures,
            "fallbacks": left_to_dask,
            "runs": [asdict(run) for run in runs],
            **environment(),
        }
        write(results, path)


if __name__ == "__main__":
    main()
