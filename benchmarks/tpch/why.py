"""Show why queries take as long as they do, by counts that do not depend on the machine.

    python -m benchmarks.tpch.why --scale 0.1 --style all --json why.json

For each query in each style: how many reads there are, how many of them rules have left as Dask makes them,
and for what reason; the computations that the client asks for, their tasks and shuffles, the bytes that are
moved, and the CPU time of planning with empty caches. The JSON file also has each join and each rule's notes.

Each query runs twice on one cluster with the runtime on: for the counts, and for the notes of its plans.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import thread_time
from typing import Any

import click
import dask
from dask._expr import _ExprSequence
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.environment import environment
from dask_gpurt.cli.cluster import default_workers
from dask_gpurt.client.explain.plan import Explanation, explain_plan
from dask_gpurt.client.planning.cache import Planned
from dask_gpurt.client.planning.rules.dependence import columns_of_result
from dask_gpurt.client.session import SESSIONS

from ..common.budget import forget, take_log
from ..common.commandline import write
from ..common.counters import difference, read_counters
from .contenders import GPURT, ClusterOptions, Contender, start
from .figures import MIB, TABLE_WIDTH, rounded
from .options import planning_options, style_option
from .queries import Query
from .reference import computed
from .styles import STYLES
from .tables import ParquetTables

#: How a note begins that says that a read has other partitions than Dask's, and what one says of a read that
#: needs no others.
CHANGED, ENOUGH = "is read in ", "no more than"


def look(contender: Contender, query: Query, tables: ParquetTables) -> dict[str, Any]:
    """Run a query, and return the counts of its run and what rules did to its plans."""
    with contender.chosen():
        found = counts(contender, query, tables)
        plans: list[Planned] = []
        with SESSIONS.planning.watched(plans.append):
            computed(query.build(tables))
    explained = [explain_plan(plan, SESSIONS.planning.origins) for plan in plans]
    blocked = Counter(name for plan in plans if (name := blocking(plan)) is not None)
    return {**found, **reads_of(explained), "blocked": dict(blocked), **rest_of(explained)}


def counts(contender: Contender, query: Query, tables: ParquetTables) -> dict[str, Any]:
    """Run a query with empty caches, and return what it did on the cluster.

    ``planning_cpu_s`` is the time of the thread that builds, optimises and sends; it then only waits.
    """
    client = contender.client
    forget(client)
    before = read_counters(client, contender.has_runtime)
    take_log(client)
    SESSIONS.planning.clear()
    began = thread_time()
    computed(query.build(tables))
    planned = thread_time() - began
    log = take_log(client)
    spent = difference(before, read_counters(client, contender.has_runtime))
    return {
        "jobs": len(log.graphs),
        "tasks": sum(step.action == "compute" for step in log.steps),
        "planning_cpu_s": planned,
        "graph_s": sum(stop - start for start, stop in log.graphs),
        **{name: spent[name] for name in ("shuffles", "moved_bytes", "read_bytes", "thread_cpu_seconds")},
    }


def blocking(planned: Planned) -> str | None:
    """Return the first operation of a plan from which on its rows depend on partitions, as far as known.

    None if the plan as a whole does not.
    """
    if planned.facts is None:
        return "no rules"
    plan, depends = planned.facts.bare(planned.facts.plans[-1])
    if not depends:
        return None
    results = plan.operands if isinstance(plan, _ExprSequence) else [plan]
    for expr in itertools.chain.from_iterable(each.walk() for each in results):
        if columns_of_result(expr, None) is None and all(
            columns_of_result(each, None) is not None for each in expr.dependencies()
        ):
            return type(expr).__name__
    return "order or labels of the result"


def reads_of(explained: Sequence[Explanation]) -> dict[str, Any]:
    """Return the number of reads, of those that rules have left, and the reasons for these."""
    reads = [read for plan in explained for read in plan.reads]
    left = [read for read in reads if not read.why.startswith(CHANGED) and ENOUGH not in read.why]
    return {
        "reads": len(reads),
        "left": len(left),
        "reasons": dict(Counter(read.why for read in left)),
        "tables": [dataclasses.asdict(read) for read in reads],
    }


def rest_of(explained: Sequence[Explanation]) -> dict[str, Any]:
    """Return the joins and shuffles of plans, and all that rules have noted."""
    return {
        "joins": [str(join) for plan in explained for join in plan.joins],
        "shuffle_steps": [str(shuffle) for plan in explained for shuffle in plan.shuffles],
        "notes": [dataclasses.asdict(note) for plan in explained for note in plan.notes],
        "to_dask": [text for plan in explained for text in plan.methods],
    }


def sums_of(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sums of each style, with all reasons, the most frequent first."""
    sums: dict[str, dict[str, Any]] = {}
    names = ("reads", "left", "jobs", "tasks", "shuffles", "moved_bytes", "planning_cpu_s", "graph_s")
    for style in dict.fromkeys(one["style"] for one in found):
        mine = [one for one in found if one["style"] == style and "error" not in one]
        sums[style] = {"queries": len(mine), **{name: sum(one[name] for one in mine) for name in names}}
        for name in ("reasons", "blocked"):
            counted = sum((Counter(one[name]) for one in mine), Counter[str]())
            sums[style][name] = dict(counted.most_common())
    return sums


