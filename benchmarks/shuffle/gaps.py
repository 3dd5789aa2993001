"""Run thousands of small operations in a row, and look for gaps without progress on the cluster.

    python -m benchmarks.shuffle.gaps --operations 2000 --switch config --switch preload --output gaps.json
    python -m benchmarks.shuffle.gaps --backend cudf --protocol ucx --workers 2 --directory gaps-out --stop

Operations are drawn at random: a filter and a sum, groupbys, joins, shuffles, a sort. Each is timed, along
with its gap: the longest time in which no task of the cluster changed state. A gap is attributed to a task
that was computing throughout, or to the machine if processes were waiting for a CPU (Linux's pressure) or the
watchdog itself was late; any other gap is a stall. When nothing happens for ``--watchdog`` seconds, the
stacks of all threads and coroutines, and all waiting lists, are written to ``--directory``. After three times
that the operation is given up, and the next cluster starts.

``--switch`` selects how the runtime is switched on:

``config``
    ``gpurt.enabled`` in the configuration of the client before the cluster is made: nannies, scheduler,
    workers and client all switch on;
``preload``
    ``--preload dask_gpurt`` on workers, with an unconfigured client;
``enable``
    ``dask_gpurt.enable`` of a client, once the cluster is running;
``off``
    not at all, for comparison, with Dask's ``--method``.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, SchedulerPlugin
from rich.console import Console
from rich.table import Table

import dask_gpurt
from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from benchmarks.common.stalls import Watchdog, arm, signalled_stacks
from benchmarks.common.waiting import describe_scheduler, describe_worker, thread_stacks

SWITCHES = ("config", "preload", "enable", "off")
HOOK = "dask_gpurt.preload"
#: Seconds from which on a gap is listed.
GAP_S = 1.0
#: Seconds in which workers and the scheduler must answer, or their loops count as blocked.
ANSWER_S = 5.0
#: Rows of a partition, partitions, and distinct keys.
ROWS, PARTITIONS, KEYS = 5_000, 6, 4_000
console = Console()


@dataclass(frozen=True)
class Plan:
    """Hold the options of a run."""

    backend: str
    protocol: str
    workers: int
    threads: int
    operations: int
    clusters: int
    method: str
    pool: float
    seed: int
    watchdog: float
    stop: bool
    set: Sequence[str]


@dataclass
class TimedOperation:
    """Record one operation: its duration, and its longest gap."""

    switch: str
    name: str
    number: int
    seconds: float
    gap: float
    #: The transitions before and after the gap.
    between: tuple[str, str]
    #: Compute seconds of the task whose end closed the gap.
    computing: float
    #: Lateness of the watchdog, and the share of time in which some process waited for a CPU.
    lateness: float
    pressure: float
    #: The error, or a note that the operation was given up.
    error: str = ""


# ---- what happens ----------------------------------------------------------------------------


class Transitions(SchedulerPlugin):
    """Record the longest time between two transitions of any tasks during an operation."""

    name = "gaps-transitions"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.last: float | None = None
        self._what = ""
        self.gap, self.between, self.computing = 0.0, ("", ""), 0.0

    def transition(self, key: Any, start: str, finish: str, *_: Any, startstops: Any = (), **__: Any) -> None:
        """Record a transition, as Dask's hook."""
        took = sum(each["stop"] - each["start"] for each in startstops or () if each["action"] == "compute")
        self.note(f"{key} {start} to {finish}", took)

    def note(self, what: str, computing: float = 0.0) -> None:
        """Record progress."""
        now = time.monotonic()
        with self._lock:
            if self.last is not None and now - self.last > self.gap:
                self.gap, self.between = now - self.last, (self._what, what)
                self.computing = min(computing, self.gap)
            if self.last is not None:
                self.last = now
            self._what = what

    def begin(self) -> None:
        """Record the start of an operation."""
        with self._lock:
            self.last, self.gap, self.computing = time.monotonic(), 0.0, 0.0
            self.between, self._what = ("", ""), "begin"

    def end(self) -> None:
        """Record the end of an operation, after which no progress is expected."""
        self.note("end")
        with self._lock:
            self.last = None


def part(number: int, rows: int = ROWS) -> pd.DataFrame:
    """Make a partition."""
    rng = np.random.default_rng(number)
    return pd.DataFrame(
        {"key": rng.integers(0, KEYS, rows), "few": rng.integers(0, 6, rows), "value": rng.random(rows)}
    )


