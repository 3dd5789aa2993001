"""Run ``dask gpurt overlap``: print statistics of kernels beside a shuffle, and the setting of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import dask_gpurt
from dask_gpurt.cli.cluster import connected
from dask_gpurt.config.cache_files import directory
from dask_gpurt.device.discover import cuda_missing
from dask_gpurt.overlap.governor import rows
from dask_gpurt.overlap.statistics_file import StatisticsFileError, load

#: Maximum number of printed decisions of a worker, the latest.
PRINTED_DECISIONS = 10
COLUMNS = ("setting", "samples", "compute", "adds", "total", "at best … at worst", "why")


@click.command(short_help="Show statistics of kernels beside shuffles.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--scheduler", metavar="ADDRESS", help="Ask the workers of this cluster instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def overlap(files: tuple[Path, ...], scheduler: str | None, as_json: bool) -> None:
    """Show the statistics of kernels beside a shuffle, the setting of each, and why.

    FILES are written by workers in the mode "adaptive". [default: all in the cache directory]
    """
    if scheduler:
        found = of_cluster(scheduler)
    else:
        found = of_files(files or sorted(directory().glob("overlap-*.json")))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    if not found and (missing := cuda_missing()):
        click.echo(
            f"there is no GPU here ({missing}), so no kernels are confined: there is nothing to show. "
            "To query a cluster, use --scheduler ADDRESS"
        )
    elif not found:
        click.echo(
            f"there are no statistics: no file in {directory()}. "
            "Workers whose 'gpurt.overlap.mode' is 'adaptive' write one"
        )
    elif scheduler and all(is_off(part) for part in found.values()):
        click.echo(
            f"no kernel is confined on the {len(found)} workers, which have no GPU or the mode 'off': "
            "there is nothing to show"
        )
        return
    for name, part in found.items():
        print_part(name, part)


def of_files(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the statistics in files, by path.

    Parameters
    ----------
    files
        Files written by workers.

    Raises
    ------
    click.ClickException
        If one of them cannot be read.
    """
    found = {}
    for path in files:
        try:
            cache_key, known = load(path)
        except StatisticsFileError as error:
            raise click.ClickException(str(error)) from error
        found[str(path)] = {"learned on": str(cache_key), "kernels": rows(known)}
    return found


def of_cluster(address: str) -> dict[str, dict[str, Any]]:
    """Return the statistics of the workers of a cluster, by address."""
    with connected(address) as client:
        workers = dask_gpurt.report(client).workers
    return {worker: dict(reply.overlap) for worker, reply in workers.items() if reply.overlap}


def is_off(part: Mapping[str, Any]) -> bool:
    """Return whether compute on a worker is not, and never was, confined."""
    return part["mode"] == "off" and not part["kernels"] and not part["decisions"]


def print_part(name: str, part: Mapping[str, Any]) -> None:
    """Print the statistics of one file or one worker.

    Parameters
    ----------
    name
        The path of the file or the address of the worker.
    part
        A value of :func:`of_files` or :func:`of_cluster`.
    """
    console = Console(highlight=False)
    console.print(name, style="bold", markup=False)
    if "learned on" in part:
        console.print(f"learned on {part['learned on']}", markup=False)
    if "mode" in part:
        spent = f", trials have cost {part['lost']:.2f} of {part['elapsed']:.2f} s" if part["elapsed"] else ""
        console.print(f"mode {part['mode']}{spent}", markup=False)
    if part["kernels"]:
        console.print(_table(part["kernels"]))
    for entry in part.get("decisions", [])[-PRINTED_DECISIONS:]:
        at = datetime.fromtimestamp(entry["at"]).strftime("%H:%M:%S")
        console.print(
            f"{at} {entry['subject']}: {entry['decided']}, {entry['why']}", style="dim", markup=False
        )


def _table(kernels: Iterable[Mapping[str, Any]]) -> Table:
    """Build a table of kernels, with the setting in use in bold.

    Speeds are relative to running alone, times to a step with priority only.
    """
    table = Table("kernel", *COLUMNS, box=None)
    last = None
    for row in kernels:
        name, last = (row["kernel"] if row["kernel"] != last else ""), row["kernel"]
        table.add_row(name, *_cells(row), style="bold" if row["used"] else "")
    return table


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["total"] is None:
        return row["setting"], str(row["samples"]), "", "", "", "", row["why"]
    shares = (f"{row[name]:.0%}" for name in ("compute", "adds", "total"))
    return (
        row["setting"],
        str(row["samples"]),
        *shares,
        f"{row['best']:.0%} … {row['worst']:.0%}",
        row["why"],
    )
