"""Shuffle, merge and sort more than fits into memory, kept in several ways, and check every result.

    python benchmarks/out_of_core.py --size 2GiB --partitions 64 --device 64MiB --pinned 64MiB --pool 64MiB

The rows are made by tasks, go through the operation, and are reduced to fingerprints: nothing has to be kept
but what the operation itself keeps. Contenders take turns, each run on a cluster of its own:

``gpurt``
    this runtime with its tiers;
``tasks``
    Dask's task-based shuffle with the worker's own spilling: of dask-cuda on GPUs, else of Dask;
``p2p``
    Dask's own, which keeps shards on disk, with the worker's own spilling.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
from dask.delayed import delayed
from dask.utils import format_bytes, parse_bytes
from distributed import Client, LocalCluster, wait
from distributed.diagnostics import nvml
from peaks import PeakMemory, take_peaks
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from samples import Samples, take_samples, take_tasks
from shuffle import GIB, ROW_BYTES, STRIDE, WEIGHT, WRAP, check, fingerprint, split_list
from stalls import LoopStalls, take_stacks, take_stalls

import dask_gpurt
from dask_gpurt.cli.demo import choose_backend
from dask_gpurt.cli.report import environment

CONTENDERS = ("gpurt", "tasks", "p2p")
MIB = 2**20
#: The share of the data that is run first with ``--warm``: one of so many.
WARM = 16
#: Rows whose products are summed at once: as many as a cache holds.
PIECE = 1 << 16


@dataclass(frozen=True)
class Budget:
    """Bytes per worker. ``rmm`` is all that a GPU gives besides the exchange pool, by CUDA's own pool."""

    device: int
    pinned: int
    host: int
    pool: int
    rmm: int | None


@dataclass
class Run:
    """One timed run; ``error`` says why there are no figures."""

    operation: str
    contender: str
    turn: int
    seconds: float | None = None
    error: str | None = None
    peak_bytes: Mapping[str, int] | None = None
    stalls: Mapping[str, float] | None = None
    counters: Mapping[str, float] | None = None
    #: Where the threads were, when that was asked for.
    samples: Mapping[str, Any] | None = None
    #: Of a run that took too long: what the tiers held, and where each thread was.
    held: Sequence[Any] | None = None
    stacks: Mapping[str, Mapping[str, str]] | None = None


def make(part: int, rows: int, total: int, backend: str) -> Any:
    """Make a partition of a permutation of the keys below ``total``."""
    arrays = importlib.import_module({"pandas": "numpy", "cudf": "cupy"}[backend])
    position = arrays.arange(part * rows, (part + 1) * rows, dtype="int64")
    key = position * STRIDE % total
    return importlib.import_module(backend).DataFrame({"key": key, "payload": position})


def collection(size: int, partitions: int, backend: str) -> Any:
    """Describe a frame of ``size`` bytes; its rows are made when they are needed."""
    rows = size // ROW_BYTES // partitions
    meta = make(0, 1, 1, backend).iloc[:0]
    return dd.from_map(make, range(partitions), args=[rows, rows * partitions, backend], meta=meta)


def shuffled(size: int, partitions: int, backend: str) -> Any:
    """Shuffle by key, the index too, which is half as much again."""
    return collection(size, partitions, backend).shuffle("key")


def shuffled_without_index(size: int, partitions: int, backend: str) -> Any:
    """Shuffle by key, and number the rows anew where the method does that."""
    return collection(size, partitions, backend).shuffle("key", ignore_index=True)


