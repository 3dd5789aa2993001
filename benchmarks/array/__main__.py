"""Time rechunks of an array by method, side by side on two clusters, and compare every chunk.

    python -m benchmarks.array --size 2GiB --chunks 16 --workers 2 --repeat 5 --json results.json

The array holds random float64, is chunked by rows, and is on the workers before the clock starts. ``rechunk``
rechunks it by columns, ``transpose`` rechunks its transpose by rows. The timed part is building the graph,
``persist`` and ``wait``. The methods take turns, and each turn starts with a different method. ``gpurt`` is
``p2p`` on a cluster with the runtime on. The other methods run on a second cluster where it was never on and
which has the same array: ``p2p`` is Dask's own as shipped, which writes to files, ``p2p-memory`` is the same
with ``distributed.p2p.storage.disk: false``, and ``tasks`` has no barrier. One cluster computes at a time.
With ``--backend cupy`` each worker has a GPU, which it shares with a worker of the other cluster.

Besides wall time it reports the CPU time of all workers and of the process of client and scheduler, which is
more reliable on a machine with other load. Ratios compare each method with ``gpurt`` in the same turn: the
median of the turns, with a 95% bootstrap interval. The checksums of all chunks must agree between methods.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import click
import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, SpecCluster, wait
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import in_bytes, split_list, write
from benchmarks.common.environment import environment
from benchmarks.common.peaks import PeakMemory, take_peaks

OURS = "gpurt"
METHODS = (OURS, "p2p", "p2p-memory", "tasks")
#: The timed operations, given an array chunked by rows, its number of chunks and Dask's method.
OPERATIONS: Mapping[str, Callable[[da.Array, int, str], da.Array]] = {
    "rechunk": lambda rows, chunks, how: rows.rechunk((-1, rows.shape[1] // chunks), method=how),
    "transpose": lambda rows, chunks, how: rows.T.rechunk((rows.shape[0] // chunks, -1), method=how),
}
#: Bootstrap samples for the intervals of ratios.
RESAMPLES = 2000


@dataclass(frozen=True)
class Run:
    """Record one timed run; ``turn`` 0, the first of its method and operation, is a discarded warm-up.

    Attributes
    ----------
    seconds, processor_seconds
        Wall time; and CPU time of all processes together.
    peak_bytes
        Peak of each tier, on the worker where it was highest.
    """

    operation: str
    method: str
    turn: int
    seconds: float
    processor_seconds: float
    peak_bytes: dict[str, int]


def measure(
    clients: Mapping[str, Client],
    size: int,
    chunks: int,
    methods: Sequence[str],
    operations: Sequence[str],
    repeat: int,
) -> list[Run]:
    """Run every operation with every method on that method's client, in turns."""
    runs = []
    arrays: dict[Client, da.Array] = {}
    for client in set(clients.values()):
        arrays[client] = client.persist(random_rows(size, chunks))
        with client.as_current():
            wait(arrays[client])
    for operation in operations:
        expected: list[int] = []
        for turn in range(repeat + 1):
            first = turn % len(methods)
            for method in [*methods[first:], *methods[:first]]:
                client = clients[method]
                run, checksums = timed_run(client, operation, method, turn, arrays[client], chunks)
                expected = expected or checksums
                if checksums != expected:
                    raise ValueError(f"{operation}: {method} gives other chunks than {methods[0]}")
                runs.append(run)
                Console(stderr=True).print(
                    f"{operation}, {method}, run {turn}: {run.seconds:.2f} s, "
                    f"{run.processor_seconds:.2f} processor seconds",
                    style="dim",
                )
    return runs


