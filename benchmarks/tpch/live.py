"""Compare ways to run tasks, in turns on running clusters: queries, and a pipeline of shuffles.

    python -m benchmarks.tpch.live --ways default,no-priority --scale 30 --style all --json priority.json
    python -m benchmarks.tpch.live --ways default,two-at-once --pipeline 8GiB --traced 5,7,9,21
    python -m benchmarks.tpch.live --ways default,two-workers --rmm-pool-size 0.3 --seconds 60

Clusters differ by more than what is compared here, so a way is switched on and off where it can be, on one
cluster; those that need workers of their own have a cluster beside it, which is idle meanwhile. Each round
runs every case in every way, in an order that rotates, and the first run of a case in a way does not count.

``no-priority``
    Communication streams have no higher priority than compute.
``caps``, ``cap-8``
    Kernels beside shuffles are capped as ``dask gpurt calibrate`` chose, or all of them at 8 blocks.
``frames``
    Fused tasks run through frames of cudf, not on columns.
``two-at-once``, ``three-at-once``, ``four-at-once``
    So many tasks compute at once in a worker.
``two-workers``
    Two workers in place of each one, which share its GPU.
``driver-pool``
    Memory of GPUs comes from the driver's pool, not from rmm's.

Without a GPU there is nothing to prioritise or to cap: that rehearses the program, and shows its noise.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import dask.dataframe as dd
from dask.utils import parse_bytes
from distributed import Client, wait
from distributed.metrics import time
from rich.console import Console

from benchmarks.common.environment import environment
from dask_gpurt.device import Streams
from dask_gpurt.overlap import Caps
from dask_gpurt.overlap.table import TableError, path_of, read

from ..common.budget import budget, forget, take_log
from ..common.commandline import split_list, write
from ..common.processes import Child
from ..overlap.pipeline import only_compute, only_shuffles, pipeline, source, timed
from .contenders import CAPPED, DRIVER_POOL, GPURT, ClusterOptions, Contender, start
from .figures import CONFIDENCE, RESAMPLES, TABLE_WIDTH, rounded
from .gpu import begin_trace, can_trace, end_trace
from .options import planning_options, style_option
from .reference import check, collected, computed, numbers_of
from .styles import STYLES
from .tables import ParquetTables

console = Console(stderr=True)
#: Bytes of a row of the pipeline, and the mean number of rows per key.
ROW, ALIKE = 24, 16
#: The most of the time that goes to these.
PIPELINE_SHARE = 0.4
PIPELINE = {"pipeline": pipeline, "ten shuffles": only_shuffles, "ten computations": only_compute}


# ---- ways --------------------------------------------------------------------------------------------


def prioritise(client: Client, first: bool) -> None:
    """Give communication of all workers the higher priority, or that of compute."""

    def change(dask_worker: Any) -> None:
        for device in dask_worker.plugins["gpurt"].exchange.pools.devices.values():
            if isinstance(device, Streams):
                device.prioritised = first

    client.run(change)


def cap(client: Client, cap: int | None, on: bool) -> None:
    """Cap kernels beside shuffles, all of them or those of the device's table; or none."""

    async def change(dask_worker: Any) -> int:
        overlap = dask_worker.plugins["gpurt"].overlap
        if overlap.residency is None:
            return 0
        with suppress(TableError):
            caps = Caps(cap) if cap or not on else read(path_of(overlap.model())).caps()
            overlap.use(caps if on else Caps())
            return 1 if cap else len(caps.kernels)
        return 0

    capped = client.run(change)
    if on and not all(capped.values()):
        console.print("no kernel is capped: there is no interposer, or the calibration chose no cap")


def run_programs(client: Client, on: bool) -> None:
    """Run fused tasks on columns, or through frames."""

    def change(dask_worker: Any) -> None:
        dask_worker.plugins["gpurt"].programs.on = on

    client.run(change)


