"""Measure the cost of tracing a shuffle, in CPU seconds of the cluster.

    python -m benchmarks.shuffle.traced --size 512MiB --partitions 16 --repeat 20 --json results.json

Shuffles of one persisted frame run in pairs, with a trace and without, in an order that alternates. CPU time
is that of all workers and of this process, which has the scheduler and the client, from building the graph to
the end of the trace: it includes recording, packing, sending and collecting, but not writing the file.

On a machine with other load the difference is lost in the noise. So the cost is also added up from parts that
are timed alone: an empty trace, and recording and packing each event of a shuffle.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import click
import dask.dataframe as dd
from distributed import Client, wait
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import in_bytes, write
from benchmarks.common.environment import environment
from benchmarks.common.rows import ROW_BYTES, make_random
from dask_gpurt.cli.cluster import default_workers, local_cluster
from dask_gpurt.client.traces import Collector
from dask_gpurt.observe import Metrics
from dask_gpurt.observe.recording import Recording

#: Events to time together.
EVENTS = 20_000
#: Bootstrap samples for an interval.
DRAWS = 2000


@dataclass(frozen=True)
class Shuffled:
    """Record the cost of one shuffle, and the number of its traced events."""

    traced: bool
    processor_seconds: float
    seconds: float
    events: int


def processor_seconds(client: Client) -> float:
    """Return the CPU seconds of the workers and of this process so far."""
    return time.process_time() + sum(client.run(time.process_time).values())


def shuffle(client: Client, frame: Any, traced: bool) -> Shuffled:
    """Shuffle once, with or without a trace."""
    client.run(gc.collect)
    gc.collect()
    before, began = processor_seconds(client), time.perf_counter()
    collector = client.sync(_begin, client) if traced else None
    result = frame.shuffle("key").persist()
    wait(result)
    seconds = time.perf_counter() - began
    trace = client.sync(collector.end) if collector is not None else None
    used = processor_seconds(client) - before
    del result
    events = sum(len(process.events) for process in trace.processes.values()) if trace is not None else 0
    return Shuffled(traced, used, seconds, events)


async def _begin(client: Client) -> Collector:
    collector = Collector(client)
    await collector.begin()
    return collector


def ratio(runs: Sequence[Shuffled]) -> float:
    """Return the ratio of the lower quartiles of CPU seconds, with a trace to without.

    Lower quartiles, as other load only ever adds CPU time, for instance by evicting caches.
    """

    def quartile(traced: bool) -> float:
        return statistics.quantiles([run.processor_seconds for run in runs if run.traced is traced], n=4)[0]

    return quartile(True) / quartile(False)


def interval(runs: Sequence[Shuffled]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the ratio, from resampled pairs."""
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    draw = Random(0)
    drawn = sorted(
        ratio([run for pair in draw.choices(pairs, k=len(pairs)) for run in pair]) for _ in range(DRAWS)
    )
    return drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]


def empty_trace(client: Client) -> float:
    """Return the CPU seconds of a trace of an idle cluster."""
    before = processor_seconds(client)
    between = processor_seconds(client)
    collector = client.sync(_begin, client)
    client.sync(collector.end)
    return processor_seconds(client) - between - (between - before)


def one_event() -> float:
    """Return the CPU seconds to record, take and pack a typical event."""
    metrics = Metrics()

    def timed() -> float:
        began = time.thread_time()
        for number in range(EVENTS):
            with metrics.seconds("shuffle.seconds.packing", number):
                pass
        if metrics.recording is not None:
            json.dumps(metrics.recording.take(EVENTS).events)
        return time.thread_time() - began

    plain = min(timed() for _ in range(5))
    metrics.recording = Recording()
    return (min(timed() for _ in range(5)) - plain) / EVENTS


def added_up(client: Client, runs: Sequence[Shuffled]) -> dict[str, float]:
    """Return the cost of a trace, added up from its parts, and its share of a shuffle."""
    empty = statistics.median(empty_trace(client) for _ in range(20))
    event, events = one_event(), max(run.events for run in runs)
    plain = statistics.quantiles([run.processor_seconds for run in runs if not run.traced], n=4)[0]
    return {"empty": empty, "event": event, "events": events, "share": (empty + event * events) / plain}


def measure(client: Client, parameters: Mapping[str, Any]) -> list[Shuffled]:
    """Run the shuffles in turns, after a discarded one of each kind."""
    rows = parameters["size"] // ROW_BYTES // parameters["partitions"]
    args: list[Any] = [rows, 2**62, parameters["backend"]]
    meta = make_random(0, 1, *args[1:]).iloc[:0]
    frame = dd.from_map(make_random, range(parameters["partitions"]), args=args, meta=meta).persist()
    wait(frame)
    for traced in (True, False):
        shuffle(client, frame, traced)
    runs = []
    for turn in range(parameters["repeat"]):
        order = (True, False) if turn % 2 else (False, True)
        runs += [shuffle(client, frame, traced) for traced in order]
        if not turn:
            continue
        Console(stderr=True).print(f"{turn + 1} pairs: {ratio(runs) - 1:+.2%}", style="dim")
    return runs


@click.command()
@click.option("--size", default="512MiB", show_default=True, callback=in_bytes, help="Bytes of the frame.")
@click.option("--partitions", default=16, show_default=True)
@click.option("--workers", type=int, help="One for each GPU, or two.")
@click.option("--backend", type=click.Choice(["pandas", "cudf"]), default="pandas", show_default=True)
@click.option("--repeat", default=20, show_default=True, help="Pairs of shuffles.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    size: int, partitions: int, workers: int | None, backend: str, repeat: int, output: Path | None
) -> None:
    """Measure the cost of tracing a shuffle."""
    workers = workers or default_workers(backend)
    parameters: dict[str, Any] = {"size": size, "partitions": partitions, "workers": workers}
    parameters |= {"backend": backend, "repeat": repeat}
    with local_cluster(backend, workers) as cluster, Client(cluster) as client:
        dask_gpurt.enable(client)
        runs = measure(client, parameters)
        parts = added_up(client, runs)
    low, high = interval(runs)
    figures = {"ratio": ratio(runs), "low": low, "high": high, "added up": parts}
    click.echo(json.dumps(figures))
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "parameters": parameters,
        "figures": figures,
        "runs": [asdict(run) for run in runs],
    }
    write(results, output)


if __name__ == "__main__":
    main()