def operations(rng: random.Random, backend: str, parquet: Path) -> dict[str, Callable[[], Any]]:
    """Return operations on frames that are new each time, so that no result can be reused."""

    def frame(n: int = PARTITIONS) -> Any:
        made = dd.from_map(part, [rng.randrange(10**9) for _ in range(n)], meta=part(0, 1).iloc[:0])
        return made if backend == "pandas" else made.to_backend(backend)

    def read() -> Any:
        if backend == "pandas":
            return dd.read_parquet(parquet)
        import dask_cudf

        return dask_cudf.read_parquet(parquet)

    def q6() -> Any:
        table = read()
        return table[(table.value < rng.random()) & (table.few > 1)].value.sum()

    def q1() -> Any:
        table = read()
        kept = table[table.value < rng.random()]
        return kept.groupby("few").agg({"value": ["sum", "mean"], "key": "count"}).reset_index()

    return {
        "read-filter-sum": q6,
        "read-groupby-few": q1,
        "filter-sum": lambda: frame()[["value", "few"]].query("few > 2").value.sum(),
        "groupby": lambda: frame().groupby("key").value.sum(split_out=3),
        "groupby-sort": lambda: frame().groupby("few").value.sum().reset_index().sort_values("few"),
        "shuffle": lambda: frame().shuffle("key").value.sum(),
        "join": lambda: frame().merge(frame(3), on="key").value_x.sum(),
        "broadcast-join": lambda: frame().merge(frame(1).drop_duplicates("few"), on="few").key_y.max(),
        "join-groupby": lambda: frame(3).merge(frame(3), on="key").groupby("few_x").value_y.sum(split_out=2),
        "sort": lambda: frame(4).sort_values("value").key.sum(),
        "drop-duplicates": lambda: frame().drop_duplicates("key", split_out=3).value.count(),
    }


# ---- a cluster ---------------------------------------------------------------------------------


@contextmanager
def cluster(plan: Plan, switch: str) -> Iterator[Client]:
    """Start a cluster with the runtime switched on as ``switch`` says."""
    hooks = {f"distributed.{which}.preload": [HOOK] for which in ("scheduler", "worker", "nanny", "client")}
    settings: dict[str, Any] = dict(each.split("=", 1) for each in plan.set)
    if switch == "config":
        settings |= {"gpurt.enabled": True, **hooks}
    elif switch == "off":
        settings["dataframe.shuffle.method"] = plan.method
    preload = ["dask_gpurt"] if switch == "preload" else []
    with dask.config.set(settings), _local(plan, preload) as local, Client(local) as client:
        if switch == "enable":
            dask_gpurt.enable(client)
        yield client


def _local(plan: Plan, preload: Sequence[str]) -> Any:
    options: dict[str, Any] = {
        "n_workers": plan.workers,
        "threads_per_worker": plan.threads,
        "dashboard_address": ":0",
        "protocol": plan.protocol,
    }
    if preload:
        options["preload"] = list(preload)
    if plan.backend == "pandas":
        return LocalCluster(processes=True, **options)
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(rmm_pool_size=plan.pool, **options)


def run_cluster(plan: Plan, switch: str, number: int, directory: Path, parquet: Path) -> list[TimedOperation]:
    """Run operations on a fresh cluster, until all are done or one is given up."""
    rng, done = random.Random(f"{plan.seed}-{switch}-{number}"), list[TimedOperation]()
    with cluster(plan, switch) as client:
        transitions = Transitions()
        client.cluster.scheduler.add_plugin(transitions)
        pids = [*client.run(_arm, str(directory.resolve())).values(), os.getpid()]

        def stalled(seconds: float) -> None:
            name = f"stall-{switch}-{number}-{len(done)}.json"
            console.print(f"[red]nothing has happened for {seconds:.1f} s: see {directory / name}")
            write(_dump(client, directory, pids), directory / name)
            if plan.stop:
                os._exit(1)

        with Watchdog(lambda: transitions.last, plan.watchdog, stalled) as watchdog:
            while len(done) < plan.operations and not (done and done[-1].error == "given up"):
                name, make = rng.choice(list(operations(rng, plan.backend, parquet).items()))
                done.append(_run(client, transitions, watchdog, switch, name, len(done), make, plan.watchdog))
    return done


def _arm(directory: str) -> int:
    arm(directory)
    return os.getpid()


def _run(
    client: Client,
    transitions: Transitions,
    watchdog: Watchdog,
    switch: str,
    name: str,
    number: int,
    make: Callable[[], Any],
    watchdog_s: float,
) -> TimedOperation:
    error, start = "", time.monotonic()
    watchdog.take_lateness()
    pressed = _pressure()
    transitions.begin()
    future = None
    try:
        future = client.compute(make())
        while True:
            with suppress(TimeoutError):
                future.result(timeout=watchdog_s)
                break
            if transitions.last is not None and time.monotonic() - transitions.last > 3 * watchdog_s:
                error = "given up"
                break
    except Exception as failed:  # a failure is a result; continue with the next operation
        error = repr(failed)
    transitions.end()
    seconds = time.monotonic() - start
    ran = TimedOperation(
        switch, name, number, seconds, transitions.gap, transitions.between, transitions.computing,
        watchdog.take_lateness(), (_pressure() - pressed) / max(seconds, 1e-9), error,
    )  # fmt: skip
    if ran.gap > GAP_S or error:
        console.print(f"{switch} {number} {name}: {asdict(ran)}")
    return ran