def compute_at_once(client: Client, number: int) -> None:
    """Let a worker, which has as many threads or more, compute so many tasks at once."""

    async def change(dask_worker: Any) -> None:
        dask_worker.state.nthreads = number
        dask_worker.plugins["gpurt"].reads.turns.count = number

    async def tell(dask_scheduler: Any) -> int:
        for worker in dask_scheduler.workers.values():
            dask_scheduler.total_nthreads += number - worker.nthreads
            worker.nthreads = number
        return int(dask_scheduler.total_nthreads)

    client.run(change)
    # Plans depend on it too; the client hears of it every two seconds.
    client._scheduler_identity["total_threads"] = client.run_on_scheduler(tell)


@dataclass(frozen=True)
class Way:
    """Describe a way: what it changes on a cluster, and the cluster that it needs, named as a contender."""

    switch: Callable[[Client, bool], None] | None = None
    cluster: str = GPURT
    threads: int = 1


def _at_once(number: int) -> Way:
    return Way(lambda client, on: compute_at_once(client, number if on else 1), threads=number)


DEFAULT = "default"
WAYS: Mapping[str, Way] = {
    DEFAULT: Way(),
    "no-priority": Way(lambda client, on: prioritise(client, not on)),
    "caps": Way(lambda client, on: cap(client, None, on)),
    "cap-8": Way(lambda client, on: cap(client, 8, on)),
    "frames": Way(lambda client, on: run_programs(client, not on)),
    "two-at-once": _at_once(2),
    "three-at-once": _at_once(3),
    "four-at-once": _at_once(4),
    "driver-pool": Way(cluster=DRIVER_POOL),
}
#: Need an interposer in the workers.
INTERPOSED = ("caps", "cap-8")


