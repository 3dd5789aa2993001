"""Measure the time from the last transfer of a shuffle to its first output.

    python -m benchmarks.shuffle.latency --partitions 32 --workers 2 --repeat 20 --json results.json
    python -m benchmarks.shuffle.latency --backend cudf --protocol ucx --rows 1000000
    python -m benchmarks.shuffle.latency --clock cpu
    python -m benchmarks.shuffle.latency --clock messages

In that time all transfers have ended and no output has begun, so no worker does anything for the user. It is
measured on the event loops of the workers, and split into the time until the barrier begins, the barrier, and
the time until the first output begins. Frames are small, so that only messages matter; the first shuffle of a
cluster is discarded. Workers are processes of one host, and so share a clock.

For a host with other load, ``--clock cpu`` runs scheduler, workers and client in one process, over TCP, and
measures its CPU time between the two moments, which excludes waiting. In the same way ``--clock messages``
counts messages written to connections, and ``--clock turns`` iterations of the event loop; heartbeats and
other background work are included.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
from distributed import Client, LocalCluster, WorkerPlugin, wait
from distributed.deploy.cluster import Cluster
from rich.console import Console
from rich.table import Table

import dask_gpurt
from benchmarks.common import counts
from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from benchmarks.common.rows import check, fingerprints, make_random, totals
from dask_gpurt.cli.cluster import choose_backend, default_workers, local_cluster

#: Prefixes of task names, by phase of a shuffle.
PHASES = {
    "transfer": ("shuffle-transfer-",),
    "barrier": ("shuffle-barrier-",),
    "output": ("gpurtshuffle-", "p2pshuffle-"),
}
HIGHEST = 2**62

#: ``wall`` is the host's clock, which its processes share; the other clocks cover this process only.
CLOCKS: dict[str, Callable[[], float]] = {
    "wall": lambda: 1000 * time.time(),
    "cpu": lambda: 1000 * time.process_time(),
    "messages": counts.messages,
    "turns": counts.turns,
}

#: ``begin`` or ``end``, the phase of the task, and the time by a clock.
Moment = tuple[str, str, float]


class Moments(WorkerPlugin):
    """Record when the tasks of shuffles begin and end on a worker.

    Parameters
    ----------
    clock
        One of :data:`CLOCKS`.
    """

    name = "benchmark-moments"

    def __init__(self, clock: str):
        self.clock = CLOCKS[clock]
        self.moments: list[Moment] = []

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        phase = _phase(str(key[0] if isinstance(key, tuple) else key))
        if phase is not None and finish == "executing":
            self.moments.append(("begin", phase, self.clock()))
        if phase is not None and (start, finish) == ("executing", "memory"):
            self.moments.append(("end", phase, self.clock()))

    def take(self) -> list[Moment]:
        """Return the moments since the last call."""
        moments, self.moments = self.moments, []
        return moments


def _phase(name: str) -> str | None:
    return next((phase for phase, prefixes in PHASES.items() if name.startswith(prefixes)), None)


@dataclass(frozen=True)
class Latency:
    """Hold the latency of one shuffle, in milliseconds or counts.

    Attributes
    ----------
    to_barrier
        From the end of the last transfer until the barrier begins.
    barrier
        Duration of the barrier.
    to_output
        From the end of the barrier until the first output begins.
    total
        The sum.
    """

    to_barrier: float
    barrier: float
    to_output: float
    total: float

    @classmethod
    def between(cls, moments: Iterable[Moment]) -> Latency:
        """Derive the latency of a shuffle from the moments of its tasks."""
        by_kind: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for what, phase, when in moments:
            by_kind[what, phase].append(when)
        transferred = max(by_kind["end", "transfer"])
        begun, ended = max(by_kind["begin", "barrier"]), max(by_kind["end", "barrier"])
        output = min(by_kind["begin", "output"])
        parts = (begun - transferred, ended - begun, output - ended, output - transferred)
        return cls(*parts)


def measure(client: Client, partitions: int, rows: int, repeat: int, backend: str) -> list[Latency]:
    """Shuffle repeatedly, and check each result."""
    meta = make_random(0, 1, HIGHEST, backend).iloc[:0]
    frame = dd.from_map(make_random, range(partitions), args=[rows, HIGHEST, backend], meta=meta).persist()
    wait(frame)
    expected = totals(fingerprints(frame))
    found = []
    for turn in range(repeat + 1):
        take(client)  # discard the moments of the previous check
        shuffled = frame.shuffle("key").persist()
        wait(shuffled)
        moments = take(client)
        check(fingerprints(shuffled), expected, False)
        if turn:
            found.append(Latency.between(moments))
        del shuffled
    return found


def take(client: Client) -> list[Moment]:
    """Return the moments on all workers since the last call."""
    taken = client.run(lambda dask_worker: dask_worker.plugins[Moments.name].take())
    return [moment for moments in taken.values() for moment in moments]


def figures(found: list[Latency]) -> dict[str, dict[str, float]]:
    """Summarise latencies: minimum, quartiles and maximum of each part."""
    summary = {}
    for name, values in zip(asdict(found[0]), zip(*map(astuple, found), strict=True), strict=True):
        low, median, high = statistics.quantiles(values, method="inclusive")
        summary[name] = {
            "min": min(values),
            "quartile": low,
            "median": median,
            "third_quartile": high,
            "max": max(values),
        }
    return summary


def show(summary: dict[str, dict[str, float]], clock: str) -> None:
    """Print the figures."""
    table = Table("ms" if clock in ("wall", "cpu") else clock, *next(iter(summary.values())))
    for name, values in summary.items():
        table.add_row(name.replace("_", " "), *(f"{value:.1f}" for value in values.values()))
    Console().print(table)


@contextmanager
def cluster_of(clock: str, backend: str, workers: int, protocol: str | None) -> Iterator[Cluster]:
    """Start a cluster whose processes share a clock."""
    if clock == "wall":
        with local_cluster(backend, workers, protocol) as cluster:
            yield cluster
    else:
        with (
            counts.counting(),
            LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=False,
                protocol=protocol or "tcp",
                dashboard_address=":0",
            ) as cluster,
        ):
            yield cluster


@click.command(help=__doc__.partition("\n")[0])
@click.option("--partitions", type=click.IntRange(min=1), default=32, show_default=True)
@click.option(
    "--rows", type=click.IntRange(min=1), default=1000, show_default=True, help="Rows of a partition."
)
@click.option("--workers", type=click.IntRange(min=1), help="[default: 2, or one per GPU]")
@click.option("--repeat", type=click.IntRange(min=2), default=20, show_default=True, help="Warm shuffles.")
@click.option("--method", type=click.Choice(["gpurt", "p2p"]), default="gpurt", show_default=True)
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True)
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    partitions: int,
    rows: int,
    workers: int | None,
    repeat: int,
    method: str,
    clock: str,
    backend: str,
    protocol: str | None,
    output: Path | None,
) -> None:
    backend = choose_backend(backend)
    workers = workers or default_workers(backend)
    with (
        dask.config.set({"dataframe.shuffle.method": method}),
        cluster_of(clock, backend, workers, protocol) as cluster,
        Client(cluster) as client,
    ):
        if method == "gpurt":
            dask_gpurt.enable(client)
        client.register_plugin(Moments(clock))
        found = measure(client, partitions, rows, repeat, backend)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {
            "partitions": partitions,
            "rows": rows,
            "workers": workers,
            "repeat": repeat,
            "method": method,
            "clock": clock,
            "backend": backend,
            "protocol": protocol,
        },
        **environment(),
        "figures": figures(found),
        "runs": [asdict(one) for one in found],
    }
    write(results, output)
    show(results["figures"], clock)


if __name__ == "__main__":
    main()
