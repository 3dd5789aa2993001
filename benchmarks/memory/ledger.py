"""Measure the scheduler's CPU time for the memory ledgers of many workers.

    python -m benchmarks.memory.ledger --workers 256 --rate 1000 --seconds 8 --repeats 5 --json results.json

The scheduler has a process of its own, with the runtime switched on. Real workers, many in a process, connect
to it over TCP. In each worker's ledger ``--rate`` cells change per second, all cells in turn; those of
partitions cover eight task prefixes. Legs with changes alternate with legs in which nothing is reported.
After each leg with changes the scheduler's account must become equal to the ledgers. The achieved load is
compared with the requested one: late workers put more changes in fewer messages, which makes the ledgers look
cheaper.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import psutil
from distributed import Client
from distributed.protocol.core import dumps, loads

import dask_gpurt
from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from benchmarks.memory.ledger_workers import CELLS, Truth, change, run, schedule, send
from dask_gpurt.memory.ledger import KINDS, PARTITIONS, ClusterMemory, Ledger, Tier

SPAWN = get_context("spawn")
#: Number of processes for the workers.
PROCESSES = 2
#: Seconds before a leg is measured: a heartbeat, after which the reporters know the cluster.
SETTLE = 3.0
#: Seconds within which the scheduler's account must agree with the ledgers.
PATIENCE_S = 10.0
#: Share of the requested load below which the benchmark proves nothing.
REACHED = 0.9
#: The targets: a share of a core, and microseconds for a change on the worker and in ``ClusterMemory.apply``.
MOST_SHARE, MOST_MICROSECONDS = 0.2, 2.0


@dataclass(frozen=True)
class Plan:
    """Hold the number of workers, their changes and the time of a measurement."""

    workers: int
    rate: float
    seconds: float
    repeats: int


# ---- measuring ---------------------------------------------------------------------------------


@contextmanager
def bench(plan: Plan) -> Iterator[Bench]:
    """Start a scheduler and its workers, in processes that end with the context."""
    with ExitStack() as stack:
        scheduler, pipe = start(stack, schedule)
        address = pipe.recv()
        counts = [len(range(i, plan.workers, PROCESSES)) for i in range(PROCESSES)]
        pipes = [start(stack, send, address, n, plan.rate)[1] for n in counts if n]
        for pipe in pipes:
            pipe.recv()
        client = stack.enter_context(Client(address))
        dask_gpurt.enable(client)
        yield Bench(plan, scheduler, pipes, client)


def start(stack: ExitStack, function: Callable[..., Any], *args: Any) -> tuple[psutil.Process, Connection]:
    """Start a process with a pipe to it."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=run, args=(function, there, *args), daemon=True)
    process.start()
    there.close()  # so that recv raises EOFError when the process dies
    stack.callback(process.join)
    stack.callback(process.terminate)
    return psutil.Process(process.pid), here


