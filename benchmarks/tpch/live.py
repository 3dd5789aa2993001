"""Compare queries with a feature of the runtime and without, in turns on one cluster.

    python -m benchmarks.tpch.live --feature priority --scale 30 --queries 5,9,21 --json priority.json
    python -m benchmarks.tpch.live --feature frozen --scale 30 --json frozen.json

Clusters differ by more than what is compared here, so the feature is switched on a running cluster, between
two passes over the queries:

- ``priority``: communication streams of the workers have a higher priority than compute. Without a GPU there
  is nothing to prioritise, and both are alike: that rehearses the program, and shows its noise.
- ``frozen``: all objects are frozen, so that garbage collections leave them out, in workers and in the
  scheduler's process.
- ``switching``: a thread that waits for the GIL asks for it after 0.5 ms, not after Python's 5, in all
  processes.
- ``local-groups``: rows are grouped where they are read if the files of a table have different keys. A
  switch drops cached plans, so each query is planned again before it is timed.
- ``partitions``: the size of tables decides how many partitions their files make
  (``gpurt.planning.partition-size`` and ``broadcast-size``), with the same remark.
- ``programs``: fused tasks run on columns of cudf rather than through its frames.

The first pass in each mode does not count. There is a cluster for each ``--concurrency``, the number of
workers in place of each one.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
from distributed import Client
from rich.console import Console

from dask_gpurt.cli.environment import environment
from dask_gpurt.client.planning.cache import RULES
from dask_gpurt.client.planning.rules.local_groups import LocalGroups
from dask_gpurt.client.session import SESSIONS
from dask_gpurt.device import Streams

from ..common.commandline import split_list, write
from ..common.processes import Child
from .contenders import GPURT, SHARED, ClusterOptions, start
from .figures import ratios, rounded, spread, warm_seconds
from .measure import Plan, Run, timed_run
from .options import planning_options
from .queries import QUERIES
from .tables import ParquetTables

OFF = "off"
console = Console(stderr=True)


def prioritise(client: Client, first: bool) -> None:
    """Give communication of all workers the higher priority, or that of compute."""

    def change(dask_worker: Any) -> None:
        pools = dask_worker.plugins["gpurt"].exchange.pools
        for device in pools.devices.values():
            if isinstance(device, Streams):
                device.prioritised = first

    client.run(change)


def freeze(client: Client, on: bool) -> None:
    """Freeze the objects of all processes, or thaw them."""

    def change() -> None:
        gc.unfreeze()
        if on:
            gc.collect()
            gc.freeze()

    client.run_on_scheduler(change)
    client.run(change)


def ask_for_the_gil_early(client: Client, on: bool) -> None:
    """Set the switch interval of all processes."""

    def change() -> None:
        sys.setswitchinterval(0.0005 if on else 0.005)

    client.run_on_scheduler(change)
    client.run(change)


def group_locally(_: Client, on: bool) -> None:
    """Group rows where they are read, or leave that to Dask."""
    SESSIONS.planning.clear()
    SESSIONS.planning.rules = (
        RULES if on else tuple(rule for rule in RULES if not isinstance(rule, LocalGroups))
    )


def choose_partitions(_: Client, on: bool) -> None:
    """Read tables in as many partitions as their sizes call for, or as Dask does."""
    size = "auto" if on else 0
    dask.config.set({"gpurt.planning.partition-size": size, "gpurt.planning.broadcast-size": size})


def run_programs(client: Client, on: bool) -> None:
    """Run fused tasks on columns, or through frames."""

    def change(dask_worker: Any) -> None:
        dask_worker.plugins["gpurt"].programs.on = on

    client.run(change)


#: Switches a feature, by its name.
FEATURES: dict[str, Callable[[Client, bool], None]] = {
    "priority": prioritise,
    "frozen": freeze,
    "switching": ask_for_the_gil_early,
    "local-groups": group_locally,
    "partitions": choose_partitions,
    "programs": run_programs,
}
#: Features that a new cluster has.
ON_BY_DEFAULT = ("priority", "local-groups", "partitions", "programs")
#: Features whose switch drops cached plans.
REPLANNED = ("local-groups", "partitions")


def measure_modes(options: ClusterOptions, plan: Plan, concurrency: int, feature: str) -> Iterator[Run]:
    """Run all queries in each mode, once and then ``plan.warm`` times, in turns that begin with either."""
    name, switch = GPURT if concurrency == 1 else SHARED, FEATURES[feature]
    is_on = feature in ON_BY_DEFAULT
    with start(options, [(name,)]) as (contender,):
        for turn in range(plan.warm + 1):
            for mode in (OFF, feature) if turn % 2 else (feature, OFF):
                if is_on != (mode == feature):
                    is_on = not is_on
                    switch(contender.client, is_on)
                for number in plan.queries:
                    if feature in REPLANNED:
                        timed_run(contender, QUERIES[number], plan)
                    seconds, budget = timed_run(contender, QUERIES[number], plan)
                    yield Run(number, mode, concurrency, turn, seconds, budget)


def results_of(runs: Sequence[Run], feature: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return medians and moved bytes by concurrency, mode and query, and the ratio of the feature to off."""
    found: dict[str, Any] = {}
    for concurrency in sorted({run.round for run in runs}):
        mine = [run for run in runs if run.round == concurrency]
        found[str(concurrency)] = {
            "seconds": {
                mode: {str(query): spread(seconds) for query, seconds in by_query.items()}
                for mode, by_query in warm_seconds(mine).items()
            },
            "moved_bytes": {
                mode: {
                    str(run.query): run.budget["moved_bytes"]
                    for run in mine
                    if run.contender == mode and run.turn
                }
                for mode in (OFF, feature)
            },
            f"{feature} / off": ratios(mine, OFF).get(feature),
        }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": parameters,
        **environment(),
        "concurrency": rounded(found),
    }


@click.command(help=__doc__.partition("\n")[0])
@planning_options
@click.option("--feature", type=click.Choice(list(FEATURES)), required=True)
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
    feature: str,
    workers: int,
    protocol: str | None,
    rmm_pool_size: float,
    concurrency: list[str],
    repeat: int,
) -> None:
    plan = Plan(tables, queries, {}, repeat)
    parameters = {"scale": tables.scale, "parts": tables.parts, "queries": queries, "repeat": repeat}
    parameters |= {
        "feature": feature,
        "backend": backend,
        "workers": workers,
        "protocol": protocol,
        "rmm_pool_size": rmm_pool_size,
    }
    runs: list[Run] = []
    for number in map(int, concurrency):
        options = ClusterOptions(backend, workers, 1, protocol, rmm_pool_size, max(2, number))
        # A client that has received data over UCX keeps GPU memory, so each cluster has a process of its own.
        child = Child(measure_modes, options, plan, number, feature)
        try:
            with suppress(EOFError):  # the process has ended
                while True:
                    runs.append(run := child.receive())
                    console.print(f"Q{run.query}, {run.round} on a GPU, {run.contender}: {run.seconds:.3f} s")
                    write(results_of(runs, feature, parameters), output)
        finally:
            child.end()
    for number, found in results_of(runs, feature, parameters)["concurrency"].items():
        if (ratio := found[f"{feature} / off"]) is not None:
            said = f"{ratio['ratio']} ({ratio['low']} to {ratio['high']}) times as long with it as without"
            console.print(f"concurrency {number}: {said}, {ratio['queries']} queries")


if __name__ == "__main__":
    main()
