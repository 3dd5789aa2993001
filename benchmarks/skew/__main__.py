"""Time joins of skewed keys, and a pipeline with a slow worker, against the same without either.

    python -m benchmarks.skew --workers 4 --threads 1 --rows 8_000_000 --repeat 9 --minutes 7 --json skew.json

``zipf`` and ``hot`` are inner joins, of keys of which few have most rows (Zipf's distribution with the
exponent 1.3), and of even keys but for one that has 30% of the rows. Their yardstick is ``even``. Each key is
once in the other side, so that all three have as many rows in their result. The frames are on the workers
before the clock starts.

``half-speed`` is a pipeline that makes its data, joins them and groups them, while one worker is stopped for
20 ms and runs for 20 ms, in turns; ``half-speed-known`` is the same once more, when whatever learns of
speeds had a run to do so. Their yardstick is ``full-speed``, divided by the share of the processors that was
left: that share is measured, and where workers share processors others take the time of the slow one.

``slow-link`` is the same pipeline on workers that are hosts of their own, network namespaces of this machine,
while the link of one of them is at a tenth of the others'; ``slow-link-known`` is the same once more. The
ideal is what :func:`benchmarks.skew.figures.ideal_with_slow_link` makes of the time at full speed:

    python -m benchmarks.skew --cells slow-link-known --workers 4 --rows 4_000_000 --json link.json

Contenders take turns, each turn begins with another one, and each runs all its cells in a turn one after the
other. ``gpurt-unbalanced`` is the runtime without ``gpurt.shuffle.balance``. ``tasks`` and ``p2p`` are Dask's
own, as shipped, on a cluster where the runtime never was on. Every row of every result is compared with what
pandas makes of the same frames.

Besides seconds it tells the load: rows of the outputs and processor seconds by worker, which show an
imbalance also where workers share processors, and the peak memory of each worker. On a GPU a stopped worker
begins nothing, but what it has begun goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from distributed import Client
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import in_bytes, split_list, write
from benchmarks.skew.clusters import CONTENDERS, OURS, UNBALANCED, Plan, clusters, require
from benchmarks.skew.contest import BESIDE, LINKED, ON_ONE_HOST, YARDSTICKS, Contest, in_order
from benchmarks.skew.figures import WIDTH, figures, slow_link_lines, table
from benchmarks.skew.frames import Size
from dask_gpurt.cli.cluster import choose_backend, default_workers
from dask_gpurt.cli.environment import environment

#: Partitions of each frame, by worker, where their number is not given: what one worker has left undone can
#: then be dealt out in small pieces.
PARTITIONS_PER_WORKER = 8

#: An interval takes so many.
MIN_WARM_TURNS = 2


@click.command(help=__doc__.partition("\n")[0])
@click.option("--rows", type=click.IntRange(min=1), default=8_000_000, show_default=True, help="Of a join.")
@click.option("--partitions", type=click.IntRange(min=1), help="[default: 8 per worker]")
@click.option("--workers", type=click.IntRange(min=2), help="[default: 2, or one per GPU]")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of a worker.")
@click.option("--cells", default=",".join(ON_ONE_HOST), show_default=True, callback=split_list(list(BESIDE)))
@click.option("--contenders", default="gpurt,tasks,p2p", show_default=True, callback=split_list(CONTENDERS))
@click.option("--repeat", type=click.IntRange(min=2), default=5, show_default=True, help="Warm turns.")
@click.option("--minutes", type=click.FloatRange(min=0), help="No turn begins that may end later than this.")
@click.option("--memory-limit", default="2GiB", show_default=True, callback=in_bytes, help="Of a worker.")
@click.option(
    "--link", default="20MB", show_default=True, callback=in_bytes, help="Per second, of slow-link."
)
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
    link: int,
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
        link=link_of(cells, link),
    )
    size = Size(rows, partitions or PARTITIONS_PER_WORKER * workers, backend)
    load = os.getloadavg()
    with clusters(plan, contenders) as (clients, star):
        contest = Contest(clients, size, in_order(cells), star)
        for turn in turns(repeat, minutes and minutes * 60):
            contest.turn(turn)
        fallbacks = {each: _fallbacks(clients[each]) for each in contenders if each in (OURS, UNBALANCED)}
    found = figures(contest.runs, YARDSTICKS, OURS, memory_limit)
    console = Console(width=WIDTH)
    console.print(table(found, OURS))
    for line in slow_link_lines(found):
        console.print(line)
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


def link_of(cells: Sequence[str], rate: int) -> int | None:
    """Return the bytes per second of the links of workers, where cells take workers with links.

    Raises
    ------
    click.UsageError
        When other cells take workers without.
    """
    if not set(cells) & set(LINKED):
        return None
    if others := set(cells) - set(LINKED):
        raise click.UsageError(f"{', '.join(sorted(others))} and {', '.join(LINKED)}: one after the other")
    return rate


def turns(repeat: int, limit: float | None, clock: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Count turns from 0, a first one and at least two warm ones.

    Parameters
    ----------
    repeat
        Warm turns, at most.
    limit
        Seconds in which all turns end, if the next one takes no longer than the longest so far.
    """
    began, longest = clock(), 0.0
    for turn in range(repeat + 1):
        before = clock()
        if limit is not None and turn > MIN_WARM_TURNS and before - began + longest > limit:
            return
        yield turn
        longest = max(longest, clock() - before)


def _fallbacks(client: Client) -> dict[str, Any]:
    """Return what was left to Dask."""
    return dask_gpurt.report(client).fallbacks.to_dict()


if __name__ == "__main__":
    main()
