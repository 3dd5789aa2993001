"""Time shuffles by method, side by side on one cluster, and check every result.

    python benchmarks/shuffle.py --size 1GiB --partitions 16 --workers 2 --methods gpurt,p2p,tasks \\
        --operation shuffle,merge,set_index --repeat 3 --json results.json

The data are random int64 keys with an int64 payload, on the workers before the clock starts. Timed is
building the graph, ``persist`` and ``wait``. The methods take turns, and ``p2p`` is Dask's own, as shipped.
The first run of each method is told apart from the warm ones.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
import dask
import dask.dataframe as dd
from dask.base import compute
from dask.delayed import delayed
from dask.utils import format_bytes, parse_bytes
from distributed import Client, wait
from distributed.diagnostics import nvml
from links import link_limit
from peaks import PeakMemory, take_peaks
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import dask_gpurt
from dask_gpurt.cli.demo import METHODS, choose_backend, exchange_bytes, local_cluster
from dask_gpurt.cli.report import environment, speedups

ROW_BYTES = 16
GIB = 2**30
WRAP = 2**64
STRIDE = 1_000_000_007
WEIGHT = 0x9E3779B97F4A7C1


class Fingerprint(NamedTuple):
    """What tells one set of rows from another, in any order: sums modulo 2**64, and the range of the keys."""

    rows: int
    key: int
    payload: int
    key_times_payload: int
    weight: int | None
    lowest: int | None
    highest: int | None
    ascends: bool


@dataclass
class Inputs:
    """The frames of an operation and what its result has to add up to."""

    size: int
    frames: list[Any]
    expected: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Operation:
    """How the input of an operation is made, and what is timed."""

    prepare: Callable[[int, int, str], Inputs]
    run: Callable[[Inputs], Any]
    sorts: bool = False


@dataclass
class Run:
    """One timed run. ``turn`` 0 is the first one of its method and operation."""

    operation: str
    method: str
    turn: int
    seconds: float
    rows: int
    peak_bytes: dict[str, int]
    exchange_bytes: dict[str, int] = field(default_factory=dict)


def make_random(part: int, rows: int, highest: int, backend: str) -> Any:
    """Make a partition of uniformly random keys below ``highest``, with a random payload."""
    random = _arrays(backend).random.RandomState(part)
    key, payload = (random.randint(0, end, rows, dtype="int64") for end in (highest, 2**62))
    return importlib.import_module(backend).DataFrame({"key": key, "payload": payload})


def make_unique(part: int, rows: int, total: int, backend: str) -> Any:
    """Make a partition of a permutation of the keys below ``total``; the key tells the weight."""
    position = _arrays(backend).arange(part * rows, (part + 1) * rows, dtype="int64")
    key = position * STRIDE % total
    return importlib.import_module(backend).DataFrame({"key": key, "weight": key * WEIGHT})


def _arrays(backend: str) -> Any:
    return importlib.import_module({"pandas": "numpy", "cudf": "cupy"}[backend])


def prepare_one(size: int, partitions: int, backend: str) -> Inputs:
    """Make one frame of random keys."""
    rows = size // ROW_BYTES // partitions
    frame = _persisted(make_random, partitions, rows, 2**62, backend)
    return Inputs(size, [frame], expected=totals(fingerprints(frame)))


def prepare_two(size: int, partitions: int, backend: str) -> Inputs:
    """Make two frames of half the size: every key of the left one is once in the right one.

    The inner merge has the rows of the left frame then, and what its columns add up to is known beforehand.
    """
    rows = size // 2 // ROW_BYTES // partitions
    total = rows * partitions
    assert math.gcd(STRIDE, total) == 1, "not a permutation"
    left = _persisted(make_random, partitions, rows, total, backend)
    right = _persisted(make_unique, partitions, rows, total, backend)
    *sums, _ = totals(fingerprints(left))
    return Inputs(size, [left, right], expected=(*sums, sums[1] * WEIGHT % WRAP))  # type: ignore[operator]


def _persisted(make: Callable[..., Any], partitions: int, rows: int, highest: int, backend: str) -> Any:
    meta = make(0, 1, highest, backend).iloc[:0]
    frame = dd.from_map(make, range(partitions), args=[rows, highest, backend], meta=meta).persist()
    wait(frame)
    return frame


OPERATIONS = {
    "shuffle": Operation(prepare_one, lambda inputs: inputs.frames[0].shuffle("key")),
    "merge": Operation(
        prepare_two, lambda inputs: inputs.frames[0].merge(inputs.frames[1], on="key", broadcast=False)
    ),
    "set_index": Operation(
        prepare_one,
        lambda inputs: inputs.frames[0].set_index("key", npartitions=inputs.frames[0].npartitions),
        sorts=True,
    ),
}


def fingerprint(frame: Any) -> Fingerprint:
    """Take the fingerprint of a partition of any backend."""
    if frame.index.name == "key":
        frame = frame.reset_index()
    key, payload = frame["key"], frame["payload"]
    return Fingerprint(
        rows=len(frame),
        key=int(key.sum()) % WRAP,
        payload=int(payload.sum()) % WRAP,
        key_times_payload=int((key * payload).sum()) % WRAP,
        weight=int(frame["weight"].sum()) % WRAP if "weight" in frame.columns else None,
        lowest=int(key.min()) if len(frame) else None,
        highest=int(key.max()) if len(frame) else None,
        ascends=bool(key.is_monotonic_increasing),
    )


def fingerprints(frame: Any) -> list[Fingerprint]:
    """Take the fingerprints of all partitions, where they are."""
    taken = [delayed(fingerprint)(part) for part in frame.to_delayed(optimize_graph=False)]
    return list(compute(*taken))


def totals(parts: Sequence[Fingerprint]) -> tuple[int | None, ...]:
    """Add up fingerprints: rows, key, payload, key times payload, weight."""

    def total(values: Sequence[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) % WRAP if known else None

    return tuple(total([part[i] for part in parts]) for i in range(5))


def check(parts: Sequence[Fingerprint], expected: tuple[int | None, ...], sorts: bool) -> None:
    """Raise unless the partitions of a result hold the expected rows, in order where it has to be sorted."""
    if totals(parts) != expected:
        raise ValueError(f"rows and checksums are {totals(parts)}, not {expected}")
    filled = [part for part in parts if part.rows]
    disorder = [before for before, after in itertools.pairwise(filled) if before.highest > after.lowest]  # type: ignore[operator]
    if sorts and (disorder or not all(part.ascends for part in filled)):
        raise ValueError("the result is not in the order of its key")


def measure(client: Client, parameters: Mapping[str, Any]) -> tuple[list[Run], dict[str, int]]:
    """Run every operation with every method, taking turns; also return the size of each input."""
    methods = parameters["methods"]
    runs, sizes = [], {}
    for name in parameters["operations"]:
        inputs = OPERATIONS[name].prepare(parameters["size"], parameters["partitions"], parameters["backend"])
        sizes[name] = inputs.size
        placed: list[tuple[int | None, ...]] = []
        for turn in range(parameters["repeat"] + 1):
            first = turn % len(methods)
            for method in [*methods[first:], *methods[:first]]:
                run, parts = timed_run(client, name, method, turn, inputs)
                # Each row has to be in the same partition whatever the method.
                placed = placed or [part[:4] for part in parts]
                if placed != [part[:4] for part in parts]:
                    raise ValueError(f"{name}: {method} placed rows in other partitions than {methods[0]}")
                runs.append(run)
                Console(stderr=True).print(f"{name}, {method}, run {turn}: {run.seconds:.3f} s", style="dim")
        del inputs
    return runs, sizes


def timed_run(
    client: Client, name: str, method: str, turn: int, inputs: Inputs
) -> tuple[Run, list[Fingerprint]]:
    """Time an operation with one method, then check the result and let it go."""
    operation = OPERATIONS[name]
    before = exchange_bytes(client) if method == "gpurt" else {}
    client.run(gc.collect)
    take_peaks(client)
    start = time.perf_counter()
    with dask.config.set({"dataframe.shuffle.method": method}):
        result = operation.run(inputs).persist()
    wait(result)
    seconds = time.perf_counter() - start
    peaks = take_peaks(client)
    after = exchange_bytes(client) if method == "gpurt" else {}
    moved = {path: size - before.get(path, 0) for path, size in after.items()}
    parts = fingerprints(result)
    try:
        check(parts, inputs.expected, operation.sorts)
    except ValueError as wrong:
        raise ValueError(f"{name} with {method}, run {turn}: {wrong}") from None
    rows = sum(part.rows for part in parts)
    return Run(name, method, turn, seconds, rows, peaks, moved), parts


def summarise(
    runs: Sequence[Run], sizes: Mapping[str, int], limit: float, workers: int
) -> list[dict[str, Any]]:
    """Derive the figures of each operation and method from its runs.

    The share of the link limit counts the bytes that have to change their worker: all but one part
    in ``workers``.
    """
    figures = []
    crossing = (workers - 1) / workers if workers > 1 else 1.0
    for name, method in dict.fromkeys((run.operation, run.method) for run in runs):
        mine = [run for run in runs if (run.operation, run.method) == (name, method)]
        warm = [run.seconds for run in mine if run.turn > 0]
        rate = sizes[name] / statistics.median(warm)
        figures.append(
            {
                "operation": name,
                "method": method,
                "first_seconds": mine[0].seconds,
                "median_seconds": statistics.median(warm),
                "min_seconds": min(warm),
                "max_seconds": max(warm),
                "bytes_per_second": rate,
                "gib_per_second": rate / GIB,
                "share_of_link_limit": rate * crossing / limit,
                "peak_bytes": {
                    tier: max(run.peak_bytes[tier] for run in mine) for tier in mine[0].peak_bytes
                },
            }
        )
    return figures


def warm_seconds(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """Collect the timings of all but the first runs, by operation and method."""
    warm: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if run.turn > 0:
            warm.setdefault(run.operation, {}).setdefault(run.method, []).append(run.seconds)
    return warm


def print_summary(results: Mapping[str, Any]) -> None:
    """Print one line per operation and method, and the speedups."""
    parameters, limit = results["parameters"], results["link_limit"]
    console = Console()
    console.print(
        f"{format_bytes(parameters['size'])} in {parameters['partitions']} partitions, "
        f"{parameters['backend']}, {parameters['workers']} workers"
    )
    console.print(f"Link limit: {limit['bytes_per_second'] / GIB:.1f} GiB/s, {limit['what']}")
    console.print(_summary_table(results["figures"]))
    for method, ratio in results["speedups"].items():
        console.print(f"gpurt against {method}: {ratio:.2f} times as fast (geometric mean, warm)")


def _summary_table(figures: Sequence[Mapping[str, Any]]) -> Table:
    tiers = list(figures[0]["peak_bytes"])
    caption = "Seconds of the first and the warm runs; peak GiB of memory per tier"
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("operation", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for heading in ("first", "median", "min", "max", "GiB/s", "of limit", *tiers):
        table.add_column(heading, justify="right")
    for figure in figures:
        seconds = (f"{figure[f'{which}_seconds']:.2f}" for which in ("first", "median", "min", "max"))
        peaks = (f"{figure['peak_bytes'][tier] / GIB:.2f}" for tier in tiers)
        rates = (f"{figure['gib_per_second']:.2f}", f"{figure['share_of_link_limit']:.1%}")
        table.add_row(figure["operation"], figure["method"], *seconds, *rates, *peaks)
    return table


def split_list(known: Sequence[str]) -> Callable[[Any, Any, str], list[str]]:
    """Make a click callback for a comma-separated list out of known words."""

    def split(_: Any, parameter: click.Parameter, text: str) -> list[str]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words or set(words) - set(known):
            raise click.BadParameter(f"{text!r} is not a list out of {', '.join(known)}")
        return words

    return split


@click.command(help=__doc__.partition("\n")[0])
@click.option("--size", default="1GiB", show_default=True, callback=lambda _, __, text: parse_bytes(text))
@click.option("--partitions", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="[default: 2, or one per GPU]")
@click.option("--methods", default=",".join(METHODS), show_default=True, callback=split_list(METHODS))
@click.option("--operation", default=",".join(OPERATIONS), callback=split_list(list(OPERATIONS)))
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Warm runs.")
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--rmm-pool-size", default="0.5", show_default=True, help="RMM pool: share of a GPU, or size.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    size: int,
    partitions: int,
    workers: int | None,
    methods: list[str],
    operation: list[str],
    repeat: int,
    backend: str,
    protocol: str | None,
    rmm_pool_size: str,
    output: Path | None,
) -> None:
    backend = choose_backend(backend)
    workers = workers or (nvml.device_get_count() if backend == "cudf" else 2)
    pool = float(rmm_pool_size) if rmm_pool_size.replace(".", "", 1).isdigit() else rmm_pool_size
    parameters = {
        "size": size,
        "partitions": partitions,
        "workers": workers,
        "methods": methods,
        "operations": operation,
        "repeat": repeat,
        "backend": backend,
        "protocol": protocol,
        "rmm_pool_size": pool if backend == "cudf" else None,
    }
    with local_cluster(backend, workers, protocol, pool) as cluster, Client(cluster) as client:
        if "gpurt" in methods:
            dask_gpurt.enable(client)
        client.register_plugin(PeakMemory())
        runs, sizes = measure(client, parameters)
        limit = link_limit(client, backend)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": parameters,
        **environment(),
        "link_limit": limit,
        "figures": summarise(runs, sizes, limit["bytes_per_second"], workers),
        "speedups": speedups(warm_seconds(runs)),
        "runs": [asdict(run) for run in runs],
    }
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
    print_summary(results)


if __name__ == "__main__":
    main()
