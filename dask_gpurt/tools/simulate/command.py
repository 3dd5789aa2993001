"""Run ``dask gpurt simulate``: placement on a simulated cluster."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import geometric_mean

import click
from dask.utils import format_bytes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dask_gpurt.cli.cluster import progress
from dask_gpurt.tools.simulate import (
    SHAPES,
    WORKLOADS,
    Cluster,
    Result,
    Workload,
    build_cluster,
    build_workload,
)
from dask_gpurt.tools.simulate.clock import DeadlockError
from dask_gpurt.tools.simulate.placements import PLACEMENTS, charged, simulate
from dask_gpurt.tools.simulate.simulation import WorkloadFailed

ALL = "all"
#: Characters for what the command does.
DOING_WIDTH = 50
#: Lower bound of bytes in a ratio, for placements that move none.
MIN_BYTES = 1


@click.command("simulate", short_help="Try workloads on a simulated cluster.")
@click.option(
    "--workload",
    type=click.Choice([*WORKLOADS, ALL]),
    default="shuffle-join",
    show_default=True,
    help="Computation to simulate.",
)
@click.option(
    "--cluster",
    type=click.Choice([*SHAPES, ALL]),
    default="rdma",
    show_default=True,
    help="Cluster to simulate: " + "; ".join(f"{name}: {shape.help}" for name, shape in SHAPES.items()) + ".",
)
@click.option(
    "--workers", type=click.IntRange(1, 4096), help="Number of workers. [default: that of the cluster]"
)
@click.option(
    "--partitions",
    type=click.IntRange(min=2),
    help="Partitions of the largest collection. [default: by workers]",
)
@click.option("--placement", type=click.Choice(list(PLACEMENTS)), default="gpurt", show_default=True)
@click.option("--compare", type=click.Choice(list(PLACEMENTS)), help="Placement to compare with.")
@click.option("--seed", default=0, show_default=True, help="Seed of the speeds of links and of the workload.")
@click.option("--repeat", default=1, show_default=True, help="Number of seeds, counted up from --seed.")
@click.option("--charge", is_flag=True, help="Simulate twice, the second time with the scheduler's CPU time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def simulation(
    workload: str,
    cluster: str,
    workers: int | None,
    partitions: int | None,
    placement: str,
    compare: str | None,
    seed: int,
    repeat: int,
    charge: bool,
    as_json: bool,
) -> None:
    """Run Dask's own scheduler and worker state machines in virtual time, on up to 4,096 workers.

    No processes are started and nothing is computed: tasks have a duration and a size, links and tiers a
    speed.
    """
    workloads = list(WORKLOADS) if workload == ALL else [workload]
    shapes = list(SHAPES) if cluster == ALL else [cluster]
    placements = list(dict.fromkeys([placement, compare or placement]))
    results: list[Result] = []
    runs = list(itertools.product(shapes, workloads, range(seed, seed + repeat)))
    with progress(width=DOING_WIDTH, quiet=as_json) as show:
        for shape, name, chance in runs:
            place = build_cluster(shape, workers, seed=chance)
            built = build_workload(name, place, partitions=partitions, seed=chance)
            done: list[Result] = []
            for one in placements:
                simulated = len(results) + len(done)
                show(f"{name} on {shape} with {one}", simulated, len(runs) * len(placements))
                done.append(_simulate(place, built, one, charge))
            results.extend(done)
            if not as_json:
                _print(done)
    summary = summarise(results, placement, compare) if compare else None
    if as_json:
        click.echo(json.dumps({"results": [asdict(result) for result in results], "summary": summary}))
    elif summary is not None:
        for line in _sentences(summary):
            click.echo(line)


def _simulate(cluster: Cluster, workload: Workload, placement: str, charge: bool) -> Result:
    try:
        done = simulate(cluster, workload, placement)
        if charge:
            done = simulate(cluster, workload, placement, overheads=charged(done))
        return done.result
    except (DeadlockError, WorkloadFailed) as error:
        raise click.ClickException(f"{workload.name} on {cluster.name} with {placement}: {error}") from error


def summarise(results: Sequence[Result], ours: str, other: str) -> dict[str, float | str | int]:
    """Compare two placements over all workloads and clusters.

    ``results``: results of both placements, with the same seeds in the same order.
    Returns the speedup of ``ours`` over ``other``, as the geometric mean, and for the workload and cluster
    with the smallest mean over its seeds; the ratio of bytes moved between hosts, as the geometric mean where
    ``other`` moves any; the numbers of workers over their memory.
    """
    runs: defaultdict[str, dict[str, list[Result]]] = defaultdict(lambda: {ours: [], other: []})
    for one in results:
        runs[f"{one.workload} on {one.cluster}"][one.placement].append(one)
    speedups = {
        what: geometric_mean(
            their.makespan / our.makespan for our, their in zip(by[ours], by[other], strict=True)
        )
        for what, by in runs.items()
    }
    moved = {
        placement: [sum(one.between_hosts for one in by[placement]) for by in runs.values()]
        for placement in (ours, other)
    }
    parts = [
        max(MIN_BYTES, our) / their for our, their in zip(moved[ours], moved[other], strict=True) if their
    ]
    worst = min(speedups, key=speedups.__getitem__)
    return {
        "ours": ours,
        "other": other,
        "speedup": geometric_mean(speedups.values()),
        "worst_speedup": speedups[worst],
        "worst": worst,
        "between_hosts": geometric_mean(parts) if parts else 1.0,
        "over_memory_ours": sum(one.over_memory for by in runs.values() for one in by[ours]),
        "over_memory_other": sum(one.over_memory for by in runs.values() for one in by[other]),
    }


def _sentences(summary: dict[str, float | str | int]) -> Iterator[str]:
    ours, other = summary["ours"], summary["other"]
    yield f"{other} takes {summary['speedup']:.2f} times as long as {ours}, by geometric mean;"
    yield f"{summary['worst_speedup']:.2f} times at worst: {summary['worst']}."
    yield f"Between hosts {ours} moves {summary['between_hosts']:.2f} of the bytes, by geometric mean."
    yield f"Workers over memory: {summary['over_memory_ours']}, {other} {summary['over_memory_other']}."


def _print(results: Sequence[Result]) -> None:
    first = results[0]
    title = f"{first.workload}, {first.tasks:,} tasks, on {first.cluster}, {first.workers:,} workers"
    table = Table("", *[one.placement for one in results], box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_row("makespan", *[f"{one.makespan:.2f} s" for one in results])
    for link in dict.fromkeys(link for one in results for link in one.bytes):
        table.add_row(f"over {link}", *[format_bytes(one.bytes.get(link, 0)) for one in results])
    table.add_row("between hosts", *[format_bytes(one.between_hosts) for one in results])
    table.add_row("spilled", *[format_bytes(one.spilled) for one in results])
    table.add_row("worst memory", *[f"{one.worst_memory:.0%}" for one in results])
    table.add_row("workers over memory", *[f"{one.over_memory:,}" for one in results])
    table.add_row("tasks too large for any", *[f"{one.too_large:,}" for one in results])
    table.add_row("steals", *[f"{one.steals:,}" for one in results])
    table.add_row("a decision", *[f"{one.decision_us:.0f} µs" for one in results])
    table.add_row("scheduler, a task", *[f"{one.scheduler_us:.0f} µs" for one in results])
    Console().print(table)
