"""Time joins of skewed keys, against even keys.

    python -m benchmarks.skew --workers 4 --threads 1 --rows 8_000_000 --repeat 9 --minutes 7 --json skew.json

``zipf`` and ``hot`` are inner joins of skewed keys: Zipf's distribution with the exponent 1.3, and even keys
except for one key with 30% of the rows. Their yardstick is ``even``. Each key occurs once in the other side,
so all three results have the same number of rows. The frames are on the workers before the clock starts.

Contenders take turns, each turn starts with a different one, and each runs all its cells in a row.
``gpurt-unbalanced`` is the runtime without ``gpurt.shuffle.balance``. ``tasks`` and ``p2p`` are Dask's own as
shipped, on a cluster where the runtime was never on. All rows of each result are checked against those that
follow from the left frame. With cudf, GPUs draw the frames.

Besides wall time it reports the load, output rows and CPU seconds by worker, which shows an imbalance even
where workers share processors, and each worker's peak memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from distributed import Client
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import in_bytes, split_list, write
from benchmarks.common.environment import environment
from benchmarks.skew.clusters import CONTENDERS, OURS, UNBALANCED, Plan, clusters, require
from benchmarks.skew.contest import YARDSTICKS, Contest, in_order
from benchmarks.skew.figures import WIDTH, figures, table
from benchmarks.skew.frames import Size
from dask_gpurt.cli.cluster import choose_backend, default_workers

#: Default partitions of each frame per worker: enough to move a busy worker's outputs in small pieces.
PARTITIONS_PER_WORKER = 8

#: Fewest turns for an interval.
MIN_WARM_TURNS = 2


@click.command(help=__doc__.partition("\n")[0])
@click.option("--rows", type=click.IntRange(min=1), default=8_000_000, show_default=True, help="Of a join.")
@click.option("--partitions", type=click.IntRange(min=1), help="[default: 8 per worker]")
@click.option("--workers", type=click.IntRange(min=2), help="[default: 2, or one per GPU]")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of a worker.")
@click.option(
    "--cells", default=",".join(YARDSTICKS), show_default=True, callback=split_list(list(YARDSTICKS))
)
@click.option("--contenders", default="gpurt,tasks,p2p", show_default=True, callback=split_list(CONTENDERS))
@click.option("--repeat", type=click.IntRange(min=2), default=5, show_default=True, help="Warm turns.")
@click.option("--minutes", type=click.FloatRange(min=0), help="Skip turns that may end later.")
@click.option("--memory-limit", default="2GiB", show_default=True, callback=in_bytes, help="Of a worker.")
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option(
    "--rmm-pool-size", default="0.5", show_default=True, help="RMM pool: share of a GPU, size, or none."
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    rows: int,
    partitions: int | None,
    workers: int | None,
    threads: int,
    cells: list[str],
    contenders: list[str],
    repeat: int,
    minutes: float | None,
    memory_limit: int,
    backend: str,
    protocol: str | None,
    rmm_pool_size: str,
    output: Path | None,
) -> None:
    require(contenders)
    backend = choose_backend(backend)
    workers = workers or default_workers(backend)
    share = rmm_pool_size.replace(".", "", 1).isdigit()
    pool = None if rmm_pool_size == "none" else float(rmm_pool_size) if share else rmm_pool_size
    plan = Plan(
        workers,
        threads,
        backend,
        memory_limit,
        protocol,
        rmm_pool_size=pool if backend == "cudf" else None,
    )
    size = Size(rows, partitions or PARTITIONS_PER_WORKER * workers, backend)
    load = os.getloadavg()
    with clusters(plan, contenders) as clients:
        contest = Contest(clients, size, in_order(cells))
        for turn in turns(repeat, minutes and minutes * 60):
            contest.turn(turn)
        fallbacks = {each: _fallbacks(clients[each]) for each in contenders if each in (OURS, UNBALANCED)}
    found = figures(contest.runs, YARDSTICKS, OURS, memory_limit)
    console = Console(width=WIDTH)
    console.print(table(found, OURS))
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {
            **asdict(plan),
            **asdict(size),
            "cells": cells,
            "contenders": contenders,
            "repeat": repeat,
            "minutes": minutes,
        },
        "load": {"before": load, "after": os.getloadavg()},
        **environment(),
        "figures": found,
        "fallbacks": fallbacks,
        "runs": [asdict(run) for run in contest.runs],
    }
    write(results, output)


def turns(repeat: int, limit: float | None, clock: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Count turns from 0, a first one and at least two warm ones.

    Parameters
    ----------
    repeat
        Warm turns, at most.
    limit
        Seconds within which all turns end, if none takes longer than the longest so far.
    """
    began, longest = clock(), 0.0
    for turn in range(repeat + 1):
        before = clock()
        if limit is not None and turn > MIN_WARM_TURNS and before - began + longest > limit:
            return
        yield turn
        longest = max(longest, clock() - before)


def _fallbacks(client: Client) -> dict[str, Any]:
    """Return the operations that fell back to Dask, with reasons."""
    return dask_gpurt.report(client).fallbacks.to_dict()


if __name__ == "__main__":
    main()
