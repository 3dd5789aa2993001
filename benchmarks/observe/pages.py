"""Measure the CPU time on event loops of the JSON API's replies and of pages for Prometheus.

    python -m benchmarks.observe.pages --workers 2,64,256 --repeat 50 --json results.json

A real scheduler with two workers runs a shuffle, with placement on. Its memory ledger is filled with the
tiers of further, simulated workers, each with partitions of 20 prefixes in two tiers, and its history with
shuffles in which all of them took part. Replies are made on its event loop as for a request, and encoded as
JSON. ``report`` and ``topology`` cover the two real workers only.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
import pandas as pd
from distributed import Client, wait
from prometheus_client import generate_latest
from rich.console import Console
from rich.table import Table

import dask_gpurt
from benchmarks.common.commandline import write
from benchmarks.common.faults import differing_links
from dask_gpurt.cli.cluster import local_cluster
from dask_gpurt.cli.environment import environment
from dask_gpurt.memory.ledger import Label, Ledger
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.monitor.dashboard.shuffles import MAX_SHUFFLES, ShuffleLog
from dask_gpurt.monitor.json_api import RESOURCES, JsonApi, Page
from dask_gpurt.observe.progress import Figures

#: Task prefixes with partitions on each worker, and tasks of each kind in the shuffle.
PREFIXES, PARTITIONS = 20, 200

Figure = dict[str, Any]


def populate(runtime: Any, workers: int) -> ShuffleLog:
    """Apply ledgers of simulated workers to a scheduler, as their heartbeats would; log their shuffles."""
    log = ShuffleLog()
    for shuffle in range(MAX_SHUFFLES):
        log.begins(f"{shuffle:032x}", shuffle, time.time(), ["input"], "barrier", ["output"])
    for number in range(workers):
        ledger = Ledger(dict.fromkeys(Tier, 2**40))
        for prefix in range(PREFIXES):
            for tier in (Tier.DEVICE, Tier.DISK):
                ledger.add(tier, Label("partitions", f"prefix-{prefix}"), 2**30)
        address = f"tcp://10.0.{number // 250}.{number % 250}:40000"
        runtime.cluster_memory.apply(address, ledger.snapshot())
        figures = asdict(Figures(outputs=1, rows=number, largest=number, largest_rows=number))
        log.reported(address, [(f"{shuffle:032x}", shuffle, figures) for shuffle in range(MAX_SHUFFLES)])
    return log


def figure(reply: Callable[[], Any], repeat: int) -> Figure:
    """Return the CPU milliseconds of a reply and its encoding, and its bytes."""
    taken, text = [], ""
    for _number in range(repeat):
        began = time.thread_time()
        text = json.dumps(reply(), allow_nan=False)
        taken.append(1e3 * (time.thread_time() - began))
    return {"median_ms": statistics.median(taken), "max_ms": max(taken), "bytes": len(text)}


def replies(api: JsonApi, repeat: int) -> dict[str, Figure]:
    """Return the figures of all resources, and of a page for Prometheus."""
    figures = {name: figure(partial(answer, api, Page()), repeat) for name, answer in RESOURCES.items()}
    return {**figures, "metrics of the scheduler": figure(page, repeat)}


def page() -> str:
    """Return the page for Prometheus of this process."""
    return generate_latest().decode()


def on_worker(repeat: int) -> Figure:
    """Return the figures of a worker's page."""
    return figure(page, repeat)


def measure(client: Client, workers: int, repeat: int) -> dict[str, Figure]:
    """Return all figures of a cluster with ``workers`` simulated workers added."""

    def measured(dask_scheduler: Any) -> dict[str, Figure]:
        runtime = dask_scheduler.extensions["gpurt"]
        return replies(JsonApi(runtime, populate(runtime, workers)), repeat)

    figures: dict[str, Figure] = client.run_on_scheduler(measured)
    on_workers = client.run(on_worker, repeat)
    return {**figures, "metrics of a worker": next(iter(on_workers.values()))}


def show(figures: dict[int, dict[str, Figure]]) -> None:
    """Print the figures."""
    table = Table("workers", "reply", "median ms", "max ms", "kB")
    for workers, by_reply in figures.items():
        for name, of in by_reply.items():
            row = (f"{of['median_ms']:.2f}", f"{of['max_ms']:.2f}", f"{of['bytes'] / 1e3:.0f}")
            table.add_row(str(workers), name, *row)
    Console().print(table)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--workers", default="2,64,256", show_default=True, help="Numbers of workers, ascending.")
@click.option(
    "--repeat", type=click.IntRange(min=2), default=50, show_default=True, help="Measurements of each reply."
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(workers: str, repeat: int, output: Path | None) -> None:
    numbers = [int(number) for number in workers.split(",")]
    with (
        differing_links(),
        dask.config.set({"gpurt.placement.enabled": True}),
        local_cluster("pandas", 2) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        frame = dd.from_pandas(pd.DataFrame({"key": range(100_000)}), npartitions=PARTITIONS)
        shuffled = client.persist(frame.shuffle("key"))
        wait(shuffled)
        figures = {number: measure(client, number - 2, repeat) for number in numbers}
        dask_gpurt.disable(client)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {"workers": numbers, "repeat": repeat, "prefixes": PREFIXES, "partitions": PARTITIONS},
        **environment(),
        "figures": figures,
    }
    write(results, output)
    show(figures)


if __name__ == "__main__":
    main()
