"""Measure and simulate placement on two or four hosts with links of known speed.

    python -m benchmarks.two_hosts --pairs 10 --json two-hosts.json
    python -m benchmarks.two_hosts --hosts 4 --links 0.1 --json four-hosts.json

Two clusters, with and without placement, run at the same time on the same hosts, network namespaces of this
machine; the runtime is on in both. Two hosts share a link; each of four has its own to a switch. The clusters
take turns, in an order that alternates. Results must be equal. After its pairs each workload runs three more
times without placement to record its graphs, which are then simulated with the measured speeds of links and
the recorded durations of tasks.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from dask.utils import parse_bytes
from distributed import Client
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import split_list, write
from benchmarks.placement.simulator import measure_overheads
from benchmarks.two_hosts import simulated
from benchmarks.two_hosts.clusters import SIDES, Plan, addresses, bytes_between, clusters
from benchmarks.two_hosts.figures import Run, by_link, cell, table
from benchmarks.two_hosts.recorded import Recorder, Recording, take
from benchmarks.two_hosts.speeds import measure_speeds
from benchmarks.two_hosts.workloads import WORKLOADS, Setting
from dask_gpurt.cli.environment import environment

#: Bytes per second of a link in one direction, by name.
LINKS: Mapping[str, int | None] = {"0.1": 10**8, "1": 10**9, "unlimited": None}
#: Instead of a link: all workers on one host.
SAME_HOST = "same-host"
#: Runs of each workload to record without placement and to simulate.
RECORDED = 3
#: Width of the table in characters, also in a file.
WIDTH = 130


@contextmanager
def prepared(
    client: Client, name: str, scale: float, turn: int, scratch: Path
) -> Iterator[tuple[Setting, Any]]:
    """Hold the data of a workload while it runs, on the same workers on both sides in a turn."""
    setting = Setting(client, addresses(client), scale, turn, scratch)
    with client.as_current():
        yield setting, WORKLOADS[name].prepare(setting)


def timed(client: Client, name: str, scale: float, side: str, turn: int, scratch: Path) -> tuple[Run, int]:
    """Run a workload, and return the timed run and its result."""
    with prepared(client, name, scale, turn, scratch) as (setting, data):
        before = counts(client)
        start = time.perf_counter()
        result = WORKLOADS[name].run(setting, data)
        seconds = time.perf_counter() - start
        cores, sent = (now - then for now, then in zip(counts(client), before, strict=True))
    return Run(side, turn, seconds, cores, int(sent)), result


def counts(client: Client) -> tuple[float, int]:
    """Return the CPU seconds, and the bytes between the hosts so far."""
    workers: Mapping[str, float] = client.run(time.process_time)
    scheduler: float = client.run_on_scheduler(time.process_time)
    return scheduler + sum(workers.values()), bytes_between(client)


def measure(sides: Mapping[str, Client], name: str, pairs: int, scale: float, scratch: Path) -> list[Run]:
    """Run a workload on both sides in turn.

    Raises
    ------
    ValueError
        If the sides have computed different results.
    """
    runs: list[Run] = []
    for turn in range(pairs + 1):
        results = set()
        for side in SIDES if turn % 2 else reversed(SIDES):
            run, result = timed(sides[side], name, scale, side, turn, scratch)
            runs.append(run)
            results.add(result)
        if len(results) > 1:
            raise ValueError(f"{name}: results differ between sides: {results}")
    return runs


def record(client: Client, name: str, scale: float, turn: int, scratch: Path) -> Recording:
    """Run a workload once more, and return its recording."""
    with prepared(client, name, scale, turn, scratch) as (setting, data):
        client.register_plugin(Recorder(), name=Recorder.name)
        try:
            WORKLOADS[name].run(setting, data)
            recording: Recording = client.run_on_scheduler(take)
        finally:
            client.unregister_scheduler_plugin(Recorder.name)
    return recording


def on_link(link: str, plan: Plan, names: Sequence[str], pairs: int, scale: float) -> dict[str, Any]:
    """Return the cells of a link, the measured bandwidths, and the fallbacks of placement."""
    cells, said = [], Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, clusters(plan, Path(folder)) as sides:
        workers = addresses(sides["off"])
        with sides["off"].as_current():
            speeds, overheads = measure_speeds(sides["off"], workers), measure_overheads(sides["off"])
        for name in names:
            runs = measure(sides, name, pairs, scale, Path(folder))
            recordings = [
                record(sides["off"], name, scale, turn, Path(folder))
                for turn in range(1, min(pairs, RECORDED) + 1)
            ]
            virtual = [
                simulated.seconds(name, each, workers, speeds, overheads, plan.memory_limit)
                for each in recordings
            ]
            cells.append(cell(link, name, runs, virtual))
            ratio = cells[-1]["measured"]["ratio"]
            said.print(f"{link}, {name}: {ratio:.2f}, simulated {cells[-1]['simulated']:.2f}", style="dim")
        return {
            "cells": cells,
            "bandwidths": speeds.bandwidths(),
            "engaged": sides["on"].run_on_scheduler(_engaged),
            "fallbacks": fallbacks(sides["on"]),
        }


def _engaged(dask_scheduler: Any) -> float:
    """Return how often placement has engaged."""
    counters = dask_scheduler.extensions["gpurt"].metrics.snapshot()["counters"]
    return float(counters.get("placement.engaged", 0))


def fallbacks(client: Client) -> dict[str, Any]:
    """Return the choices that fell back to Dask, with reasons."""
    known = dask_gpurt.report(client).fallbacks.to_dict()
    return {what: told for what, told in known.items() if what.startswith("placement")}


@click.command(help=__doc__.partition("\n")[0])
@click.option(
    "--hosts",
    default="2",
    show_default=True,
    type=click.Choice(["2", "4"]),
    help="Two joined by a link, or four with a link each to a switch.",
)
@click.option(
    "--pairs", default=10, show_default=True, type=click.IntRange(min=2), help="Pairs after the first."
)
@click.option(
    "--links",
    default=",".join(LINKS),
    show_default=True,
    callback=split_list([*LINKS, SAME_HOST]),
    help=f"In GB/s; {SAME_HOST} puts all workers on one host.",
)
@click.option(
    "--workloads",
    "names",
    default=",".join(WORKLOADS),
    show_default=True,
    callback=split_list(list(WORKLOADS)),
)
@click.option("--scale", default=1.0, show_default=True, help="Factor on the size of the data.")
@click.option("--memory-limit", default="2 GiB", show_default=True, help="Memory of a worker.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    hosts: str,
    pairs: int,
    links: Sequence[str],
    names: Sequence[str],
    scale: float,
    memory_limit: str,
    output: Path | None,
) -> None:
    began, memory = os.getloadavg(), parse_bytes(memory_limit)
    plans = {link: Plan(int(hosts), LINKS.get(link), memory, link == SAME_HOST) for link in links}
    found = {link: on_link(link, plan, names, pairs, scale) for link, plan in plans.items()}
    cells = [each for of in found.values() for each in of.pop("cells")]
    console = Console(width=WIDTH)
    console.print(table(cells))
    for link, means in by_link(cells).items():
        console.print(
            f"{link}: {means['measured']:.2f} measured, {means['simulated']:.2f} simulated (geometric "
            f"means), the worst {means['worst']:.2f}"
        )
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {
            "hosts": int(hosts),
            "pairs": pairs,
            "scale": scale,
            "memory_limit": memory,
        },
        "load": {"before": began, "after": os.getloadavg()},
        "links": {link: {**means, **found[link]} for link, means in by_link(cells).items()},
        "cells": cells,
        **environment(),
    }
    write(results, output)


if __name__ == "__main__":
    main()
