"""Simulate a session of queries over the same tables of a store, on large clusters.

    python -m benchmarks.reads.simulated --workers 256,2048 --seeds 2000-2001 --json simulated-reads.json

Each query reads two tables, maps each partition and reduces the results; reads and maps are one task each, as
in Dask's plans, or, with ``--apart``, two. A worker keeps what it has read. The modes: ``off`` keeps nothing,
``kept`` lets Dask choose, and ``reads``, as by default, sends reads where their files were read. Each run is
simulated twice, the second time with the CPU time that the scheduler took in the first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import click
from dask._task_spec import Task
from dask.dataframe.io.parquet.core import ParquetFunctionWrapper
from distributed.diagnostics.plugin import SchedulerPlugin

from benchmarks.common.commandline import split_list, write
from benchmarks.common.environment import environment
from benchmarks.simulate import Simulation, Work, Workload, build_cluster
from benchmarks.simulate.sides import charged
from benchmarks.simulate.worker import TieredWorker
from benchmarks.simulate.workloads import MIN_TASK_S, READ_BANDWIDTH, Graph, Scale, _reduce, varied
from dask_gpurt.scheduler.read_places import ReadPlaces

#: Bytes per second that a worker gets from the store, and the ratio of rows in memory and in files.
STORE_BANDWIDTH, COMPRESSION = 2e8, 3
#: Bytes of a partition for one of the result of a map.
SELECTED = 20
QUERIES = 5
#: Shares of all memory that the tables take, decoded.
TABLES = {"facts": 0.2, "others": 0.05}
MODES = ("off", "kept", "reads")
#: Reads files, as Dask's tasks do.
READER: Any = object.__new__(ParquetFunctionWrapper)
READER.fs, READER._columns = SimpleNamespace(), None


@dataclass(frozen=True, slots=True)
class Read(Work):
    """Describe a task that reads a file of a store."""

    file: str = ""
    fetched: float = 0.0

    def task(self) -> Task:
        """Return the task for Dask's scheduler."""
        return Task(self.key, READER, {"piece": (self.file, None, None)}, _data_producer=True)


class Keeping(TieredWorker):
    """Keep what tasks have read."""

    keeps = True

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.kept: set[str] = set()
        self.read = self.found = 0

    def _begin(self, work: Work, ready: float) -> None:
        if isinstance(work, Read):
            self.read += 1
            if self.keeps and work.file in self.kept:
                self.found += 1
            else:
                fetch = work.fetched / STORE_BANDWIDTH
                work = replace(work, seconds=work.seconds + fetch * self.speed)
            self.kept.add(work.file)
        super()._begin(work, ready)


class Forgetting(Keeping):
    """Keep nothing."""

    keeps = False


def session(scale: Scale, rng: random.Random, *, apart: bool = False) -> Workload:
    """Return queries that read the same tables."""
    graph, submissions = Graph(), []
    for query in range(QUERIES):
        mapped, files = [], {}
        for table, share in TABLES.items():
            count = max(2, round(scale.partitions * share / TABLES["facts"]))
            size = share * scale.memory / count
            for i in range(count):
                name, seconds = f"read-{table}-q{query}", MIN_TASK_S + size / READ_BANDWIDTH
                nbytes = size if apart else size / SELECTED
                key = graph.add(name, i, nbytes=nbytes, seconds=seconds, workspace=size - nbytes)
                files[key] = f"{table}-{i}", size / COMPRESSION
                if apart:
                    key = graph.add(f"map-{table}-q{query}", i, [key], nbytes=size / SELECTED)
                mapped.append(key)
        wanted = [_reduce(graph, f"sum-q{query}", mapped, 1e6, 8)]
        works = [_of_file(work, *files.get(work.key, ())) for work in graph.works]
        submissions.append(replace(graph.submission(wanted), works=works))
    return varied(Workload("session", submissions), rng)


def _of_file(work: Work, file: str = "", fetched: float = 0.0) -> Work:
    if not file:
        return work
    known = work.key, work.needs, work.seconds, work.nbytes, work.workspace
    return Read(*known, file=file, fetched=fetched)


def bind_reads(simulation: Simulation) -> ReadPlaces:
    """Have reads go where they were done last."""
    places = ReadPlaces(simulation.scheduler, (), _raise)

    class Events(SchedulerPlugin):
        def transition(self, key: Any, start: str, finish: str, *_: Any, **kwargs: Any) -> None:
            places.transition(key, finish, kwargs.get("worker"))

    simulation.scheduler.add_plugin(Events(), name="reads")
    places.bind()
    return places


def _raise(name: str, reason: str) -> None:
    raise RuntimeError(f"{name}: {reason}")


BINDS: dict[str, Callable[[Simulation], object] | None] = {
    "off": None,
    "kept": None,
    "reads": bind_reads,
}


def run(shape: str, workers: int, seed: int, mode: str, apart: bool) -> dict[str, Any]:
    """Simulate a session, its CPU time charged."""
    rng, cluster = random.Random(seed), build_cluster(shape, workers, seed=seed)
    workload = session(Scale(2 * workers, cluster.memory, workers), rng, apart=apart)
    make = partial(
        Simulation,
        cluster,
        workload,
        bind=BINDS[mode],
        worker=Forgetting if mode == "off" else Keeping,
        name=mode,
    )
    first = make()
    first.run()
    second = make(overheads=charged(first))
    result = second.run()
    reads = sum(worker.read for worker in second.workers.values())
    found = sum(worker.found for worker in second.workers.values())
    return {
        "cluster": shape,
        "workers": workers,
        "seed": seed,
        "mode": mode,
        "makespan": round(result.makespan, 3),
        "found": round(found / reads, 3),
        "steals": result.steals,
        "decision_us": round(first.result.decision_us, 1),
        "scheduler_us": round(first.result.scheduler_us, 1),
    }


def _seeds(_: Any, __: Any, text: str) -> Sequence[int]:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--seeds", default="2000-2001", callback=_seeds, show_default=True)
@click.option("--clusters", default="rdma,tcp", callback=split_list(["rdma", "tcp", "mixed", "dgx"]))
@click.option("--modes", default=",".join(MODES), callback=split_list(list(MODES)))
@click.option("--workers", default="256,2048", show_default=True)
@click.option("--apart", is_flag=True, help="Reads and maps are tasks of their own.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    seeds: Sequence[int],
    clusters: Sequence[str],
    modes: Sequence[str],
    workers: str,
    apart: bool,
    output: Path | None,
) -> None:
    """Simulate all runs, and write the results after each."""
    rows: list[dict[str, Any]] = []
    for number, shape, seed, mode in product(map(int, workers.split(",")), clusters, seeds, modes):
        rows.append(run(shape, number, seed, mode, apart))
        click.echo(str(rows[-1]))
        ratios = {}
        for count, other in product(dict.fromkeys(row["workers"] for row in rows), modes):
            of = {
                mode: [r["makespan"] for r in rows if (r["workers"], r["mode"]) == (count, mode)]
                for mode in modes
            }
            pairs = [one / two for one, two in zip(of[modes[0]], of[other], strict=False)]
            if pairs:
                ratios[f"{modes[0]} / {other}, {count} workers"] = round(geometric_mean(pairs), 3)
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}
        write({**about, "apart": apart, "store": STORE_BANDWIDTH, "rows": rows, "ratios": ratios}, output)
    click.echo(str(ratios))


if __name__ == "__main__":
    main()