# ---- cases -------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Record a run of a case in a way; in round 0 it is the first one, which does not count.

    ``thread_seconds``: seconds of all tasks.
    ``computing``: seconds from the first task to the last.
    """

    case: str
    group: str
    way: str
    round: int
    seconds: float
    thread_seconds: float = 0.0
    computing: float = 0.0
    error: str = ""


@dataclass
class Cases:
    """Run queries and programs, and compare the results with the first one of each.

    Parameters
    ----------
    tables
        The tables of the queries.
    names
        Style and number of each query; of the pipeline its name, and None.
    size, partitions
        Bytes of the pipeline's frame, and its partitions.
    """

    tables: ParquetTables
    names: Sequence[tuple[str, int | None]]
    size: int
    partitions: int
    wanted: dict[str, Any] = field(default_factory=dict)
    frames: dict[str, Any] = field(default_factory=dict)

    @property
    def of_pipeline(self) -> list[tuple[str, int | None]]:
        """Return the cases of the pipeline."""
        return [case for case in self.names if case[1] is None]

    @property
    def of_queries(self) -> list[tuple[str, int | None]]:
        """Return the queries."""
        return [case for case in self.names if case[1] is not None]

    def run(self, name: str, number: int | None, way: str, contender: Contender, turn: int) -> Run:
        """Run a case once; a failure is a result."""
        run = Run(name if number is None else f"{name} {number}", name, way, turn, math.nan)
        try:
            with contender.chosen():
                if number is None:
                    run.seconds, found = timed(PIPELINE[name](self.frame(name, contender)))
                    self._same(run.case, found)
                else:
                    self._query(run, name, number, contender.client)
        except Exception as error:
            run.error = repr(error)[:300]
        return run

    def _query(self, run: Run, style: str, number: int, client: Client) -> None:
        query, threads = STYLES[style][number], client.nthreads()
        forget(client)
        take_log(client)
        began = time()
        lazy = query.build(self.tables)
        built = time()
        found = collected(query, computed(lazy))
        ended = time()
        spent = budget(began, built, ended, take_log(client), threads)
        run.seconds, run.computing = ended - began, spent["seconds"]["computing"]
        run.thread_seconds = spent["steps"]["compute"]
        check(query, found, self.wanted.setdefault(run.case, found))

    def _same(self, case: str, found: int) -> None:
        if found != self.wanted.setdefault(case, found):
            raise ValueError(f"the payloads add up to {found}, not {self.wanted[case]}")

    def frame(self, program: str, contender: Contender) -> Any:
        """Return a frame in memory of a contender's cluster, shuffled for a program that only computes."""
        shuffled = program == "ten computations"
        key = f"{contender.name} {shuffled}"
        if key not in self.frames:
            if shuffled:
                frame = self.frame("pipeline", contender).shuffle("a")
            else:
                library = "cudf" if contender.on_gpu else "pandas"
                rows = self.size // ROW // self.partitions
                arguments = [rows, max(1, rows * self.partitions // ALIKE), library]
                meta = source(0, 1, 2, library).iloc[:0]
                frame = dd.from_map(source, range(self.partitions), args=arguments, meta=meta)
            self.frames[key] = frame.persist()
            wait(self.frames[key])
        return self.frames[key]


# ---- turns -------------------------------------------------------------------------------------------


class Clusters:
    """Switch running clusters between ways."""

    def __init__(self, contenders: Sequence[Contender], ways: Sequence[str]):
        self._contenders = {
            GPURT if contender.name == CAPPED else contender.name: contender for contender in contenders
        }
        self._now = DEFAULT
        mine = self._contenders[GPURT].client
        if any(WAYS[way].threads > 1 for way in ways):
            compute_at_once(mine, 1)
        if any(way in INTERPOSED for way in ways):
            cap(mine, None, False)

    def use(self, way: str) -> Contender:
        """Return the contender of a way, switched to it."""
        contender = self._contenders[WAYS[way].cluster]
        if WAYS[way].cluster == GPURT and way != self._now:
            for name, on in ((self._now, False), (way, True)):
                if (switch := WAYS[name].switch) is not None:
                    switch(contender.client, on)
            self._now = way
        return contender

    def collect(self) -> None:
        """Collect garbage of all workers."""
        for contender in self._contenders.values():
            contender.client.run(gc.collect)


@dataclass(frozen=True)
class Plan:
    """Hold what is run: the names of ways, how many rounds, for how long at most, and what is traced."""

    ways: Sequence[str]
    repeat: int
    seconds: float
    traced: Sequence[int]


def measure(options: ClusterOptions, cases: Cases, plan: Plan) -> Iterator[Run | dict[str, Any]]:
    """Run all cases in all ways, once and then in rounds, until the time is up; then trace some queries."""
    names = dict.fromkeys(WAYS[way].cluster for way in plan.ways)
    capped = any(way in INTERPOSED for way in plan.ways)
    groups = [(CAPPED if capped and name == GPURT else name,) for name in names]
    with start(options, groups) as contenders:
        clusters = Clusters(contenders, plan.ways)
        ends = time() + plan.seconds
        # One after the other, so that the pipeline leaves the memory to the queries.
        for share, several in ((PIPELINE_SHARE, cases.of_pipeline), (1.0, cases.of_queries)):
            until = time() + share * (ends - time())
            for turn in range(plan.repeat + 1):
                clusters.collect()
                for number, (name, query) in enumerate(several):
                    first = (turn + number) % len(plan.ways)
                    for way in [*plan.ways[first:], *plan.ways[:first]]:
                        if time() < until:
                            yield cases.run(name, query, way, clusters.use(way), turn)
            cases.frames.clear()
        for way, query in itertools.product(plan.ways, plan.traced):
            contender = clusters.use(way)
            if can_trace(contender.client):
                yield traced(contender, way, query, cases)


def traced(contender: Contender, way: str, number: int, cases: Cases) -> dict[str, Any]:
    """Run a query with CUPTI; return for how much of the time from first to last task GPUs ran."""
    begin_trace(contender.client)
    run = cases.run("careful", number, way, contender, -1)
    found = end_trace(contender.client)
    return {
        "query": number,
        "way": way,
        "computing": run.computing,
        "gpu_seconds": found["gpu_seconds"],
        "gpu_busy": found["gpu_seconds"] / run.computing if run.computing else None,
        "kernels": found["kernels"],
        "error": run.error,
    }


# ---- figures -----------------------------------------------------------------------------------------


def results_of(
    runs: Sequence[Run], traces: Sequence[dict[str, Any]], parameters: dict[str, Any]
) -> dict[str, Any]:
    """Return the ratios of each way to the first one, the seconds of each case, and the GPUs' busy share."""
    ways = list(dict.fromkeys(run.way for run in runs))
    counted = [run for run in runs if run.round > 0 and not run.error]
    groups = list(dict.fromkeys(run.group for run in counted))
    queries = [group for group in groups if group in STYLES]
    seconds: dict[str, dict[str, list[float]]] = {}
    for run in counted:
        seconds.setdefault(run.way, {}).setdefault(run.case, []).append(run.seconds)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": parameters,
        **environment(),
        "ratios": rounded(
            {
                way: {
                    of[0] if len(of) == 1 else "all queries": found
                    for of in [*([group] for group in groups), *([queries] if len(queries) > 1 else [])]
                    if (found := ratio(counted, way, ways[0], of))
                }
                for way in ways[1:]
            }
        ),
        "sums": rounded({way: sums(counted, way) for way in ways}),
        "exposed shuffle": rounded({way: exposed(seconds[way]) for way in ways if way in seconds}),
        "busy": rounded(list(traces)),
        "seconds": rounded(seconds),
        "errors": [asdict(run) for run in runs if run.error],
    }


def ratio(runs: Sequence[Run], way: str, against: str, groups: Sequence[str]) -> dict[str, Any]:
    """Return how many times as long a way takes, as geometric mean over cases, and its interval.

    Runs of the same round are compared. The interval is of a bootstrap over cases and rounds.
    """
    both = {
        name: {(run.case, run.round): run.seconds for run in runs if run.way == name and run.group in groups}
        for name in (way, against)
    }
    logs: dict[str, list[float]] = {}
    for key in both[way].keys() & both[against].keys():
        logs.setdefault(key[0], []).append(math.log(both[way][key] / both[against][key]))
    if not logs:
        return {}
    rng, by_case = random.Random(0), [logs[case] for case in sorted(logs)]

    def again() -> float:
        cases = rng.choices(by_case, k=len(by_case))
        return fmean(fmean(rng.choices(case, k=len(case))) for case in cases)

    means, tail = sorted(again() for _ in range(RESAMPLES)), int(RESAMPLES * (1 - CONFIDENCE) / 2)
    found = {"ratio": fmean(map(fmean, by_case)), "low": means[tail], "high": means[-1 - tail]}
    return {name: math.exp(value) for name, value in found.items()} | {
        "cases": len(logs),
        "pairs": sum(map(len, by_case)),
    }


def sums(runs: Sequence[Run], way: str) -> dict[str, dict[str, float]]:
    """Return for each group the sums over its cases of the medians of seconds, and of thread seconds."""
    found: dict[str, dict[str, float]] = {}
    mine = [run for run in runs if run.way == way]
    for group, case in dict.fromkeys((run.group, run.case) for run in mine):
        of = found.setdefault(group, {"cases": 0, "seconds": 0.0, "thread_seconds": 0.0, "computing": 0.0})
        of["cases"] += 1
        for name in ("seconds", "thread_seconds", "computing"):
            of[name] += median(getattr(run, name) for run in mine if run.case == case)
    return found


def exposed(seconds: Mapping[str, Sequence[float]]) -> float | None:
    """Return by how much the pipeline takes longer than its computations alone, of medians."""
    if not {"pipeline", "ten computations"} <= seconds.keys():
        return None
    return median(seconds["pipeline"]) - median(seconds["ten computations"])


@click.command(help=__doc__.partition("\n")[0])
@planning_options
@style_option
@click.option("--ways", default=f"{DEFAULT},no-priority", show_default=True, callback=split_list(list(WAYS)))
@click.option("--pipeline", "size", default="0", show_default=True, help="Bytes of a pipeline of shuffles.")
@click.option("--partitions", type=click.IntRange(min=1), default=16, show_default=True, help="Of these.")
@click.option("--traced", default="", callback=lambda _, __, text: numbers_of(text) if text else [])
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--protocol", help="Protocol of the clusters, such as tcp or ucx.")
@click.option("--rmm-pool-size", type=float, default=0.6, show_default=True, help="A share of the GPU.")
@click.option("--repeat", type=click.IntRange(min=1), default=8, show_default=True, help="Rounds.")
@click.option("--seconds", default=3600.0, show_default=True, help="After which no more runs begin.")
def main(
    tables: ParquetTables,
    queries: list[int],
    styles: list[str],
    backend: str,
    output: Path | None,
    ways: list[str],
    size: str,
    partitions: int,
    traced: list[int],
    workers: int,
    protocol: str | None,
    rmm_pool_size: float,
    repeat: int,
    seconds: float,
) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the clusters end with this process
    parameters = dict(click.get_current_context().params) | {"scale": tables.scale, "parts": tables.parts}
    parameters = {name: value for name, value in parameters.items() if name not in ("output", "data")}
    nbytes = int(parse_bytes(size))
    names: list[tuple[str, int | None]] = [(name, None) for name in PIPELINE] if nbytes else []
    names += itertools.product(styles, queries)
    threads = max(WAYS[way].threads for way in ways)
    options = ClusterOptions(backend, workers, threads, protocol, rmm_pool_size)
    cases, plan = Cases(tables, names, nbytes, partitions), Plan(ways, repeat, seconds, traced)
    runs: list[Run] = []
    traces: list[dict[str, Any]] = []
    # A client that has received data over UCX keeps GPU memory, so the clusters have a process of their own.
    child = Child(measure, options, cases, plan)
    try:
        with suppress(EOFError):  # the process has ended
            while True:
                found = child.receive()
                if isinstance(found, Run):
                    runs.append(found)
                    told = found.error or f"{found.seconds:.3f} s"
                    console.print(f"{found.case}, {found.way}, round {found.round}: {told}", style="dim")
                else:
                    traces.append(found)
                if len(runs) % 20 == 0 or traces:
                    write(results_of(runs, traces, parameters), output)
    finally:
        child.end()
        results = results_of(runs, traces, parameters)
        write(results, output)
    print_results(results)
    if results["errors"]:
        raise click.ClickException(f"{len(results['errors'])} runs failed or had wrong results")


def print_results(results: Mapping[str, Any]) -> None:
    """Print the ratios, and the busy shares."""
    out = Console(highlight=False, width=TABLE_WIDTH)
    first = next(iter(results["sums"]), DEFAULT)
    for way, of in results["ratios"].items():
        for group, found in of.items():
            out.print(
                f"{way}, {group}: {found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f}) times as "
                f"long as {first}, {found['cases']} cases, {found['pairs']} pairs"
            )
    for way, of in results["sums"].items():
        for group, found in of.items():
            out.print(f"{way}, {group}: " + ", ".join(f"{value:g} {name}" for name, value in found.items()))
    for way, seconds in results["exposed shuffle"].items():
        if seconds is not None:
            out.print(f"{way}: {seconds:.3f} s of shuffles are exposed in the pipeline")
    for of in results["busy"]:
        busy = "?" if of["gpu_busy"] is None else f"{of['gpu_busy']:.0%}"
        out.print(f"Q{of['query']}, {of['way']}: GPUs busy for {busy} of {of['computing']:.3f} s")


if __name__ == "__main__":
    # Import under the full name, so that this process can unpickle what the other one sends.
    importlib.import_module("benchmarks.tpch.live").main()
