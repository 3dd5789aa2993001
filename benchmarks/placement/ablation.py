"""Measure what each rule of placement gains: simulate workloads without it, and compare with all rules.

    python -m benchmarks.placement.ablation --seeds 1000-1003 --json placement-ablation.json

Each rule is switched off by itself. The table has the ratio of makespans without the rule and with all rules,
by geometric mean over workloads, clusters and partition sizes: above 1, the rule pays. The 95% interval is
bootstrapped over the seeds of each of these. With ``--stepwise``, rules are then dropped one by one, those
that gain least first, and each is measured without all that were dropped before it: two rules may do the same
work. Links, durations and graphs depend on the seed. Rules are chosen on seeds from 1000 on; seeds from 2000
on are for reports. A decision takes the virtual seconds of ``DECISION_S``.
"""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

import click

from benchmarks.common.commandline import split_list, write
from benchmarks.simulate import WORKLOADS, Cluster, Overheads, Simulation, Workload, build_cluster
from benchmarks.simulate.clock import DeadlockError
from benchmarks.simulate.placements import PLACEMENTS
from benchmarks.simulate.simulation import WorkloadFailed
from benchmarks.simulate.workloads import Graph, Scale, varied
from dask_gpurt.cli.environment import environment
from dask_gpurt.placement import GatedPlacement, gate, strategy
from dask_gpurt.placement.cost import Routes
from dask_gpurt.placement.estimates import Estimates
from dask_gpurt.placement.strategy import CandidateSelector, Placement

#: Virtual seconds of a decision, by Dask and by placement.
DECISION_S = {"stock": 25e-6, "gpurt": 110e-6}
#: The clusters, and their numbers of workers.
CLUSTERS = {"dgx": (8,), "mixed": (8, 32), "rdma": (12, 32), "tcp": (12, 32)}
#: Cells of more tasks are left out, as they take too long.
MAX_TASKS = 1600
#: Factor on the bytes of a workload, by partitions per worker: some cells are short of memory.
MEMORY = {2: 1.0, 5: 1.6}
#: Pseudo-rules: Dask's own choices, on the workers of the runtime and on Dask's.
NONE, STOCK = "no placement", "no runtime"
#: In ``--stepwise``, a rule is dropped if makespans grow by less than this factor without it.
MIN_WORTH = 1.02
#: Resamples of a bootstrap.
RESAMPLES = 2000

#: A target and what replaces its attribute.
Patch = tuple[object, str, object]


# ---- rules that can be switched off ----------------------------------------------------------------------


def _dasks_non_rootish(self: Any, ts: Any) -> Any:
    """Let Dask choose, but keep the books of all other rules."""
    ws = self._dasks("decide_worker_non_rootish", ts)
    if ws is not None:
        self._estimates.on_decided(self._estimates.cost(self._estimates.demand(ts), ws), ws)
    return ws


def _dasks_thief(self: Any, scheduler: Any, ts: Any, thieves: Any, *, occupancies: Any) -> Any:
    return self._dasks("_get_thief", scheduler, ts, thieves, occupancies=occupancies)


def _without(function: Callable[..., Any], **fields: Any) -> Callable[..., Any]:
    """Return a method whose result, a named tuple, has other values in some fields."""

    def replaced(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)._replace(**fields)

    return replaced


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


RULES: Mapping[str, Sequence[Patch]] = {
    "tasks with inputs": [(Placement, "_decide_worker_non_rootish", _dasks_non_rootish)],
    "stealing: thieves": [(Placement, "_get_thief", _dasks_thief)],
    "gate": [(GatedPlacement, "_differ", _always(True))],
    "gate: links": [(gate, "links_differ", _always(False))],
    "root tasks: all": [(CandidateSelector, "for_root", _always([]))],
    "all tasks: only where there is room": [(Estimates, "has_room", _always(True))],
    "other workers where none has room": [(CandidateSelector, "_far", _always(()))],
    "bytes in flight": [(Estimates, "seconds_inbound", _always(0.0))],
    "hosts share their links": [(Routes, "_workers_on_host_of", _always(1))],
    "the working set fits": [(Estimates, "demand", _without(Estimates.demand, working_set=0.0))],
    "four holders": [(strategy, "MAX_HOLDERS", 1)],
}


