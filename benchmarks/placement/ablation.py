"""Measure what each rule of placement gains: simulate workloads without it, and compare with all rules.

    python -m benchmarks.placement.ablation --seeds 1000-1003 --json placement-ablation.json

Each rule is switched off by itself. The table has the ratio of makespans without the rule and with all rules,
by geometric mean over workloads, clusters and seeds, with a 95% interval over the pairs: above 1, the rule
pays. Seeds below 1000 were used for tuning. A decision takes the virtual seconds of ``DECISION_S``.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple
from unittest.mock import patch

import click

from benchmarks.common.commandline import split_list, write
from dask_gpurt.cli.environment import environment
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.placement import candidates, durations, estimates, queueing
from dask_gpurt.placement.candidates import CandidateSelector
from dask_gpurt.placement.cost import Candidate
from dask_gpurt.placement.durations import DurationModel, WorkerSlowdown
from dask_gpurt.placement.estimates import Estimates
from dask_gpurt.placement.queueing import EVERYWHERE, AvailableWorkers, SiblingQueue
from dask_gpurt.placement.strategy import Placement
from dask_gpurt.simulate import WORKLOADS, Cluster, Overheads, Simulation, Workload, build_cluster
from dask_gpurt.simulate.placements import PLACEMENTS, VirtualHeadroom
from dask_gpurt.simulate.simulation import WorkloadFailed
from dask_gpurt.simulate.workloads import Graph, Scale, varied

#: Virtual seconds of a decision, by placement, from ``placement-2cpu.json``.
DECISION_S = {"stock": 25e-6, "gpurt": 110e-6}
#: The clusters and their workers.
CLUSTERS = {"dgx": 8, "mixed": 8, "rdma": 16, "tcp": 16}
#: Pseudo-rules: all rules, and Dask's own choices on workers with the runtime's tiers.
ALL, NONE = "all rules", "no placement"

#: A target and what replaces its attribute.
Patch = tuple[object, str, object]


# ---- rules that can be switched off ----------------------------------------------------------------------


def _dasks_non_rootish(self: Any, ts: Any) -> Any:
    return self._dasks("decide_worker_non_rootish", ts)


def _dasks_thief(self: Any, scheduler: Any, ts: Any, thieves: Any, *, occupancies: Any) -> Any:
    return self._dasks("_get_thief", scheduler, ts, thieves, occupancies=occupancies)


def _without(function: Callable[..., Any], **fields: Any) -> Callable[..., Any]:
    """Return a method whose result, a named tuple, has other values in some fields."""

    def replaced(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)._replace(**fields)

    return replaced


def _gains(self: CandidateSelector, candidate: Candidate, holder: Candidate) -> bool:
    """Return whether a candidate finishes earlier, by whatever time."""
    return candidate.terms.seconds < holder.terms.seconds


def _no_seconds(function: Callable[..., tuple[float, bool]]) -> Callable[..., tuple[float, bool]]:
    """Return a method that says whether there is room, and that making it takes no time."""
    return lambda *arguments: (0.0, function(*arguments)[1])


def _no_shares(function: Callable[..., None]) -> Callable[..., None]:
    """Return a method that learns from a task, but not how large its result was."""

    def learned(self: Any, *arguments: Any) -> None:
        function(self, *arguments)
        self._min_result_share.clear()

    return learned


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _home(self: Any, ws: Any) -> Any:
    return next(name for name in self._neighbourhoods(ws) if name[0] in ("nvlink", "host"))


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


RULES: Mapping[str, Sequence[Patch]] = {
    "tasks with inputs": [(Placement, "_decide_worker_non_rootish", _dasks_non_rootish)],
    "stealing": [(Placement, "_get_thief", _dasks_thief)],
    "root tasks: choice of a worker": [(CandidateSelector, "for_root", _always([]))],
    "root tasks: siblings are reserved": [(SiblingQueue, "on_started", _nothing)],
    "root tasks: near the worker of a sibling": [(candidates, "siblings", _always(()))],
    "root tasks: waiting is free while all slots fill": [
        (CandidateSelector, "_fills_all_slots", _always(False))
    ],
    "root tasks: only where there is room": [(Estimates, "has_room", _always(True))],
    "tasks of a new graph count as arriving": [(CandidateSelector, "on_graph", _nothing)],
    "readers of aliases count": [(estimates, "_followers", _always({}))],
    "durations by bytes of inputs": [
        (DurationModel, "predict", _always(None)),
        (DurationModel, "mean", _always(None)),
    ],
    "slowdowns of workers": [(WorkerSlowdown, "of", _always(1.0))],
    "slowdowns: only beyond chance": [(durations, "CHANCE_ERRORS", 0.0)],
    "tasks of an input's kind count while they run": [
        (Estimates, "demand", _without(Estimates.demand, sources=()))
    ],
    "other holders only if that pays": [(CandidateSelector, "_is_no_worse", _always(True))],
    "workers near the holders": [(CandidateSelector, "_near", _always(()))],
    "near before far": [
        (AvailableWorkers, "neighbourhoods", _always((EVERYWHERE,))),
        (AvailableWorkers, "home", _home),
    ],
    "other workers where none has room": [(CandidateSelector, "_far", _always(()))],
    "not while durations are unknown or roots queue": [(CandidateSelector, "_may_move", _always(True))],
    "a gain is certain": [(CandidateSelector, "_pays", _gains)],
    "a gain is certain: 50 ms": [(candidates, "MIN_GAIN_S", 0.0)],
    "a gain is certain: a third of the wait": [(candidates, "WAIT_ERROR", 0.0)],
    "a gain is certain: less where moves are free": [(candidates, "NEGLIGIBLE_MOVE_S", -1.0)],
    "tasks that wait for inputs look around": [(candidates, "_waits_for_inputs", _always(False))],
    "bytes in flight": [(Estimates, "seconds_inbound", _always(0.0))],
    "tiers of inputs": [(VirtualHeadroom, "tier", _always(Tier.DEVICE))],
    "the replica with the best route": [(estimates, "MAX_REPLICAS", 1)],
    "seconds to spill": [(Estimates, "_room", _no_seconds(Estimates._room))],
    "the working set fits": [(Estimates, "demand", _without(Estimates.demand, working_set=0.0))],
    "results: at least the smallest share of inputs": [
        (Estimates, "on_task_finished", _no_shares(Estimates.on_task_finished))
    ],
    "bytes since a worker's report": [(Estimates, "_arrived_since_report", _always(0))],
    "four holders": [(candidates, "MAX_HOLDERS", 1)],
    "two neighbours": [(candidates, "MAX_NEAR_WORKERS", 1)],
    "sixteen far workers": [(candidates, "MAX_FAR_WORKERS", 4), (queueing, "MAX_FAR_WORKERS", 4)],
}


# ---- what is simulated -----------------------------------------------------------------------------------


def uneven_reuse(scale: Scale, rng: random.Random) -> Workload:
    """Map and reduce a persisted collection, three times, of which half of the workers hold everything."""
    graph = Graph()
    kept = graph.read("kept", scale.each(0.15))
    read = graph.submission(kept, keep=True)
    holders = max(1, scale.workers // 2)
    homes = [replace(work, worker=index % holders) for index, work in enumerate(read.works)]
    submissions = [replace(read, works=homes)]
    for query in range(3):
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
    partitions: int
    seed: int

    def build(self, cluster: Cluster) -> Workload:
        """Return the workload, whose durations vary by a twentieth."""
        scale, rng = Scale(self.partitions, cluster.memory, self.workers), random.Random(self.seed)
        return varied(ALL_WORKLOADS[self.workload](scale, rng), rng)


class Outcome(NamedTuple):
    """Hold the figures of a simulated run: seconds, workers over memory, bytes spilled and between hosts."""

    seconds: float
    over_memory: int
    spilled: int
    between_hosts: int


def simulate(cell: Cell, rule: str) -> Outcome | None:
    """Simulate a run without a rule; return None if Dask gives the workload up."""
    cluster = build_cluster(cell.cluster, cell.workers)
    bind, worker = PLACEMENTS["gpurt"]
    decision = DECISION_S["stock" if rule == NONE else "gpurt"]
    with ExitStack() as patches:
        for target, name, value in RULES.get(rule, ()):
            patches.enter_context(patch.object(target, name, value))
        simulation = Simulation(
            cluster,
            cell.build(cluster),
            bind=None if rule == NONE else bind,
            worker=worker,
            overheads=Overheads(decision=decision),
        )
        try:
            simulation.run()
        except WorkloadFailed:
            return None
    found = simulation.result
    assert not found.fallbacks, (cell, rule)
    return Outcome(found.makespan, found.over_memory, found.spilled, found.between_hosts)


def _run(job: tuple[Cell, str]) -> tuple[Cell, Outcome | None]:
    return job[0], simulate(*job)


# ---- the table -------------------------------------------------------------------------------------------


Outcomes = Mapping[Cell, Outcome | None]


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
    pairs
        The number of pairs of runs.
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
    mean = fmean(logarithms.values())
    error = 1.96 * stdev(logarithms.values()) / math.sqrt(len(logarithms))
    groups: dict[tuple[str, str], list[float]] = {}
    for cell, each in logarithms.items():
        groups.setdefault((cell.cluster, cell.workload), []).append(each)
    means = {name: fmean(each) for name, each in groups.items()}
    clusters = sorted({cluster for cluster, _ in means})
    worst, best = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return Worth(
        math.exp(mean),
        math.exp(mean - error),
        math.exp(mean + error),
        {name: math.exp(fmean([m for (c, _), m in means.items() if c == name])) for name in clusters},
        (math.exp(means[worst]), " on ".join(reversed(worst))),
        (math.exp(means[best]), " on ".join(reversed(best))),
        len(logarithms),
        totals.over_memory - of_all.over_memory,
        totals.spilled / max(1, of_all.spilled),
        totals.between_hosts / max(1, of_all.between_hosts),
    )


def _cells(
    clusters: Sequence[str], workloads: Sequence[str], partitions: Sequence[int], seeds: Sequence[int]
) -> Iterator[Cell]:
    for name, workload, each, seed in product(clusters, workloads, partitions, seeds):
        yield Cell(name, CLUSTERS[name], workload, each * CLUSTERS[name], seed)


def _seeds(_: Any, __: Any, text: str) -> Sequence[int]:
    """Parse a range of seeds, such as ``1000-1003``."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _print(rule: str, found: Worth) -> None:
    by_cluster = ", ".join(f"{name} {mean:.3f}" for name, mean in found.by_cluster.items())
    print(
        f"{rule:52} {found.mean:.3f} ({found.low:.3f} to {found.high:.3f})  {by_cluster};"
        f" least {found.worst[0]:.2f} {found.worst[1]}, most {found.best[0]:.2f} {found.best[1]};"
        f" over memory {found.over_memory:+}, spilled {found.spilled:.2f},"
        f" between hosts {found.between_hosts:.2f}",
        flush=True,
    )


