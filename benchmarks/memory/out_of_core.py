"""Shuffle, merge and sort more data than fits into memory by several methods, and check every result.

    python -m benchmarks.memory.out_of_core --size 2GiB --partitions 64 --device 64MiB --pool 64MiB

Tasks make the rows, which go through the operation and are reduced to fingerprints: only the operation itself
keeps data. Contenders take turns, each run on a cluster of its own:

``gpurt``
    The runtime with its tiers.
``tasks``
    Dask's task-based shuffle with dask-cuda's spilling on GPUs, and Dask's otherwise.
``p2p``
    Dask's p2p shuffle, which keeps shards on disk, with the same spilling.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
from dask.delayed import delayed
from distributed import Client, LocalCluster, wait
from distributed.diagnostics import nvml
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import in_bytes, split_list, write
from benchmarks.common.environment import environment
from benchmarks.common.peaks import PeakMemory, take_peaks
from benchmarks.common.rows import check, fingerprint
from benchmarks.common.samples import Samples, take_samples, take_tasks
from benchmarks.common.stalls import LoopStalls, take_stacks, take_stalls
from benchmarks.memory.out_of_core_figures import Run, print_summary, summarise
from benchmarks.memory.out_of_core_work import OPERATIONS, expected
from dask_gpurt.cli.cluster import choose_backend

CONTENDERS = ("gpurt", "tasks", "p2p")
#: With ``--warm``, one part in this many of the data is run first.
WARM = 16
#: Bytes of a worker without data: Python and its libraries.
INTERPRETER = 2**28


@dataclass(frozen=True)
class Budget:
    """Bytes per worker. ``rmm`` limits CUDA's own pool, which has all GPU memory but the exchange pool."""

    device: int
    pinned: int
    host: int
    pool: int
    rmm: int | None

    @property
    def kept(self) -> int:
        """Return the bytes that a worker keeps in memory, on the device and on the host."""
        return self.device + self.pinned + self.host

    @property
    def limit(self) -> int:
        """Return the memory limit of a worker without a GPU: twice the kept bytes, as tasks make copies."""
        return 2 * self.kept + self.pool + INTERPRETER


@dataclass(frozen=True)
class Plan:
    """Hold sizes, counts, and the samples to take."""

    size: int
    partitions: int
    workers: int
    threads: int
    backend: str
    protocol: str
    repeat: int
    samples: bool
    warm: bool
    budget: Budget

    def build(self, operation: str, part: int = 1) -> Any:
        """Build an operation on the data, or on one of ``part`` parts."""
        return OPERATIONS[operation](self.size // part, max(1, self.partitions // part), self.backend)


def turns(operations: Sequence[str], contenders: Sequence[str], repeat: int) -> Iterator[Run]:
    """Yield the runs; each turn starts with a different contender."""
    for operation in operations:
        for turn in range(repeat):
            first = turn % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                yield Run(operation, contender, turn)


@contextmanager
def cluster(contender: str, plan: Plan) -> Iterator[Client]:
    """Start a cluster with a contender's budget, and yield its client."""
    budget = plan.budget
    settings = {
        "dataframe.shuffle.method": contender,
        "gpurt.memory.device": budget.device,
        "gpurt.memory.pinned": budget.pinned,
        "gpurt.memory.host": budget.host,
        "gpurt.exchange.pool": budget.pool,
    }
    if contender != "gpurt" and plan.backend == "pandas":
        # Dask keeps this share of managed memory; its other thresholds stay at their defaults.
        settings["distributed.worker.memory.target"] = budget.kept / budget.limit
    with (
        dask.config.set(settings),
        _local(contender, plan) as local,
        Client(local) as client,
    ):
        if contender == "gpurt":
            dask_gpurt.enable(client)
            client.run(_pinned)
        client.register_plugin(LoopStalls())
        client.register_plugin(PeakMemory())
        yield client


async def _pinned(dask_worker: Any) -> None:
    """Block until the whole pinned tier is registered, which takes seconds for tens of GiB."""
    tiers = dask_worker.plugins["gpurt"].tiers
    await tiers.offload(lambda: tiers.pinned.free(tiers.pinned.allocate(tiers.pinned.capacity)))


def _local(contender: str, plan: Plan) -> Any:
    budget = plan.budget
    options: dict[str, Any] = {"n_workers": plan.workers, "threads_per_worker": plan.threads}
    options |= {"dashboard_address": ":0"}
    if plan.backend == "pandas":
        return LocalCluster(**options, memory_limit=budget.limit)
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(
        **options,
        protocol=plan.protocol,
        device_memory_limit=budget.device,
        memory_limit=2 * (budget.pinned + budget.host),
        rmm_async=True,  # a contiguous pool could fragment
        rmm_maximum_pool_size=budget.rmm,
    )


def timed_run(client: Client, run: Run, plan: Plan, sums: tuple[int | None, ...], timeout: float) -> None:
    """Time an operation and check its result; record an error in the run."""
    if plan.samples:
        client.register_plugin(Samples())
        client.get_task_stream()  # starts recording
    take_peaks(client)
    take_stalls(client)
    start, began = time.perf_counter(), time.time()
    found = None
    try:
        parts = client.compute(
            [delayed(fingerprint)(part) for part in plan.build(run.operation).to_delayed()]
        )
        found = [part.result(max(1.0, start + timeout - time.perf_counter())) for part in parts]
    except Exception as error:
        run.error = f"{type(error).__name__}: {str(error)[:300]}"
    else:
        run.seconds = time.perf_counter() - start
    if plan.samples:
        run.samples = take_samples(client) | {"tasks": take_tasks(client, began)}
    if run.contender == "gpurt":
        run.counters = _counters(client)
    if found is not None:
        check(found, sums, run.operation == "sort")
        run.peak_bytes, run.stalls = take_peaks(client), take_stalls(client)
    elif run.contender == "gpurt":
        run.stacks, run.held = take_stacks(client), list(dask_gpurt.memory_usage(client))


def _counters(client: Client) -> dict[str, float]:
    totals_: dict[str, float] = {}
    for worker in dask_gpurt.report(client)["workers"].values():
        for name, value in worker["counters"].items():
            if name.startswith(("memory.", "exchange.", "shuffle.")):
                peak = name.endswith(".peak")
                totals_[name] = max(totals_.get(name, 0), value) if peak else totals_.get(name, 0) + value
    return totals_


def collected(plan: Plan, runs: Sequence[Run], output: Path | None) -> dict[str, Any]:
    """Return the results so far, and write them to the file."""
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": asdict(plan),
        **environment(),
        "figures": summarise(runs, plan.size),
        "runs": [asdict(run) for run in runs],
    }
    write(results, output)
    return results


