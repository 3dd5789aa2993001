"""Compare placement with Dask's choices among the workers of one host, where it can matter there.

    python -m benchmarks.placement.one_host --backend cudf --protocol ucx --cells uneven,pressure,slow-link \
        --repeat 7 --json one-host.json

All cells run the same program: a join of two frames, and sums by group of the result.

``uneven``: the first worker holds nine tenths of both frames.
``pressure``: the frames are spread evenly, and data that the program does not use take 85% of the first
worker's device tier.
``slow-link``: as ``uneven``, and data go through Dask's connections over TCP only, which is much slower than
GPU memory.

Each cell has two clusters on the same GPUs, with the runtime on in both, and placement in one. They take
turns, in an order that alternates, and the data are put on the workers anew for each turn, before the clock
starts. The first turn does not count. Each result is compared with one that takes no join.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
import pandas as pd
from dask.utils import parse_bytes
from distributed import Client
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import in_bytes, split_list, write
from benchmarks.common.counters import difference, read_counters
from benchmarks.common.faults import differing_links
from benchmarks.common.processes import say
from benchmarks.placement.one_host_cells import (
    CELLS,
    Cell,
    device_tier,
    draw_in_pool,
    expected,
    held_bytes,
    placement_counters,
    plain,
    prepared,
    run,
    size_of,
    workers_of,
)
from benchmarks.placement.one_host_figures import Run, figures, table
from benchmarks.skew.frames import Size
from benchmarks.two_hosts.clusters import SIDES
from dask_gpurt.cli.cluster import choose_backend, default_workers, local_cluster
from dask_gpurt.cli.environment import environment

#: Bytes of the left frame, by backend.
DEFAULT_SIZE = {"pandas": "128MiB", "cudf": "8GiB"}
#: The device tier of a worker: on the host; and as a share of its RMM pool.
HOST_TIER, TIER_OF_POOL = "512MiB", 0.8
#: The exchange pool of a GPU worker. An automatic size follows from free memory, of which the second cluster
#: finds less.
EXCHANGE_POOL = "8%"
#: Seconds to close the clusters of a cell.
CLOSE_S = 15.0
#: Width of the table in characters, also in a file.
WIDTH = 150


@dataclass(frozen=True)
class Plan:
    """Describe the clusters.

    Parameters
    ----------
    workers
        Processes of each cluster.
    backend
        ``pandas`` or ``cudf``.
    protocol
        Protocol of the clusters, except where the link is slow; None for Dask's default.
    rmm_pool_share
        Share of a GPU that the RMM pool of a worker takes.
    """

    workers: int
    backend: str
    protocol: str | None
    rmm_pool_share: float

    def settings(self, cell: Cell, side: str) -> dict[str, Any]:
        """Return the settings of a cluster."""
        found: dict[str, Any] = {"gpurt.placement.enabled": side == "on", "gpurt.memory.device": HOST_TIER}
        if self.backend == "cudf":
            found["gpurt.memory.device"] = f"{TIER_OF_POOL * self.rmm_pool_share:.1%}"
            found["gpurt.exchange.pool"] = EXCHANGE_POOL
        if cell.slow_link:
            found["gpurt.exchange.paths"] = ["comms"]
        return found


@contextmanager
def clusters(plan: Plan, cell: Cell) -> Iterator[dict[str, Client]]:
    """Yield a client of a cluster for each side, on the same GPUs."""
    with ExitStack() as stack:
        yield {side: stack.enter_context(_cluster(plan, cell, side)) for side in SIDES}


@contextmanager
def _cluster(plan: Plan, cell: Cell, side: str) -> Iterator[Client]:
    protocol = "tcp" if cell.slow_link else plan.protocol
    with (
        dask.config.set(plan.settings(cell, side)),
        local_cluster(plan.backend, plan.workers, protocol, plan.rmm_pool_share) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        if plan.backend == "cudf":
            client.run(draw_in_pool)
        dask_gpurt.enable(client)
        try:
            yield client
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                dask_gpurt.disable(client)


def turns(repeat: int, left: Callable[[], float]) -> Iterator[int]:
    """Count turns from 0, a first one and at most ``repeat`` others.

    Parameters
    ----------
    left
        Returns the seconds left; a turn that takes as long as the longest so far has to end within them.
    """
    longest = 0.0
    for turn in range(repeat + 1):
        before = left()
        if before <= longest:
            return
        yield turn
        longest = max(longest, before - left())


def timed(
    client: Client, cell: Cell, size: Size, side: str, turn: int, limit: float
) -> tuple[Run, pd.DataFrame]:
    """Run the program once on new data, and return the timed run and its result."""
    with prepared(client, cell, size, turn, limit) as both:
        first = workers_of(client)[0]
        held, (capacity, free) = client.run_on_scheduler(held_bytes), device_tier(client, first)
        before = counts(client)
        start = time.perf_counter()
        result = run(both, limit)
        seconds = time.perf_counter() - start
        spent = difference(before, counts(client))
        del both
    done = Run(
        side,
        turn,
        seconds,
        int(spent["moved_bytes"]),
        int(spent["spilled_bytes"]),
        int(spent.get("placement.decisions", 0)),
        held[first] / max(1, sum(held.values())),
        free / capacity,
    )
    return done, plain(result)


def counts(client: Client) -> dict[str, float]:
    """Return the counters of the workers and of placement so far."""
    return {**read_counters(client, True), **client.run_on_scheduler(placement_counters)}


def measure(
    clients: Mapping[str, Client],
    name: str,
    size: Size,
    repeat: int,
    left: Callable[[], float],
    runs: list[Run],
) -> None:
    """Run a cell on both sides in turn, and add each run to ``runs`` as it ends.

    Raises
    ------
    ValueError
        If a result is wrong.
    TimeoutError
        If the time is over.
    """
    right = expected(clients["off"], size, left())
    for turn in turns(repeat, left):
        for side in SIDES if turn % 2 else reversed(SIDES):
            done, result = timed(clients[side], CELLS[name], size, side, turn, left())
            if not result.equals(right):
                raise ValueError(f"{name}, {side}, turn {turn}: the result is wrong")
            runs.append(done)
            say(f"{name}, {side}, turn {turn}: {done.seconds:.2f} s, {done.decisions} decisions")


def measured(plan: Plan, name: str, size: Size, repeat: int, left: Callable[[], float]) -> dict[str, Any]:
    """Return the figures and runs of a cell, and what has ended it, if not its last turn."""
    runs: list[Run] = []
    found: dict[str, Any] = {"error": None, "fallbacks": {}}
    try:
        with differing_links(), clusters(plan, CELLS[name]) as clients:
            try:
                measure(clients, name, size, repeat, left, runs)
            finally:
                found["fallbacks"] = dask_gpurt.report(clients["on"]).fallbacks.to_dict()
    except Exception as error:  # the other cells run nevertheless, and those before it are kept
        found["error"] = f"{type(error).__name__}: {error}"
        say(f"{name}: {found['error']}")
    return {**found, "figures": figures(runs), "runs": [run._asdict() for run in runs]}


def until(deadline: float) -> Callable[[], float]:
    """Return a function that returns the seconds until a time of the monotonic clock, at least a tenth."""
    return lambda: max(0.1, deadline - time.monotonic())


@click.command(help=__doc__.partition("\n")[0])
@click.option("--cells", default=",".join(CELLS), show_default=True, callback=split_list(list(CELLS)))
@click.option("--workers", type=click.IntRange(min=2), help="[default: 2, or one per GPU]")
@click.option("--size", callback=in_bytes, help="Of the left frame. [default: 128MiB, or 8GiB with cudf]")
@click.option(
    "--partitions", default=20, show_default=True, type=click.IntRange(min=2), help="Of each frame."
)
@click.option("--repeat", default=7, show_default=True, type=click.IntRange(min=2), help="Warm turns.")
@click.option(
    "--minutes", default=20.0, show_default=True, type=click.FloatRange(min=0), help="Time for all cells."
)
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", help="Of the clusters, such as tcp or ucx; slow-link always takes tcp.")
@click.option(
    "--rmm-pool-size",
    "share",
    default=0.35,
    show_default=True,
    type=click.FloatRange(min=0, max=0.5, min_open=True),
    help="RMM pool of each of the two workers of a GPU: a share of the GPU.",
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    cells: list[str],
    workers: int | None,
    size: int | None,
    partitions: int,
    repeat: int,
    minutes: float,
    backend: str,
    protocol: str | None,
    share: float,
    output: Path | None,
) -> None:
    ends = time.monotonic() + 60 * minutes
    backend = choose_backend(backend)
    plan = Plan(workers or default_workers(backend), backend, protocol, share)
    frames = size_of(size or parse_bytes(DEFAULT_SIZE[backend]), partitions, backend)
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {**asdict(plan), **asdict(frames), "repeat": repeat, "minutes": minutes},
        "load": os.getloadavg()[0],
        **environment(),
        "cells": {},
    }
    for number, name in enumerate(cells):
        now = time.monotonic()
        # Cells that are yet to run share the time that is left.
        left = until(now + (ends - now) / (len(cells) - number) - CLOSE_S)
        results["cells"][name] = measured(plan, name, frames, repeat, left)
        write(results, output)
    Console(width=WIDTH).print(table(results["cells"]))
    if any(found["error"] for found in results["cells"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