class Bench:
    """Measure legs: ``scheduler`` is a process, and ``pipes`` lead to the processes of the workers."""

    def __init__(self, plan: Plan, scheduler: psutil.Process, pipes: Sequence[Connection], client: Client):
        self.plan = plan
        self.scheduler = scheduler
        self.pipes = pipes
        self.client = client
        self._ask("end")

    def _ask(self, name: str) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(name)
        return [pipe.recv() for pipe in self.pipes]

    def leg(self, changing: bool) -> dict[str, float]:
        """Measure one leg; counts are per second, and CPU times are shares of a core."""
        if changing:
            self._ask("begin")
        time.sleep(SETTLE)
        before = self._sample()
        time.sleep(self.plan.seconds)
        after = self._sample()
        if changing:
            self._check({place: held for said in self._ask("halt") for place, held in said.items()})
            self._ask("end")
        seconds, due = after.pop("clock") - before["clock"], after.pop("due")
        rates = {name: (count - before[name]) / seconds for name, count in after.items()}
        return {"changing": changing, **rates, "messages_due": due if changing else 0.0}

    def _sample(self) -> dict[str, float]:
        said, cpu = self._ask("count"), self.scheduler.cpu_times()
        counted = {name: sum(one[name] for one in said) for name in said[0]}
        return {**counted, "scheduler": cpu.user + cpu.system, "clock": time.perf_counter()}

    def _check(self, truth: Truth) -> None:
        """Block until the scheduler knows the last change of each cell."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if known(self.client) == truth:
                return
        raise ValueError(f"after {PATIENCE_S} s the scheduler's account still differs from the ledgers")


def known(client: Client) -> Truth:
    """Return the scheduler's account, in the form of the workers'."""
    prefixes: dict[Any, dict[str, int]] = defaultdict(dict)
    by_prefix = dask_gpurt.memory_usage(client, by="prefix").to_pandas(names="metrics")
    for row in by_prefix[by_prefix["kind"] == PARTITIONS].itertuples():
        prefixes[row.worker, row.tier][row.prefix] = row.bytes
    return {
        (place := (row["worker"], row["tier"])): ({kind: row[kind] for kind in KINDS}, prefixes[place])
        for row in dask_gpurt.memory_usage(client)
    }


def measure_change(changes: int = 100_000) -> float:
    """Time a change on the worker.

    Returns
    -------
    float
        Microseconds.
    """
    ledger = Ledger(dict.fromkeys(Tier, 2**40))
    start = time.perf_counter()
    for step in range(changes):
        change(ledger, step, step)
    return (time.perf_counter() - start) / changes * 1e6


def measure_apply(cells: int, rounds: int = 200, workers: int = 256) -> float:
    """Time ``ClusterMemory.apply`` alone, with deserialized messages of ``cells`` cells.

    Returns
    -------
    float
        Microseconds for each cell.
    """
    ledger, messages = Ledger(dict.fromkeys(Tier, 2**40)), []
    for turn in range(1, rounds + 1):
        for cell in range(cells):
            change(ledger, turn * len(CELLS) + cell, turn)
        messages.append(loads(dumps(ledger.changes())))
    cluster_memory, names = ClusterMemory(), [f"tcp://127.0.0.1:{40000 + i}" for i in range(workers)]
    start = time.perf_counter()
    for message in messages:
        for name in names:
            cluster_memory.apply(name, message)
    return (time.perf_counter() - start) / (rounds * workers * cells) * 1e6


# ---- results -----------------------------------------------------------------------------------


def summarise(legs: Sequence[Mapping[str, float]], plan: Plan) -> dict[str, Any]:
    """Derive the cost of the ledgers from the medians of both kinds of legs."""
    with_, without = (
        {name: statistics.median(leg[name] for leg in legs if leg["changing"] == kind) for name in legs[0]}
        for kind in (True, False)
    )
    share = with_["scheduler"] - without["scheduler"]
    applied = {str(len(CELLS)): measure_apply(len(CELLS))}
    asked = plan.workers * plan.rate
    loaded = min(with_["changes"] / asked, with_["messages"] / with_["messages_due"])
    return {
        "share_with": with_["scheduler"],
        "share_without": without["scheduler"],
        "share": share,
        **{name: with_[name] for name in ("senders", "changes", "messages", "messages_due")},
        "changes_due": asked,
        "microseconds_per_change": share / with_["changes"] * 1e6,
        "microseconds_per_message": share / with_["messages"] * 1e6,
        "microseconds_of_apply": applied,
        "microseconds_on_worker": (changed := measure_change()),
        "verdict": judge(share, max(changed, *applied.values()), loaded),
    }


def judge(share: float, microseconds: float, loaded: float) -> str:
    """Return whether the targets are met; a miss at partial load is a miss too."""
    load = f"with {loaded:.0%} of the load"
    if share > MOST_SHARE or microseconds > MOST_MICROSECONDS:
        return f"Target missed, {load}"
    return f"Target met, {load}" if loaded >= REACHED else f"NOTHING SHOWN, {load}: the workers were late"


def print_summary(results: Mapping[str, Any]) -> None:
    """Print a line per leg, the cost of the ledgers, and the verdict."""
    line = "{scheduler:6.1%} of a core for the scheduler, {senders:6.1%} for the workers, changes: "
    for leg in results["legs"]:
        click.echo((line + ("yes" if leg["changing"] else "no")).format(**leg))
    figures = results["figures"]
    click.echo(
        "Share of a core: {share_with:.1%} with, {share_without:.1%} without, {share:.1%} for the ledgers\n"
        "{microseconds_per_change:.2f} µs a change, {microseconds_per_message:.0f} µs a message\n"
        "In a second: {changes:,.0f} changes of {changes_due:,.0f}, "
        "{messages:,.0f} messages of {messages_due:,.0f}".format(**figures)
    )
    for cells, cost in figures["microseconds_of_apply"].items():
        click.echo(f"ClusterMemory.apply: {cost:.2f} µs a cell, {cells} in a message")
    click.echo("On the worker: {microseconds_on_worker:.2f} µs a change".format(**figures))
    click.echo(figures["verdict"])


@click.command(help=__doc__.partition("\n")[0])
@click.option("--workers", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--rate", type=click.FloatRange(min=1), default=1000.0, show_default=True, help="Per worker.")
@click.option("--seconds", type=click.FloatRange(min=1), default=8.0, show_default=True, help="Of a leg.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Of both legs.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(output: Path | None, **parameters: Any) -> None:
    plan = Plan(**parameters)
    with bench(plan) as running:
        legs = [running.leg(changing) for changing in [False, True] * plan.repeats]
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {**asdict(plan), "processes": PROCESSES, "cells": len(CELLS)},
        **environment(),
        "figures": summarise(legs, plan),
        "legs": legs,
    }
    write(results, output)
    print_summary(results)


if __name__ == "__main__":
    main()