@click.command(help=__doc__.partition("\n")[0])
@click.option("--size", default="2GiB", show_default=True, callback=in_bytes)
@click.option("--partitions", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of a worker.")
@click.option("--contenders", default="gpurt,tasks,p2p", show_default=True, callback=split_list(CONTENDERS))
@click.option("--operation", default="shuffle,merge,sort", callback=split_list(list(OPERATIONS)))
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", default="tcp", show_default=True)
@click.option("--device", default="64MiB", show_default=True, callback=in_bytes, help="Device tier.")
@click.option("--pinned", default="64MiB", show_default=True, callback=in_bytes, help="Pinned tier.")
@click.option("--host", default="0", show_default=True, callback=in_bytes, help="Host tier.")
@click.option("--pool", default="64MiB", show_default=True, callback=in_bytes, help="Exchange pool.")
@click.option("--rmm", callback=in_bytes, help="Limit of rmm on a GPU.")
@click.option("--samples", is_flag=True, help="Sample the threads' stacks; costs some time.")
@click.option("--warm", is_flag=True, help="Run a small part first in each cluster, unmeasured.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds after which a run has failed.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    contenders: list[str],
    operation: list[str],
    backend: str,
    timeout: float,
    output: Path | None,
    **parameters: Any,
) -> None:
    budget = Budget(**{tier.name: parameters.pop(tier.name) for tier in fields(Budget)})
    plan = Plan(backend=choose_backend(backend), budget=budget, **parameters)
    sums = {name: expected(name, plan.size, plan.partitions) for name in operation}
    runs: list[Run] = []
    for run in turns(operation, contenders, plan.repeat):
        runs.append(run)
        with cluster(run.contender, plan) as client:
            if plan.warm:  # loads modules and kernels, makes connections and mappings
                wait(plan.build(run.operation, WARM).persist())
            timed_run(client, run, plan, sums[run.operation], timeout)
            # Written before the cluster closes, which may hang after a run that hangs.
            results = collected(plan, runs, output)
        said = f"{run.seconds:.2f} s" if run.seconds else run.error
        Console(stderr=True).print(f"{run.operation}, {run.contender}, run {run.turn}: {said}", style="dim")
    print_summary(results)


if __name__ == "__main__":
    nvml.init_once()
    main()