def merged(size: int, partitions: int, backend: str) -> Any:
    """Merge two frames of half the size whose keys are the same."""
    left = collection(size // 2, partitions, backend)
    right = left.assign(weight=left.key * WEIGHT)[["key", "weight"]]
    return left.merge(right, on="key", broadcast=False)


def by_key(size: int, partitions: int, backend: str) -> Any:
    """Sort by key."""
    return collection(size, partitions, backend).set_index("key", npartitions=partitions)


OPERATIONS: dict[str, Callable[[int, int, str], Any]] = {
    "shuffle": shuffled,
    "shuffle-columns": shuffled_without_index,
    "merge": merged,
    "sort": by_key,
}


def expected(operation: str, size: int, partitions: int) -> tuple[int | None, ...]:
    """What the fingerprints have to add up to, by arithmetic: keys and payloads are permutations."""
    part = size // 2 if operation == "merge" else size
    rows = part // ROW_BYTES // partitions * partitions
    whole = rows * (rows - 1) // 2 % WRAP
    products = sum_of_products(rows)
    return rows, whole, whole, products, whole * WEIGHT % WRAP if operation == "merge" else None


def sum_of_products(rows: int) -> int:
    """The sum of key times payload, with numpy in pieces: what the workers are compared with."""
    import numpy as np

    def of_piece(start: int) -> int:
        position = np.arange(start, min(start + PIECE, rows), dtype="int64")
        return int((position * STRIDE % rows * position).astype("u8").sum(dtype="u8"))

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # 128 GiB would take one core longer than the shuffle
        return sum(threads.map(of_piece, range(0, rows, PIECE))) % WRAP


@contextmanager
def cluster(contender: str, workers: int, backend: str, budget: Budget, protocol: str) -> Iterator[Client]:
    """A cluster in which a contender has its budget."""
    settings = {
        "dataframe.shuffle.method": contender,
        "gpurt.memory.device": budget.device,
        "gpurt.memory.pinned": budget.pinned,
        "gpurt.memory.host": budget.host,
        "gpurt.exchange.pool": budget.pool,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        "distributed.worker.memory.spill": False,
    }
    if contender != "gpurt" and backend == "pandas":
        settings["distributed.worker.memory.target"] = 0.5
    with (
        dask.config.set(settings),
        _local(contender, workers, backend, budget, protocol) as local,
        Client(local) as client,
    ):
        if contender == "gpurt":
            dask_gpurt.enable(client)
            client.run(_pinned)
        client.register_plugin(LoopStalls())
        client.register_plugin(PeakMemory())
        yield client


async def _pinned(dask_worker: Any) -> None:
    """Wait until the pinned tier has been registered, which takes seconds for tens of GiB."""
    tiers = dask_worker.plugins["gpurt"].tiers
    await tiers.offload(tiers.pinned.ready.wait)


def _local(contender: str, workers: int, backend: str, budget: Budget, protocol: str) -> Any:
    options: dict[str, Any] = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": ":0"}
    if backend == "pandas":
        own = 2 * (budget.device + budget.pinned + budget.host)  # of which half is the target
        return LocalCluster(**options, memory_limit=None if contender == "gpurt" else own)
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(
        **options,
        protocol=protocol,
        device_memory_limit=budget.device,
        memory_limit=2 * (budget.pinned + budget.host),
        rmm_async=True,  # a pool in one piece could have room, but none that is large enough
        rmm_maximum_pool_size=budget.rmm,
    )


def timed_run(
    client: Client, run: Run, build: Callable[[], Any], sums: Any, timeout: float, sample: bool
) -> None:
    """Time an operation and check its result; what goes wrong is noted in the run."""
    if sample:
        client.register_plugin(Samples())
        client.get_task_stream()  # from here on
    take_peaks(client)
    take_stalls(client)
    start, began = time.perf_counter(), time.time()
    try:
        parts = client.compute([delayed(fingerprint)(part) for part in build().to_delayed()])
        found = [part.result(max(1.0, start + timeout - time.perf_counter())) for part in parts]
    except Exception as error:
        run.error = f"{type(error).__name__}: {str(error)[:300]}"
        run.samples = take_samples(client) | {"tasks": take_tasks(client, began)} if sample else None
        if run.contender == "gpurt":
            run.stacks, run.counters = take_stacks(client), _counters(client)
            run.held = dask_gpurt.memory(client).to_dict("records")
        return
    run.seconds = time.perf_counter() - start
    run.samples = take_samples(client) | {"tasks": take_tasks(client, began)} if sample else None
    check(found, sums, run.operation == "sort")
    run.peak_bytes, run.stalls = take_peaks(client), take_stalls(client)
    if run.contender == "gpurt":
        run.counters = _counters(client)


def _counters(client: Client) -> dict[str, float]:
    totals_: dict[str, float] = {}
    for worker in dask_gpurt.report(client)["workers"].values():
        for name, value in worker["counters"].items():
            if name.startswith(("memory.", "exchange.", "shuffle.")):
                peak = name.endswith(".peak")
                totals_[name] = max(totals_.get(name, 0), value) if peak else totals_.get(name, 0) + value
    return totals_


def summarise(runs: Sequence[Run], size: int) -> list[dict[str, Any]]:
    """Derive the figures of each operation and contender from its runs."""
    figures = []
    for operation, contender in dict.fromkeys((run.operation, run.contender) for run in runs):
        mine = [run for run in runs if (run.operation, run.contender) == (operation, contender)]
        seconds = [run.seconds for run in mine if run.seconds is not None]
        figure: dict[str, Any] = {"operation": operation, "contender": contender, "runs": len(mine)}
        figure["errors"] = [run.error for run in mine if run.error]
        if seconds:
            done = [run for run in mine if run.seconds is not None]
            figure |= {
                "median_seconds": statistics.median(seconds),
                "gib_per_second": size / GIB / statistics.median(seconds),
                "longest_stall": max(run.stalls["max"] for run in done if run.stalls),
                "median_stall": statistics.median(run.stalls["median"] for run in done if run.stalls),
                "peak_bytes": {
                    tier: max(run.peak_bytes[tier] for run in done if run.peak_bytes)
                    for tier in done[0].peak_bytes or ()
                },
            }
        figures.append(figure)
    return figures


def collected(parameters: Mapping[str, Any], runs: Sequence[Run], output: Path | None) -> dict[str, Any]:
    """What there is so far, written down as well."""
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": parameters,
        **environment(),
        "figures": summarise(runs, parameters["size"]),
        "runs": [asdict(run) for run in runs],
    }
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
    return results


