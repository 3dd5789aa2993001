"""Time what lies between the last transfer of a shuffle and its first output.

    python -m benchmarks.shuffle.latency --partitions 32 --workers 2 --repeat 20 --json results.json
    python -m benchmarks.shuffle.latency --backend cudf --protocol ucx --rows 1000000

Every transfer has ended by then and no output has begun: no worker does anything for the user. The time is
taken on the threads of the tasks, and told apart into what passes until the barrier begins, what it takes,
and what passes until the first output begins. Frames are small, so that nothing but messages counts; the
first shuffle of a cluster is left out. Workers are processes of one host, and so have one clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
from distributed import Client, Worker, WorkerPlugin, wait
from rich.console import Console
from rich.table import Table

import dask_gpurt
from benchmarks.common.commandline import write
from benchmarks.common.rows import check, fingerprints, make_random, totals
from dask_gpurt.cli.cluster import choose_backend, default_workers, local_cluster
from dask_gpurt.cli.environment import environment

#: How the names of tasks begin, by what they do in a shuffle.
PHASES = {
    "transfer": ("shuffle-transfer-",),
    "barrier": ("shuffle-barrier-",),
    "output": ("gpurtshuffle-", "p2pshuffle-"),
}
HIGHEST = 2**62

#: A task: which phase it belongs to, when it began, and when it ended, in seconds of the host's clock.
Span = tuple[str, float, float]


class Spans(WorkerPlugin):
    """Remember when the tasks of shuffles have run on a worker, as their threads have measured it."""

    name = "benchmark-spans"

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.spans: list[Span] = []

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        phase = _phase(str(key[0] if isinstance(key, tuple) else key))
        if phase is None or (start, finish) != ("executing", "memory"):
            return
        for one in self.worker.state.tasks[key].startstops:
            if one["action"] == "compute":  # in the clock of the scheduler, as the worker estimates that
                delay = self.worker.scheduler_delay
                self.spans.append((phase, one["start"] - delay, one["stop"] - delay))

    def take(self) -> list[Span]:
        """Return the spans since the last call."""
        spans, self.spans = self.spans, []
        return spans


def _phase(name: str) -> str | None:
    return next((phase for phase, prefixes in PHASES.items() if name.startswith(prefixes)), None)


@dataclass(frozen=True)
class Latency:
    """One shuffle, in milliseconds.

    Attributes
    ----------
    to_barrier
        From the end of the last transfer until the barrier begins.
    barrier
        What the barrier takes.
    to_output
        From its end until the first output begins.
    total
        All of it.
    """

    to_barrier: float
    barrier: float
    to_output: float
    total: float

    @classmethod
    def between(cls, spans: Iterable[Span]) -> Latency:
        """Derive the latency of a shuffle from the spans of its tasks."""
        spans = list(spans)
        transferred = max(stop for phase, _, stop in spans if phase == "transfer")
        [(begun, ended)] = [(start, stop) for phase, start, stop in spans if phase == "barrier"]
        output = min(start for phase, start, _ in spans if phase == "output")
        parts = (begun - transferred, ended - begun, output - ended, output - transferred)
        return cls(*(1000 * seconds for seconds in parts))


def measure(client: Client, partitions: int, rows: int, repeat: int, backend: str) -> list[Latency]:
    """Shuffle again and again, and check each result."""
    meta = make_random(0, 1, HIGHEST, backend).iloc[:0]
    frame = dd.from_map(make_random, range(partitions), args=[rows, HIGHEST, backend], meta=meta).persist()
    wait(frame)
    expected = totals(fingerprints(frame))
    found = []
    for turn in range(repeat + 1):
        shuffled = frame.shuffle("key").persist()
        wait(shuffled)
        taken = client.run(lambda dask_worker: dask_worker.plugins[Spans.name].take())
        check(fingerprints(shuffled), expected, False)
        if turn:
            found.append(Latency.between(span for spans in taken.values() for span in spans))
        del shuffled
    return found


def figures(found: list[Latency]) -> dict[str, dict[str, float]]:
    """Summarise latencies: the least, the quartiles and the greatest of each part."""
    summary = {}
    for name, values in zip(asdict(found[0]), zip(*map(astuple, found), strict=True), strict=True):
        low, median, high = statistics.quantiles(values, method="inclusive")
        summary[name] = {
            "min": min(values), "quartile": low, "median": median, "third_quartile": high, "max": max(values)
        }  # fmt: skip
    return summary


def show(summary: dict[str, dict[str, float]]) -> None:
    """Print the figures."""
    table = Table("ms", *next(iter(summary.values())))
    for name, values in summary.items():
        table.add_row(name.replace("_", " "), *(f"{value:.1f}" for value in values.values()))
    Console().print(table)


def ours(method: str) -> Callable[[Client], None]:
    """Return what switches the runtime on for a method, if that needs it."""
    return dask_gpurt.enable if method == "gpurt" else (lambda client: None)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--partitions", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--rows", type=click.IntRange(min=1), default=1000, show_default=True, help="Of a partition.")
@click.option("--workers", type=click.IntRange(min=1), help="[default: 2, or one per GPU]")
@click.option("--repeat", type=click.IntRange(min=2), default=20, show_default=True, help="Warm shuffles.")
@click.option("--method", type=click.Choice(["gpurt", "p2p"]), default="gpurt", show_default=True)
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    partitions: int,
    rows: int,
    workers: int | None,
    repeat: int,
    method: str,
    backend: str,
    protocol: str | None,
    output: Path | None,
) -> None:
    backend = choose_backend(backend)
    workers = workers or default_workers(backend)
    with (
        dask.config.set({"dataframe.shuffle.method": method}),
        local_cluster(backend, workers, protocol) as cluster,
        Client(cluster) as client,
    ):
        ours(method)(client)
        client.register_plugin(Spans())
        found = measure(client, partitions, rows, repeat, backend)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {
            "partitions": partitions, "rows": rows, "workers": workers, "repeat": repeat, "method": method,
            "backend": backend, "protocol": protocol,
        },
        **environment(),
        "figures": figures(found),
        "runs": [asdict(one) for one in found],
    }  # fmt: skip
    write(results, output)
    show(results["figures"])


if __name__ == "__main__":
    main()