def _pressure() -> float:
    """Return the seconds so far in which some process of this machine waited for a CPU."""
    with suppress(OSError):
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    return 0.0


def _dump(client: Client, directory: Path, pids: Sequence[int]) -> dict[str, Any]:
    """Return the waiting lists and stacks of all processes, or only stacks where loops are blocked."""
    found: dict[str, Any] = {"client": thread_stacks()}
    found["signalled"] = signalled_stacks(directory.resolve(), pids)
    asked = {
        "scheduler": lambda: client.run_on_scheduler(describe_scheduler),
        "workers": lambda: client.run(describe_worker, on_error="return"),
    }
    for name, ask in asked.items():
        found[name] = _answer(ask)
    return json.loads(json.dumps(found, default=str))


def _answer(ask: Callable[[], Any]) -> Any:
    """Call ``ask`` on a thread and return its answer, if it arrives in time; else the thread is leaked."""
    answers: list[Any] = []

    def put() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(repr(error))

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return answers[0] if answers else f"no answer within {ANSWER_S} s: a loop is blocked"


# ---- results -----------------------------------------------------------------------------------


def summary(ran: Sequence[TimedOperation]) -> None:
    """Print the longest gaps and times by switch and operation."""
    table = Table("switched on", "operation", "runs", "median s", "longest s", "longest gap s", "errors")
    for switch, name in sorted({(each.switch, each.name) for each in ran}):
        mine = [each for each in ran if (each.switch, each.name) == (switch, name)]
        seconds = sorted(each.seconds for each in mine)
        table.add_row(
            switch, name, str(len(mine)), f"{seconds[len(seconds) // 2]:.3f}", f"{seconds[-1]:.3f}",
            f"{max(each.gap for each in mine):.3f}", str(sum(bool(each.error) for each in mine)),
        )  # fmt: skip
    console.print(table)
    for each in sorted(ran, key=lambda each: -each.gap)[:10]:
        console.print(
            f"{each.gap:6.3f} s  {each.switch} {each.number} {each.name}: {' -> '.join(each.between)}; "
            f"computing for {each.computing:.2f} s of it, the watchdog {each.lateness:.2f} s late, "
            f"a CPU was waited for in {each.pressure:.0%} of the time"
        )


@click.command()
@click.option("--backend", type=click.Choice(["pandas", "cudf"]), default="pandas", show_default=True)
@click.option("--protocol", default="tcp", show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--operations", default=500, show_default=True, help="Operations on each cluster.")
@click.option("--clusters", default=1, show_default=True, help="One after the other, for each --switch.")
@click.option(
    "--switch", "switches", type=click.Choice(SWITCHES), multiple=True, default=["config", "preload"]
)
@click.option("--method", default="tasks", show_default=True, help="Dask's shuffle, with --switch off.")
@click.option("--pool", default=0.6, show_default=True, help="Share of a GPU's memory that rmm takes.")
@click.option("--seed", default=0, show_default=True)
@click.option("--watchdog", default=10.0, show_default=True, help="Seconds without a transition.")
@click.option("--stop", is_flag=True, help="Exit with status 1 after recording the first stall.")
@click.option("--set", multiple=True, help="A Dask setting: gpurt.memory.device=8MiB")
@click.option("--directory", type=click.Path(path_type=Path), default=Path("gaps"), show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Results.")
def main(switches: Sequence[str], directory: Path, output: Path | None, **options: Any) -> None:
    """Look for gaps without progress."""
    plan, ran = Plan(**options), list[TimedOperation]()
    parquet = directory / "table"
    parquet.mkdir(parents=True, exist_ok=True)
    for number in range(2 * plan.workers):
        part(number, 20_000).to_parquet(parquet / f"{number}.parquet")
    arm(directory.resolve())
    for number in range(plan.clusters):
        for switch in switches:
            ran += run_cluster(plan, switch, number, directory, parquet)
    summary(ran)
    write(
        {
            "environment": environment(),
            "plan": asdict(plan),
            "worst": [asdict(each) for each in sorted(ran, key=lambda each: -each.gap)[:50]],
            "ran": [[e.switch, e.name, e.seconds, e.gap] for e in ran],
        },
        output,
    )


if __name__ == "__main__":
    main()
