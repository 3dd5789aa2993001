"""Time shuffles by method, side by side on one cluster, and check every result.

    python -m benchmarks.shuffle --size 1GiB --partitions 16 --workers 2 --methods gpurt,p2p,tasks \\
        --operation shuffle,merge,set_index --repeat 3 --json results.json

The data are random int64 keys with an int64 payload, on the workers before the clock starts. The timed part
is building the graph, ``persist`` and ``wait``. The methods take turns. ``p2p`` is Dask's own as shipped. The
first run of each method is reported separately from the warm runs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
from distributed import Client, wait
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import in_bytes, split_list, write
from benchmarks.common.environment import environment
from benchmarks.common.links import link_limit
from benchmarks.common.moved import moved
from benchmarks.common.peaks import PeakMemory, take_peaks
from benchmarks.common.rows import (
    ROW_BYTES,
    STRIDE,
    WEIGHT,
    WRAP,
    Fingerprint,
    check,
    fingerprints,
    make_random,
    make_unique,
    totals,
)
from benchmarks.shuffle.figures import Run, print_summary, summarise, warm_seconds
from dask_gpurt.cli.cluster import choose_backend, default_workers, local_cluster
from dask_gpurt.tools.demo.command import METHODS, exchange_bytes, speedups

#: The runtime's method.
OURS = "gpurt"


@dataclass
class Inputs:
    """Hold the frames of an operation and the expected totals of its result."""

    size: int
    frames: list[Any]
    expected: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Operation:
    """Prepare the input of an operation, and build the collection to time."""

    prepare: Callable[[int, int, str], Inputs]
    run: Callable[[Inputs], Any]
    sorts: bool = False


def prepare_one(size: int, partitions: int, backend: str) -> Inputs:
    """Make one frame of random keys."""
    rows = size // ROW_BYTES // partitions
    frame = _persisted(make_random, partitions, rows, 2**62, backend)
    return Inputs(size, [frame], expected=totals(fingerprints(frame)))


def prepare_two(size: int, partitions: int, backend: str) -> Inputs:
    """Make two frames of half the size; every key of the left frame occurs once in the right one.

    So the inner merge has the rows of the left frame, and the totals of its columns are known beforehand.
    """
    rows = size // 2 // ROW_BYTES // partitions
    total = rows * partitions
    assert math.gcd(STRIDE, total) == 1, "not a permutation"
    left = _persisted(make_random, partitions, rows, total, backend)
    right = _persisted(make_unique, partitions, rows, total, backend)
    parts = fingerprints(left)
    *sums, _ = totals(parts)
    weights = sum(part.key for part in parts) * WEIGHT % WRAP
    return Inputs(size, [left, right], expected=(*sums, weights))


def prepare_groups(size: int, partitions: int, backend: str) -> Inputs:
    """Make one frame with about eight rows per key; only the total of the sums is known beforehand."""
    rows = size // ROW_BYTES // partitions
    frame = _persisted(make_random, partitions, rows, rows * partitions // 8, backend)
    _, _, payload, *_ = totals(fingerprints(frame))
    return Inputs(size, [frame], expected=(None, None, payload, None, None))


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
    "groupby": Operation(
        prepare_groups,
        lambda inputs: (
            inputs.frames[0]
            .groupby("key", sort=False)
            .payload.sum(split_out=inputs.frames[0].npartitions)
            .reset_index()
        ),
    ),
    "set_index": Operation(
        prepare_one,
        lambda inputs: inputs.frames[0].set_index("key", npartitions=inputs.frames[0].npartitions),
        sorts=True,
    ),
}


def measure(client: Client, parameters: Mapping[str, Any]) -> tuple[list[Run], dict[str, int]]:
    """Run every operation with every method in turns; return the runs and the size of each input."""
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
                # Each row must be in the same partition with every method.
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
    """Time an operation with one method, then check and release the result."""
    operation, ours = OPERATIONS[name], method == OURS
    before, there = exchange_bytes(client) if ours else {}, moved(client) if ours else 0
    client.run(gc.collect)
    take_peaks(client)
    start = time.perf_counter()
    with dask.config.set({"dataframe.shuffle.method": "gpurt" if ours else method}):
        result = operation.run(inputs).persist()
    wait(result)
    seconds = time.perf_counter() - start
    peaks = take_peaks(client)
    after = exchange_bytes(client) if ours else {}
    by_path = {path: size - before.get(path, 0) for path, size in after.items()}
    changed = moved(client) - there if ours else None
    parts = fingerprints(result)
    try:
        check(parts, inputs.expected, operation.sorts)
    except ValueError as wrong:
        raise ValueError(f"{name} with {method}, run {turn}: {wrong}") from None
    rows = sum(part.rows for part in parts)
    return Run(name, method, turn, seconds, rows, peaks, by_path, changed), parts


@click.command(help=__doc__.partition("\n")[0])
@click.option("--size", default="1GiB", show_default=True, callback=in_bytes)
@click.option("--partitions", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="[default: 2, or one per GPU]")
@click.option("--methods", default=",".join(METHODS), show_default=True, callback=split_list(list(METHODS)))
@click.option("--operation", default=",".join(OPERATIONS), callback=split_list(list(OPERATIONS)))
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Warm runs.")
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option(
    "--rmm-pool-size", default="0.5", show_default=True, help="RMM pool: share of a GPU, size, or none."
)
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
    workers = workers or default_workers(backend)
    share = rmm_pool_size.replace(".", "", 1).isdigit()
    pool = None if rmm_pool_size == "none" else float(rmm_pool_size) if share else rmm_pool_size
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
    with (
        local_cluster(backend, workers, protocol, pool) as cluster,
        Client(cluster) as client,
    ):
        if OURS in methods:
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
    write(results, output)
    print_summary(results)


if __name__ == "__main__":
    main()