def random_rows(size: int, chunks: int) -> da.Array:
    """Return a square array of about ``size`` bytes, in ``chunks`` chunks of whole rows."""
    side = math.isqrt(size // 8) // chunks * chunks
    return da.random.default_rng(7).random((side, side), chunks=(side // chunks, side))


def timed_run(
    client: Client, operation: str, method: str, turn: int, rows: da.Array, chunks: int
) -> tuple[Run, list[int]]:
    """Time an operation with one method, and return the run and the checksums of its chunks."""
    client.run(gc.collect)
    take_peaks(client)
    with client.as_current(), dask.config.set({"distributed.p2p.storage.disk": method != "p2p-memory"}):
        before, began = processor_seconds(client), time.perf_counter()
        how = "tasks" if method == "tasks" else "p2p"
        result = client.persist(OPERATIONS[operation](rows, chunks, how))
        wait(result)
        seconds = time.perf_counter() - began
    used = processor_seconds(client) - before
    run = Run(operation, method, turn, seconds, used, take_peaks(client))
    blocks = [dask.delayed(checksum)(block) for block in result.to_delayed().ravel()]
    return run, client.gather(client.compute(blocks))


def processor_seconds(client: Client) -> float:
    """Return the CPU time of all processes so far, in seconds."""
    return time.process_time() + sum(client.run(time.process_time).values())


def checksum(block: Any) -> int:
    """Return the checksum of a numpy or cupy chunk, its shape included."""
    block = block.get() if hasattr(block, "get") else block
    return zlib.crc32(np.ascontiguousarray(block), zlib.crc32(repr(block.shape).encode()))


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the medians of each operation and method, and their ratios to ``gpurt``."""
    found = []
    for operation, method in dict.fromkeys((run.operation, run.method) for run in runs):
        mine = _warm(runs, operation, method)
        ours = _warm(runs, operation, OURS)
        row: dict[str, Any] = {"operation": operation, "method": method}
        for what in ("seconds", "processor_seconds"):
            values = [getattr(run, what) for run in mine]
            row[what] = {"median": median(values), "min": min(values), "max": max(values)}
            if ours and method != OURS:
                theirs = [getattr(run, what) for run in ours]
                row[what]["times_gpurt"] = compare(values, theirs)
        row["peak_bytes"] = {
            tier: max(run.peak_bytes.get(tier, 0) for run in mine) for tier in mine[0].peak_bytes
        }
        found.append(row)
    return found


def _warm(runs: Sequence[Run], operation: str, method: str) -> list[Run]:
    found = [run for run in runs if (run.operation, run.method) == (operation, method) and run.turn]
    return sorted(found, key=lambda run: run.turn)


def compare(values: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Return the median ratio of paired runs, with a 95% bootstrap interval."""
    ratios = [value / our for value, our in zip(values, ours, strict=True)]
    random = Random(0)
    drawn = sorted(median(random.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return {
        "median": median(ratios),
        "interval": [drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)]],
    }


@contextmanager
def _client(workers: int, backend: str, protocol: str | None, pool: int) -> Iterator[Client]:
    """Start a cluster and yield its client."""
    with (
        _cluster(workers, backend, protocol, pool) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.register_plugin(PeakMemory())
        yield client


def _cluster(workers: int, backend: str, protocol: str | None, pool: int) -> SpecCluster:
    options: dict[str, Any] = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "dashboard_address": ":0",
        "silence_logs": logging.ERROR,
        "protocol": protocol,
    }
    if backend == "numpy":
        return LocalCluster(processes=True, **options)
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(rmm_pool_size=pool, **options)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--size", default="2GiB", show_default=True, callback=in_bytes)
@click.option("--chunks", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--backend", type=click.Choice(["numpy", "cupy"]), default="numpy", show_default=True)
@click.option("--protocol", help="Protocol of the workers, such as ucx.  [default: Dask's]")
@click.option(
    "--pool",
    default="24GiB",
    show_default=True,
    callback=in_bytes,
    help="Size of rmm's pool on each GPU worker.",
)
@click.option("--methods", default=",".join(METHODS), show_default=True, callback=split_list(METHODS))
@click.option("--operation", default=",".join(OPERATIONS), callback=split_list(list(OPERATIONS)))
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Warm runs.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    size: int,
    chunks: int,
    workers: int,
    backend: str,
    protocol: str | None,
    pool: int,
    methods: list[str],
    operation: list[str],
    repeat: int,
    output: Path | None,
) -> None:
    with ExitStack() as stack:
        stack.enter_context(dask.config.set({"array.backend": backend}))
        ours, theirs = (stack.enter_context(_client(workers, backend, protocol, pool)) for _ in range(2))
        dask_gpurt.enable(ours)
        clients = {method: ours if method == OURS else theirs for method in methods}
        runs = measure(clients, size, chunks, methods, operation, repeat)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {
            "size": size,
            "chunks": chunks,
            "workers": workers,
            "backend": backend,
            "protocol": protocol,
            "methods": methods,
            "operations": operation,
            "repeat": repeat,
        },
        **environment(),
        "figures": figures(runs),
        "runs": [asdict(run) for run in runs],
    }
    write(results, output)
    for row in results["figures"]:
        Console().print(_line(row))


def _line(row: Mapping[str, Any]) -> str:
    told = [f"{row['operation']}, {row['method']}:"]
    for what, unit in (("seconds", "s"), ("processor_seconds", "processor s")):
        told.append(f"{row[what]['median']:.2f} {unit}")
        if "times_gpurt" in row[what]:
            ratio = row[what]["times_gpurt"]
            low, high = ratio["interval"]
            told.append(f"({ratio['median']:.2f} [{low:.2f}, {high:.2f}] times gpurt)")
    return " ".join(told)


if __name__ == "__main__":
    main()
