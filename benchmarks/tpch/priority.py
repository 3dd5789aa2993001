"""Compare queries with communication at a higher priority and without, in turns on one cluster.

    python -m benchmarks.tpch.priority --scale 30 --queries 5,9,21 --concurrency 1,2 --json priority.json

Clusters differ by more than what is compared here, so that the priority of the workers' communication streams
changes on a running cluster, between two runs of a query. The first run of a query does not count. There is a
cluster for each ``--concurrency``, the number of workers in place of each one. Without a GPU there is nothing
to prioritise, and both are alike: that rehearses the program, and shows its noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from distributed import Client
from rich.console import Console

from dask_gpurt.cli.environment import environment

from ..common.commandline import split_list, write
from ..common.processes import Child
from .contenders import GPURT, SHARED, ClusterOptions, start
from .figures import ratios, rounded, spread, warm_seconds
from .measure import Plan, Run, timed_run
from .options import planning_options
from .queries import QUERIES
from .tables import ParquetTables

OFF, PRIORITY = "off", "priority"
console = Console(stderr=True)


def prioritise(client: Client, first: bool) -> None:
    """Give communication of all workers the higher priority, or that of compute."""

    def change(dask_worker: Any) -> None:
        pools = dask_worker.plugins["gpurt"].exchange.pools
        for device in pools.devices.values():
            device.prioritised = first

    client.run(change)


def measure_modes(options: ClusterOptions, plan: Plan, concurrency: int) -> Iterator[Run]:
    """Run each query once, then ``plan.warm`` times in each mode, in turns that begin with either one."""
    name = GPURT if concurrency == 1 else SHARED
    with start(options, [(name,)]) as (contender,):
        for number in plan.queries:
            timed_run(contender, QUERIES[number], plan)
            for turn in range(1, plan.warm + 1):
                for mode in (OFF, PRIORITY) if turn % 2 else (PRIORITY, OFF):
                    prioritise(contender.client, mode == PRIORITY)
                    seconds, budget = timed_run(contender, QUERIES[number], plan)
                    yield Run(number, mode, concurrency, turn, seconds, budget)


def results_of(runs: Sequence[Run], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return medians by concurrency, mode and query, and the ratio of priority to off."""
    found: dict[str, Any] = {}
    for concurrency in sorted({run.round for run in runs}):
        mine = [run for run in runs if run.round == concurrency]
        found[str(concurrency)] = {
            "seconds": {
                mode: {str(query): spread(seconds) for query, seconds in by_query.items()}
                for mode, by_query in warm_seconds(mine).items()
            },
            "priority / off": ratios(mine, OFF).get(PRIORITY),
        }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": parameters,
        **environment(),
        "concurrency": rounded(found),
    }


@click.command(help=__doc__.partition("\n")[0])
@planning_options
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--rmm-pool-size", type=float, default=0.6, show_default=True, help="A share of the GPU.")
@click.option("--concurrency", default="1", show_default=True, callback=split_list(("1", "2", "3", "4")))
@click.option("--repeat", type=click.IntRange(min=1), default=8, show_default=True, help="Runs in each mode.")
def main(
    tables: ParquetTables,
    queries: list[int],
    backend: str,
    output: Path | None,
    workers: int,
    protocol: str | None,
    rmm_pool_size: float,
    concurrency: list[str],
    repeat: int,
) -> None:
    plan = Plan(tables, queries, {}, repeat)
    parameters = {"scale": tables.scale, "parts": tables.parts, "queries": queries, "repeat": repeat}
    parameters |= {
        "backend": backend,
        "workers": workers,
        "protocol": protocol,
        "rmm_pool_size": rmm_pool_size,
    }
    runs: list[Run] = []
    for number in map(int, concurrency):
        options = ClusterOptions(backend, workers, 1, protocol, rmm_pool_size, max(2, number))
        # A client that has received data over UCX keeps GPU memory, so each cluster has a process of its own.
        child = Child(measure_modes, options, plan, number)
        try:
            with suppress(EOFError):  # the process has ended
                while True:
                    runs.append(run := child.receive())
                    console.print(f"Q{run.query}, {run.round} on a GPU, {run.contender}: {run.seconds:.3f} s")
                    write(results_of(runs, parameters), output)
        finally:
            child.end()
    for number, found in results_of(runs, parameters)["concurrency"].items():
        if (ratio := found["priority / off"]) is not None:
            said = (
                f"{ratio['ratio']} ({ratio['low']} to {ratio['high']}) times as long with priority as without"
            )
            console.print(f"concurrency {number}: {said}, {ratio['queries']} queries")


if __name__ == "__main__":
    main()
