"""Measure what each rule of the planner saves: run programs as they are and without one rule, in turns.

    python -m benchmarks.tpch.rules --scale 1 --rounds 2 --json rules.json

Programs are the queries of TPC-H in all styles, those of :mod:`benchmarks.qualify`, and the questions of
:mod:`benchmarks.programs.to_client`. Each runs once to see which rules change its plans. Then each rule is
left out of some of the programs that it changes, in turns with the planner as it is, which is measured next
to it. ``planning_cpu_s`` is the time of the thread that builds and plans with empty caches, ``task_cpu_s``
that of the tasks.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import click
import dask
import dask.dataframe as dd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.environment import environment
from dask_gpurt.cli.cluster import default_workers
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.session import SESSIONS
from dask_gpurt.dask_hooks.planning import name_of

from ..common.budget import forget, take_log
from ..common.commandline import write
from ..common.counters import difference, read_counters
from ..programs.to_client import QUESTIONS, make_tables
from ..qualify.programs import PROGRAMS
from .contenders import GPURT, ClusterOptions, Contender, start
from .figures import rounded
from .options import planning_options
from .reference import computed
from .styles import STYLES
from .tables import ParquetTables

#: Computes a program's results.
Program = Callable[[], Any]
COSTS = ("tasks", "task_cpu_s", "moved_bytes", "read_bytes", "planning_cpu_s")


def programs(tables: ParquetTables, queries: Sequence[int], questions: Path) -> Iterator[tuple[str, Program]]:
    """Yield all programs by name."""
    for style, of in STYLES.items():
        for number in queries:
            yield f"{style} q{number}", partial(_query, of[number], tables)
    for name, program in PROGRAMS.items():
        if name.partition(" ")[0] not in STYLES:
            yield name, partial(program, tables.directory)
    for name, question in QUESTIONS.items():
        yield name, partial(_question, question, questions)


def _query(query: Any, tables: ParquetTables) -> Any:
    return computed(query.build(tables))


def _question(question: Any, folder: Path) -> Any:
    return question({each.name: dd.read_parquet(str(each)) for each in folder.iterdir()}).compute()


class _Seen:
    """Apply a rule, and note whether it changes plans."""

    def __init__(self, rule: Any, fired: set[str]):
        self.rule, self.fired = rule, fired

    def apply(self, plan: Any, facts: Facts) -> Any:
        """Apply the rule."""
        changed = self.rule.apply(plan, facts)
        if name_of(changed) != name_of(plan):
            self.fired.add(type(self.rule).__name__)
        return changed


@contextmanager
def rules_changed(change: Callable[[Any], Any]) -> Iterator[None]:
    """Have each rule replaced within the context, or left out if the function returns None."""
    planning = SESSIONS.planning
    before = planning.early_rules, planning.rules
    planning.early_rules, planning.rules = (
        tuple(new for rule in rules if (new := change(rule)) is not None) for rules in before
    )
    try:
        yield
    finally:
        planning.early_rules, planning.rules = before


def changing(contender: Contender, program: Program) -> set[str]:
    """Run a program, and return the rules that change its plans."""
    fired: set[str] = set()
    SESSIONS.planning.clear()
    with contender.chosen(), rules_changed(lambda rule: _Seen(rule, fired)):
        program()
    return fired


def cost(contender: Contender, program: Program, without: str | None) -> dict[str, float]:
    """Run a program without a rule, and return what it took."""
    client = contender.client
    forget(client)
    client.run(gc.collect)
    before = read_counters(client, contender.has_runtime)
    take_log(client)
    SESSIONS.planning.clear()
    with contender.chosen(), rules_changed(lambda rule: None if type(rule).__name__ == without else rule):
        began = thread_time()
        program()
        planned = thread_time() - began
    log = take_log(client)
    spent = difference(before, read_counters(client, contender.has_runtime))
    return {
        "tasks": sum(step.action == "compute" for step in log.steps),
        "task_cpu_s": spent["thread_cpu_seconds"],
        "moved_bytes": spent["moved_bytes"],
        "read_bytes": spent["read_bytes"],
        "planning_cpu_s": planned,
    }


def sums_of(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each rule the sums with and without it, each program by its least cost of all rounds."""
    found = []
    for rule in dict.fromkeys(run["rule"] for run in runs):
        mine = [run for run in runs if run["rule"] == rule]
        names = dict.fromkeys(run["program"] for run in mine)
        row: dict[str, Any] = {"rule": rule, "programs": len(names)}
        for what in COSTS:
            with_it, without = (
                sum(
                    min(run[what] for run in mine if (run["program"], run["on"]) == (name, on))
                    for name in names
                )
                for on in (True, False)
            )
            row[what] = {"with": with_it, "without": without}
        found.append(row)
    return found


def print_sums(fired: Mapping[str, Sequence[str]], sums: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each rule."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("rule", "fires", "measured", *(f"{what}, with/without" for what in COSTS)):
        table.add_column(heading, justify="right")
    for row in sums:
        costs = [f"{row[what]['with']:.4g} / {row[what]['without']:.4g}" for what in COSTS]
        number = sum(row["rule"] in rules for rules in fired.values())
        table.add_row(row["rule"], str(number), str(row["programs"]), *costs)
    Console(width=180).print(table)


@click.command(help=__doc__.partition("\n")[0])
@planning_options
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--most", default=8, show_default=True, help="Programs in which a rule is measured.")
@click.option("--rules", "chosen", help="Rules to measure, separated by commas. [default: all]")
@click.option("--rows", default=1_000_000, show_default=True, help="Rows of questions to the client.")
def main(
    tables: ParquetTables,
    queries: list[int],
    backend: str,
    rounds: int,
    most: int,
    chosen: str | None,
    rows: int,
    output: Path | None,
) -> None:
    options = ClusterOptions(backend, default_workers(backend), 1, None, 0.6)
    planning = {"gpurt.planning.store": "off"}
    parameters = {"scale": tables.scale, "parts": tables.parts, "backend": backend, "rounds": rounds}
    parameters |= {"most": most, "rows": rows}
    fired: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    runs: list[dict[str, Any]] = []

    def keep() -> None:
        results = {"parameters": parameters, **environment(), "sums": rounded(sums_of(runs))}
        write({**results, "fired": fired, "failed": failed, "runs": rounded(runs)}, output)

    with (
        tempfile.TemporaryDirectory() as folder,
        dask.config.set(planning),
        start(options, [[GPURT]]) as (contender,),
    ):
        make_tables(Path(folder), rows)
        known = dict(programs(tables, queries, Path(folder)))
        for name, program in known.items():
            try:
                fired[name] = sorted(changing(contender, program))
            except Exception as error:  # a failure is a result
                failed[name] = repr(error)
            keep()
        order = [*SESSIONS.planning.early_rules, *SESSIONS.planning.rules]
        rules = chosen.split(",") if chosen else [type(rule).__name__ for rule in order]
        for rule in rules:
            names = [name for name, found in fired.items() if rule in found]
            for turn in range(rounds):
                for at, name in enumerate(names[:: max(1, -(-len(names) // most))]):
                    for on in (True, False) if (turn + at) % 2 else (False, True):
                        spent = cost(contender, known[name], None if on else rule)
                        runs.append({"rule": rule, "program": name, "turn": turn, "on": on, **spent})
            keep()
    print_sums(fired, sums_of(runs))
    Console().print(failed)


if __name__ == "__main__":
    main()
