"""Measure the CPU time of pages for Prometheus, of a worker and of the scheduler.

    python -m benchmarks.observe.pages --repeat 50 --json results.json

The pages are made after a shuffle, in each process as for a request.
"""

from __future__ import annotations

import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask.dataframe as dd
import pandas as pd
from distributed import Client, wait
from prometheus_client import generate_latest

import dask_gpurt
from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from dask_gpurt.cli.cluster import local_cluster


def figure(repeat: int) -> dict[str, Any]:
    """Return the CPU milliseconds of the page of this process, and its bytes."""
    taken, text = [], b""
    for _number in range(repeat):
        began = time.thread_time()
        text = generate_latest()
        taken.append(1e3 * (time.thread_time() - began))
    return {"median_ms": statistics.median(taken), "max_ms": max(taken), "bytes": len(text)}


@click.command(help=__doc__.partition("\n")[0])
@click.option(
    "--repeat", type=click.IntRange(min=2), default=50, show_default=True, help="Measurements of each page."
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(repeat: int, output: Path | None) -> None:
    with local_cluster("pandas", 2) as cluster, Client(cluster) as client:
        dask_gpurt.enable(client)
        frame = dd.from_pandas(pd.DataFrame({"key": range(100_000)}), npartitions=200)
        shuffled = client.persist(frame.shuffle("key"))
        wait(shuffled)
        figures = {
            "scheduler": client.run_on_scheduler(figure, repeat),
            "worker": next(iter(client.run(figure, repeat).values())),
        }
        dask_gpurt.disable(client)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    write({"date": date, "parameters": {"repeat": repeat}, **environment(), "figures": figures}, output)
    for name, of in figures.items():
        click.echo(f"{name}: {of['median_ms']:.2f} ms, at most {of['max_ms']:.2f}, {of['bytes']:,} bytes")


if __name__ == "__main__":
    main()