# ---- what is simulated -----------------------------------------------------------------------------------


def uneven_reuse(scale: Scale, rng: random.Random) -> Workload:
    """Map and reduce a persisted collection, three times, of which half of the workers hold everything.

    Every other seed reads it through aliases, as collections do, the others directly, as futures are.
    """
    graph, aliases = Graph(), rng.random() < 0.5
    kept = graph.read("kept", scale.each(0.15))
    read = graph.submission(kept, keep=True)
    holders = max(1, scale.workers // 2)
    homes = [replace(work, worker=index % holders) for index, work in enumerate(read.works)]
    submissions = [replace(read, works=homes)]
    for query in range(3):
        named = kept
        if aliases:
            named = [
                graph.add(f"kept-q{query}", i, [key], nbytes=graph.sizes[key], seconds=0.0)
                for i, key in enumerate(kept)
            ]
        mapped = [
            graph.add(f"map-q{query}", i, [key], nbytes=graph.sizes[key] / 10, seconds=rng.uniform(0.1, 1.0))
            for i, key in enumerate(named)
        ]
        level = [graph.add(f"sum-q{query}", i, mapped[i : i + 8], nbytes=8) for i in range(0, len(mapped), 8)]
        last = graph.submission([graph.add(f"total-q{query}", 0, level, nbytes=8)])
        named_works = [replace(work, alias=True) if work.key in named else work for work in last.works]
        submissions.append(replace(last, works=named_works))
    return Workload("uneven-reuse", submissions)


#: The workloads by name. Those of the simulator have no aliases, and no data that lie unevenly at first.
ALL_WORKLOADS = {**WORKLOADS, "uneven-reuse": uneven_reuse}


# ---- runs ------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """Name a simulated run without its placement."""

    cluster: str
    workers: int
    workload: str
    each: int
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the cluster with its number of workers."""
        return f"{self.cluster}-{self.workers}"

    def build(self, cluster: Cluster) -> Workload:
        """Return the workload."""
        rng = random.Random(self.seed)
        memory = int(cluster.memory * MEMORY.get(self.each, 1.0))
        scale = Scale(self.each * self.workers, memory, self.workers)
        return varied(ALL_WORKLOADS[self.workload](scale, rng), rng)


class Outcome(NamedTuple):
    """Hold the figures of a simulated run.

    Parameters
    ----------
    seconds
        The makespan.
    over_memory
        Workers that exceed their memory.
    spilled, between_hosts
        Bytes spilled, and moved between hosts.
    decisions
        Choices of placement; 0 if it left all of them to Dask.
    """

    seconds: float
    over_memory: int
    spilled: int
    between_hosts: int
    decisions: int


#: Outcomes by cell; None if Dask gives the workload up, or if it never ends.
Outcomes = Mapping[Cell, Outcome | None]


def simulate(cell: Cell, without: Collection[str]) -> Outcome | None:
    """Simulate a run without some rules."""
    cluster = build_cluster(cell.cluster, cell.workers, seed=cell.seed)
    placed = not {NONE, STOCK} & set(without)
    bind, worker = PLACEMENTS["stock" if STOCK in without else "gpurt"]
    with ExitStack() as patches:
        for rule in without:
            for target, name, value in RULES.get(rule, ()):
                patches.enter_context(patch.object(target, name, value))
        simulation = Simulation(
            cluster,
            cell.build(cluster),
            bind=bind if placed else None,
            worker=worker,
            overheads=Overheads(decision=DECISION_S["gpurt" if placed else "stock"]),
        )
        try:
            simulation.run()
        except (DeadlockError, WorkloadFailed):
            return None
    found, counts = simulation.result, simulation.metrics.snapshot()["counters"]
    assert not found.fallbacks, (cell, without)
    decisions = counts.get("placement.decisions", 0)
    return Outcome(found.makespan, found.over_memory, found.spilled, found.between_hosts, int(decisions))


def _run(job: tuple[Cell, Collection[str]]) -> tuple[Cell, Outcome | None]:
    return job[0], simulate(*job)


class Runs:
    """Simulate all cells, again for each set of rules.

    Parameters
    ----------
    cells
        The cells.
    pool
        The processes.
    """

    def __init__(self, cells: Sequence[Cell], pool: Pool):
        self._cells = cells
        self._pool = pool
        self.all: Outcomes = {}
        self.all = self.without(())

    def without(self, rules: Collection[str]) -> Outcomes:
        """Return the outcomes without some rules. Where placement never chooses, only the gate matters."""
        idle: dict[Cell, Outcome | None] = {}
        if rules and all(rule in RULES and not rule.startswith("gate") for rule in rules):
            idle = {cell: one for cell, one in self.all.items() if one is not None and not one.decisions}
        jobs = [(cell, tuple(rules)) for cell in self._cells if cell not in idle]
        return idle | dict(self._pool.imap_unordered(_run, jobs))


# ---- the table -------------------------------------------------------------------------------------------


class Worth(NamedTuple):
    """Sum up a rule: the ratio of makespans without and with it, and what else differs.

    Attributes
    ----------
    mean, low, high
        The geometric mean of the ratio, and its 95% interval.
    by_cluster
        The mean on each cluster.
    worst, best
        The least and the greatest mean of a workload on a cluster.
    pairs, differ
        The number of pairs of runs, and of those whose makespans differ.
    lost
        How many more runs fail without the rule.
    over_memory
        How many more workers exceed their memory without the rule.
    spilled, between_hosts
        The ratios of all bytes spilled and moved between hosts.
    """

    mean: float
    low: float
    high: float
    by_cluster: Mapping[str, float]
    worst: tuple[float, str]
    best: tuple[float, str]
    pairs: int
    differ: int
    lost: int
    over_memory: int
    spilled: float
    between_hosts: float


def worth(without: Outcomes, with_all: Outcomes) -> Worth:
    """Compare the runs without a rule and with all rules."""
    both = {
        cell: (outcome, all_)
        for cell, outcome in without.items()
        if outcome is not None and (all_ := with_all.get(cell)) is not None
    }
    logarithms = {cell: math.log(outcome.seconds / all_.seconds) for cell, (outcome, all_) in both.items()}
    totals, of_all = (
        Outcome(*(sum(figures) for figures in zip(*side, strict=True)))
        for side in zip(*both.values(), strict=True)
    )
    low, high = _interval(_grouped(logarithms, lambda cell: cell[:-1]))
    means = {
        name: fmean(each)
        for name, each in _grouped(logarithms, lambda cell: (cell.name, cell.workload)).items()
    }
    worst, best = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    by_cluster = _grouped(logarithms, lambda cell: cell.name)
    return Worth(
        math.exp(fmean(logarithms.values())),
        math.exp(low),
        math.exp(high),
        {name: math.exp(fmean(each)) for name, each in sorted(by_cluster.items())},
        (math.exp(means[worst]), " on ".join(reversed(worst))),
        (math.exp(means[best]), " on ".join(reversed(best))),
        len(logarithms),
        sum(abs(each) > 1e-6 for each in logarithms.values()),
        sum(one is None for one in without.values()) - sum(one is None for one in with_all.values()),
        totals.over_memory - of_all.over_memory,
        totals.spilled / max(1, of_all.spilled),
        totals.between_hosts / max(1, of_all.between_hosts),
    )


def _grouped(logarithms: Mapping[Cell, float], name: Callable[[Cell], Any]) -> dict[Any, list[float]]:
    found: defaultdict[Any, list[float]] = defaultdict(list)
    for cell, each in logarithms.items():
        found[name(cell)].append(each)
    return dict(found)


def _interval(groups: Mapping[Any, Sequence[float]]) -> tuple[float, float]:
    """Return the 95% interval of the mean, with the seeds of each group resampled: cells are not alike."""
    rng, known = random.Random(0), [each for each in groups.values() if any(each)]
    total = sum(len(each) for each in groups.values())
    means = sorted(
        sum(sum(rng.choices(each, k=len(each))) for each in known) / total for _ in range(RESAMPLES)
    )
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def _cells(
    clusters: Sequence[str], workloads: Sequence[str], each: Sequence[int], seeds: Sequence[int]
) -> Iterator[Cell]:
    sizes = [(name, workers) for name in clusters for workers in CLUSTERS[name]]
    for (name, workers), workload, number, seed in product(sizes, workloads, each, seeds):
        cell = Cell(name, workers, workload, number, seed)
        if len(cell.build(build_cluster(name, cell.workers)).works) <= MAX_TASKS:
            yield cell


def _seeds(_: Any, __: Any, text: str) -> Sequence[int]:
    """Parse a range of seeds, such as ``1000-1003``."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _print(rule: str, found: Worth) -> None:
    by_cluster = ", ".join(f"{name} {mean:.3f}" for name, mean in found.by_cluster.items())
    click.echo(
        f"{rule:52} {found.mean:.3f} ({found.low:.3f} to {found.high:.3f})  {by_cluster};"
        f" least {found.worst[0]:.2f} {found.worst[1]}, most {found.best[0]:.2f} {found.best[1]};"
        f" {found.differ} of {found.pairs} differ, lost {found.lost:+}, over memory {found.over_memory:+},"
        f" spilled {found.spilled:.2f}, between hosts {found.between_hosts:.2f}"
    )


def stepwise(runs: Runs, alone: Mapping[str, float]) -> Iterator[tuple[str, Worth, bool]]:
    """Drop rules one by one, those that gain least first; yield each, what it gains, and whether it goes."""
    dropped: list[str] = []
    before = runs.all
    for rule in sorted(alone, key=alone.__getitem__):
        without = runs.without([*dropped, rule])
        known = worth(without, before)
        goes = known.mean < MIN_WORTH and known.lost <= 0
        yield rule, known, goes
        if goes:
            dropped.append(rule)
            before = without


@click.command(help=__doc__.partition("\n")[0])
@click.option("--seeds", default="1000-1003", callback=_seeds, show_default=True, help="A range of seeds.")
@click.option("--clusters", default=",".join(CLUSTERS), callback=split_list(list(CLUSTERS)))
@click.option("--workloads", default=",".join(ALL_WORKLOADS), callback=split_list(list(ALL_WORKLOADS)))
@click.option("--partitions", "-p", multiple=True, default=(2, 5), show_default=True, help="For each worker.")
@click.option("--rules", default="", help="Only rules that contain one of these words, separated by commas.")
@click.option("--stepwise", "steps", is_flag=True, help="Then drop rules one by one.")
@click.option("--processes", default=os.cpu_count() or 1, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all figures here.")
def main(
    seeds: Sequence[int],
    clusters: Sequence[str],
    workloads: Sequence[str],
    partitions: Sequence[int],
    rules: str,
    steps: bool,
    processes: int,
    output: Path | None,
) -> None:
    """Simulate without each rule, and print what it gains."""
    chosen = [rule for rule in RULES if any(word in rule for word in rules.split(","))]
    results: dict[str, Any] = {
        **environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seeds": [seeds[0], seeds[-1]],
        "decision_s": DECISION_S,
        "rules": {},
        "stepwise": {},
    }
    with get_context("fork").Pool(processes) as pool:
        runs = Runs(list(_cells(clusters, workloads, partitions, seeds)), pool)
        for rule in [NONE, STOCK, *chosen]:
            results["rules"][rule] = (known := worth(runs.without([rule]), runs.all))._asdict()
            _print(rule, known)
            write(results, output)
        alone = {rule: results["rules"][rule]["mean"] for rule in chosen}
        for rule, known, goes in stepwise(runs, alone) if steps else ():
            results["stepwise"][rule] = {**known._asdict(), "dropped": goes}
            _print(("dropped: " if goes else "kept: ") + rule, known)
            write(results, output)


if __name__ == "__main__":
    main()
