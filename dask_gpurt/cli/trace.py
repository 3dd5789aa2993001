"""Run ``dask gpurt trace``: record a trace of a cluster for some seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click
from dask.utils import format_time
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dask_gpurt.cli.cluster import connected
from dask_gpurt.client import traces
from dask_gpurt.monitor.trace import StepSummary, Trace

#: Maximum number of printed steps; the longest come first.
PRINTED_STEPS = 20


@click.command(short_help="Record a cluster for some seconds, for Perfetto.")
@click.option("--scheduler", metavar="ADDRESS", required=True, help="The scheduler of the cluster.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=20.0, show_default=True)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("trace.json"),
    show_default=True,
    help="The file; gzipped if it ends in .gz.",
)
def trace(scheduler: str, seconds: float, out: Path) -> None:
    """Record a trace of a cluster for some seconds, for https://ui.perfetto.dev.

    The trace shows tasks by thread, the steps of shuffles, spilling, waits, decisions and faults of all
    workers and the scheduler. ctrl-C ends it early, and writes the events so far.
    """
    with connected(scheduler) as client:
        recorded = traces.trace(out, client)
        try:
            with recorded:
                click.echo(f"recording for {format_time(seconds)}", err=True)
                try:
                    time.sleep(seconds)
                except KeyboardInterrupt:
                    click.echo("ended early", err=True)
        except (RuntimeError, FileNotFoundError, IsADirectoryError) as error:
            raise click.ClickException(str(error)) from error
    print_trace(recorded.found)
    click.echo(f"{out} is for https://ui.perfetto.dev")


def print_trace(found: Trace) -> None:
    """Print the longest steps of a trace, and what it lacks."""
    console = Console(highlight=False)
    summary = found.summary()
    if summary:
        console.print(_table(summary))
    else:
        console.print("no task ran, and nothing was moved: run something on the cluster meanwhile")
    for sentence in found.lacks():
        console.print(f"{sentence}.", style="red", markup=False)


def _table(summary: Sequence[StepSummary]) -> Table:
    table = Table("where", "step", "times", "seconds", "longest", box=SIMPLE_HEAD)
    for row in summary[:PRINTED_STEPS]:
        table.add_row(
            row.process, row.step, str(row.times), format_time(row.seconds), format_time(row.longest)
        )
    return table