@click.command(help=__doc__.partition("\n")[0])
@click.option("--seeds", default="1000-1003", callback=_seeds, show_default=True, help="A range of seeds.")
@click.option("--clusters", default=",".join(CLUSTERS), callback=split_list(list(CLUSTERS)))
@click.option("--workloads", default=",".join(ALL_WORKLOADS), callback=split_list(list(ALL_WORKLOADS)))
@click.option("--partitions", "-p", multiple=True, default=(2, 5), show_default=True, help="For each worker.")
@click.option("--rules", default="", help="Only rules that contain one of these words, separated by commas.")
@click.option("--processes", default=os.cpu_count() or 1, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all makespans here.")
def main(
    seeds: Sequence[int],
    clusters: Sequence[str],
    workloads: Sequence[str],
    partitions: Sequence[int],
    rules: str,
    processes: int,
    output: Path | None,
) -> None:
    """Simulate without each rule, and print what it gains."""
    cells = list(_cells(clusters, workloads, partitions, seeds))
    chosen = [rule for rule in RULES if any(word in rule for word in rules.split(","))]
    results: dict[str, Any] = {
        **environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seeds": [seeds[0], seeds[-1]],
        "decision_s": DECISION_S,
        "rules": {},
    }
    found: dict[str, Outcomes] = {}
    with get_context("fork").Pool(processes) as pool:
        for rule in [ALL, NONE, *chosen]:
            jobs = [(cell, rule) for cell in cells]
            found[rule] = dict(pool.imap_unordered(_run, jobs))
            known = worth(found[rule], found[ALL])
            _print(rule, known)
            results["rules"][rule] = {
                **known._asdict(),
                "runs": [[*cell, *(outcome or ())] for cell, outcome in sorted(found[rule].items())],
            }
            write(results, output)


if __name__ == "__main__":
    main()