def print_summary(results: Mapping[str, Any]) -> None:
    """Print a line for each operation and contender, and what moved between the tiers."""
    console = Console()
    console.print({name: value for name, value in results["parameters"].items() if name != "budget"})
    console.print({name: format_bytes(n) for name, n in results["parameters"]["budget"].items() if n})
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("operation", "contender", "seconds", "GiB/s", "longest stall", "host peak", "errors"):
        table.add_column(heading)
    for figure in results["figures"]:
        table.add_row(
            figure["operation"],
            figure["contender"],
            f"{figure.get('median_seconds', float('nan')):.2f}",
            f"{figure.get('gib_per_second', float('nan')):.2f}",
            f"{figure.get('longest_stall', float('nan')) * 1e3:.0f} ms",
            f"{figure.get('peak_bytes', {}).get('host', 0) / GIB:.2f}",
            "; ".join(figure["errors"])[:60] or "-",
        )
    console.print(table)
    for run in results["runs"]:
        if run["counters"] and run["turn"] == 0:
            console.print(run["operation"], {name: _readable(name, v) for name, v in run["counters"].items()})
        if run["samples"]:
            print_samples(console, run["samples"])


def print_samples(console: Console, samples: Mapping[str, Any]) -> None:
    """Print when which steps were made, and where the threads were."""
    for step in samples["tasks"]:
        span = f"{step['first']:7.3f} to {step['last']:7.3f}"
        console.print(
            f"{step['step']:36.36} {step['count']:5} x, {step['seconds']:8.3f} s, {span}", soft_wrap=True
        )
    for place in samples["places"][:25]:
        console.print(f"{place['share']:6.2f} {place['thread']:14.14} {place['place']}", soft_wrap=True)
    for gap in samples["gaps"]:
        where = "; ".join(f"{thread}: {place}" for thread, place in gap["places"])
        console.print(f"{gap['seconds'] * 1e3:.0f} ms without a sample, then {where}", soft_wrap=True)


def _readable(name: str, value: float) -> str:
    return format_bytes(int(value)) if "bytes" in name or "peak" in name else f"{value:.4g}"


def _bytes(_: Any, __: Any, text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--size", default="2GiB", show_default=True, callback=_bytes)
@click.option("--partitions", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--contenders", default=",".join(CONTENDERS), callback=split_list(CONTENDERS))
@click.option("--operation", default="shuffle,merge,sort", callback=split_list(list(OPERATIONS)))
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", default="tcp", show_default=True)
@click.option("--device", default="64MiB", show_default=True, callback=_bytes, help="Device tier.")
@click.option("--pinned", default="64MiB", show_default=True, callback=_bytes, help="Pinned tier.")
@click.option("--host", default="0", show_default=True, callback=_bytes, help="Host tier.")
@click.option("--pool", default="64MiB", show_default=True, callback=_bytes, help="Exchange pool.")
@click.option("--rmm", callback=_bytes, help="All that rmm may take of a GPU.")
@click.option("--samples", is_flag=True, help="Look where the threads are; costs some time.")
@click.option("--warm", is_flag=True, help="Run a small part first in each cluster, unmeasured.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds after which a run has failed.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    size: int,
    partitions: int,
    workers: int,
    contenders: list[str],
    operation: list[str],
    repeat: int,
    backend: str,
    protocol: str,
    device: int,
    pinned: int,
    host: int,
    pool: int,
    rmm: int | None,
    samples: bool,
    warm: bool,
    timeout: float,
    output: Path | None,
) -> None:
    backend = choose_backend(backend)
    budget = Budget(device, pinned, host, pool, rmm)
    parameters = {
        "size": size,
        "partitions": partitions,
        "workers": workers,
        "backend": backend,
        "protocol": protocol,
        "repeat": repeat,
        "samples": samples,
        "warm": warm,
        "budget": asdict(budget),
    }
    runs: list[Run] = []
    for name in operation:
        sums = expected(name, size, partitions)
        for turn in range(repeat):
            first = turn % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                run = Run(name, contender, turn)
                runs.append(run)
                with cluster(contender, workers, backend, budget, protocol) as client:
                    build = lambda name=name: OPERATIONS[name](size, partitions, backend)  # noqa: E731
                    if warm:  # modules, kernels, connections and mappings, which the first shuffle waits for
                        wait(OPERATIONS[name](size // WARM, max(1, partitions // WARM), backend).persist())
                    timed_run(client, run, build, sums, timeout, samples)
                    # What does not come to an end may not let its cluster close either.
                    results = collected(parameters, runs, output)
                said = f"{run.seconds:.2f} s" if run.seconds else run.error
                Console(stderr=True).print(f"{name}, {contender}, run {turn}: {said}", style="dim")
    print_summary(results)


if __name__ == "__main__":
    nvml.init_once()
    main()