def results_of(found: Sequence[dict[str, Any]], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the results to write."""
    return {
        "parameters": parameters,
        **environment(),
        "sums": rounded(sums_of(found)),
        "queries": rounded(found),
    }


def print_counts(found: Sequence[dict[str, Any]]) -> None:
    """Print one line per query and style, and one per style."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("style", "query", "reads", "left", "jobs", "tasks", "shuffles", "moved MiB", "plan ms"):
        table.add_column(heading, justify="right")
    table.add_column("why reads are left", overflow="fold")
    for one in found:
        table.add_row(one["style"], f"Q{one['query']}", *_cells(one))
    for style, sums in sums_of(found).items():
        table.add_row(style, "sum", *_cells(sums))
    console = Console()
    (console if console.is_terminal else Console(width=TABLE_WIDTH)).print(table)


def _cells(one: dict[str, Any]) -> list[str]:
    if "error" in one:
        return [*[""] * 7, one["error"]]
    numbers = [f"{one[name]:.0f}" for name in ("reads", "left", "jobs", "tasks", "shuffles")]
    reasons = "; ".join(f"{number} x {reason}" for reason, number in one["reasons"].items())
    reasons += "".join(f"; by {name}" for name in one["blocked"])
    return [*numbers, f"{one['moved_bytes'] / MIB:.1f}", f"{1e3 * one['planning_cpu_s']:.0f}", reasons]


@click.command(help=__doc__.partition("\n")[0])
@planning_options
@style_option
@click.option("--workers", type=click.IntRange(min=1), help="[default: 2, or one per GPU]")
@click.option(
    "--partition-size",
    default="64MiB",
    show_default=True,
    help="As on GPUs, where rules choose partitions by size; 'auto' leaves them to Dask on pandas.",
)
def main(
    tables: ParquetTables,
    queries: list[int],
    backend: str,
    styles: list[str],
    workers: int | None,
    partition_size: str,
    output: Path | None,
) -> None:
    options = ClusterOptions(backend, workers or default_workers(backend), 1, None, 0.6)
    planning = {"gpurt.planning.partition-size": partition_size, "gpurt.planning.store": "off"}
    parameters = {"scale": tables.scale, "parts": tables.parts, "backend": backend}
    found: list[dict[str, Any]] = []
    with dask.config.set(planning), start(options, [[GPURT]]) as (contender,):
        for style in styles:
            for number in queries:
                try:
                    seen = look(contender, STYLES[style][number], tables)
                except Exception as error:  # a failure is a result
                    seen = {"error": repr(error)}
                found.append({"style": style, "query": number, **seen})
                write(results_of(found, {**parameters, **planning}), output)  # keeps what is known so far
    print_counts(found)


if __name__ == "__main__":
    main()
