"""Simulate workloads on large clusters, with placement and as Dask is shipped, and compare the makespans.

    python -m benchmarks.placement.makespans --workers 256 --seeds 2000-2001 --json simulated-placement.json

Each run is simulated twice, the second time with the CPU time that the scheduler took in the first: choices,
work stealing and messages. The geometric means are over the seeds of a workload on a cluster, and over all of
them. Links, durations and graphs depend on the seed. Seeds from 2000 on were not used to choose rules.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click

from benchmarks.common.commandline import split_list, write
from benchmarks.simulate import SHAPES, WORKLOADS, Result, build_cluster, build_workload
from benchmarks.simulate.clock import DeadlockError
from benchmarks.simulate.placements import charged, simulate
from benchmarks.simulate.simulation import WorkloadFailed
from dask_gpurt.cli.environment import environment

#: Dask as shipped, the runtime with Dask's choices, and the runtime with placement.
SIDES = ("stock", "tiers", "gpurt")
#: A cluster, the number of its workers, a workload, and a seed.
Cell = tuple[str, int, str, int]


def run(job: tuple[Cell, str]) -> tuple[Cell, str, Result | None]:
    """Simulate a cell with one placement, its CPU time charged; None if Dask gives the workload up."""
    (shape, workers, name, seed), side = job
    cluster = build_cluster(shape, workers, seed=seed)
    workload = build_workload(name, cluster, seed=seed)
    try:
        first = simulate(cluster, workload, side)
        return *job, simulate(cluster, workload, side, overheads=charged(first)).result
    except (DeadlockError, WorkloadFailed):
        return *job, None


def row(cell: Cell, found: dict[str, Result | None]) -> dict[str, Any]:
    """Return the figures of a cell."""
    figures: dict[str, Any] = dict(zip(("cluster", "workers", "workload", "seed"), cell, strict=True))
    for side, result in found.items():
        figures[side] = result and {
            "makespan": round(result.makespan, 2),
            "between_hosts": result.between_hosts,
            "spilled": result.spilled,
            "over_memory": result.over_memory,
            "decision_us": round(result.decision_us, 1),
            "scheduler_us": round(result.scheduler_us, 1),
        }
    return figures


def ratios(rows: Sequence[dict[str, Any]], side: str, other: str) -> dict[str, float]:
    """Return the ratios of makespans of ``other`` and ``side``, by workload on a cluster, and of all."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for each in rows:
        if each.get(side) and each.get(other):
            name = f"{each['workload']} on {each['cluster']}-{each['workers']}"
            found[name].append(each[other]["makespan"] / each[side]["makespan"])
    means = {name: geometric_mean(each) for name, each in found.items()}
    return {**means, "all": geometric_mean(means.values())} if means else {}


def _seeds(_: Any, __: Any, text: str) -> Sequence[int]:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--seeds", default="2000-2001", callback=_seeds, show_default=True, help="A range of seeds.")
@click.option("--clusters", default="rdma,tcp", callback=split_list(list(SHAPES)), show_default=True)
@click.option("--workloads", default=",".join(WORKLOADS), callback=split_list(list(WORKLOADS)))
@click.option("--workers", "-w", multiple=True, type=int, default=(256,), show_default=True)
@click.option("--processes", default=os.cpu_count() or 1, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all figures here.")
def main(
    seeds: Sequence[int],
    clusters: Sequence[str],
    workloads: Sequence[str],
    workers: Sequence[int],
    processes: int,
    output: Path | None,
) -> None:
    """Simulate all cells, and write the results after each. Cells that the file has already are kept."""
    rows: list[dict[str, Any]] = []
    if output is not None and output.exists():
        rows = json.loads(output.read_text())["rows"]
    known = {(each["cluster"], each["workers"], each["workload"], each["seed"]) for each in rows}
    cells = [cell for cell in product(clusters, workers, workloads, seeds) if cell not in known]
    found: defaultdict[Cell, dict[str, Result | None]] = defaultdict(dict)
    with get_context("fork").Pool(processes) as pool:
        for cell, side, result in pool.imap_unordered(run, list(product(cells, SIDES))):
            found[cell][side] = result
            click.echo(f"{cell} {side}: " + (f"{result.makespan:.2f} s" if result else "given up"))
            if len(found[cell]) == len(SIDES):
                rows.append(row(cell, found[cell]))
                write(results(rows), output)


def results(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows with their ratios, and a description of this machine."""
    return {
        **environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
        "rows": rows,
        **{f"{other}/gpurt": ratios(rows, "gpurt", other) for other in ("stock", "tiers")},
    }


if __name__ == "__main__":
    main()
