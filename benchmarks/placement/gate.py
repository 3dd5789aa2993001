"""Measure the cost of placement for the scheduler while it leaves the choice to Dask.

    python -m benchmarks.placement.gate --workers 64,2048 --json placement-gate.json

The graphs of ``decisions.py`` run on Dask's real scheduler without workers, with Dask's choices alone and
with placement behind its gate, in turns; workers are alike, so it does not engage. It prints the CPU time per
task on both sides, from the arrival of the graph to the end of the task, and that of a look at all workers,
which a graph costs at most twice a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
from distributed import SchedulerPlugin

from benchmarks.common.commandline import write
from benchmarks.placement.decisions import BareState, graph_of, headroom_of, pairs, tree
from dask_gpurt.cli.environment import environment
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import GatedPlacement, Placement
from dask_gpurt.topology import Place, Topology

#: Workers of all checks that are timed.
CALLS = 20_000
SIDES = ("stock", "gated")


class Events(SchedulerPlugin):
    """Forward graphs to a gate as the runtime's scheduler plugin does; a no-op without a gate."""

    def __init__(self, gate: GatedPlacement | None):
        self._gate = gate

    def update_graph(self, scheduler: Any, **_: Any) -> None:
        if self._gate is not None:
            self._gate.on_graph()


def gated(state: BareState) -> GatedPlacement:
    """Return placement behind its gate on a bare scheduler, with all workers on one host."""
    topology, headroom, metrics = Topology(), headroom_of(state), Metrics()
    for number, address in enumerate(state.workers):
        topology.add(address, Place("host", f"gpu{number}"))
    placement = Placement(state, topology, headroom, metrics)
    gate = GatedPlacement(placement, state, topology, metrics)
    gate.bind()
    return gate


def a_task(graph: Callable[[int], Any], workers: int, tasks: int, side: str) -> float:
    """Return the CPU microseconds per task."""
    state = BareState(workers)
    gate = gated(state) if side == "gated" else None
    state.add_plugin(Events(gate), name="events")
    submitted = graph_of(graph(tasks))
    began = time.process_time()
    state.submit(*submitted)
    done = state.run()
    seconds = time.process_time() - began
    if gate is not None and gate.is_open:
        raise RuntimeError("placement engaged although workers are alike")
    return 1e6 * seconds / len(done)


def compared(graph: Callable[[int], Any], workers: int, tasks: int, repeat: int) -> dict[str, Any]:
    """Return the medians of both sides, which take turns, and of the differences of pairs."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(repeat):
        for side in SIDES if turn % 2 else reversed(SIDES):
            found[side].append(a_task(graph, workers, tasks, side))
    differences = sorted(ours - theirs for theirs, ours in zip(found["stock"], found["gated"], strict=True))
    return {
        "graph": graph.__name__,
        "workers": workers,
        **{f"{side}_us": median(us) for side, us in found.items()},
        "difference_us": median(differences),
        "least_us": differences[0],
        "most_us": differences[-1],
    }


def look_us(workers: int) -> float:
    """Return the microseconds of a check of links."""
    return timed(gated(BareState(workers)).bind, max(1, CALLS // workers))


def timed(call: Callable[[], Any], calls: int) -> float:
    """Return the CPU microseconds of a call."""
    began = time.process_time()
    for _ in range(calls):
        call()
    return 1e6 * (time.process_time() - began) / calls


@click.command(help=__doc__.partition("\n")[0])
@click.option("--workers", default="64,2048", show_default=True, help="Numbers of workers.")
@click.option("--tasks", type=click.IntRange(min=100), default=20_000, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(workers: str, tasks: int, repeat: int, output: Path | None) -> None:
    numbers = [int(number) for number in workers.split(",")]
    looks = [{"workers": number, "look_us": look_us(number)} for number in numbers]
    for look in looks:
        click.echo("{workers} workers: a check {look_us:.0f} µs".format(**look))
    rows = []
    for graph, number in product((pairs, tree), numbers):
        rows.append(row := compared(graph, number, tasks, repeat))
        click.echo(
            "{graph} on {workers}: {stock_us:.1f} µs a task, gated {gated_us:.1f}, {difference_us:+.1f} "
            "({least_us:.1f} to {most_us:.1f})".format(**row)
        )
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {"tasks": tasks, "repeat": repeat},
        "load": os.getloadavg()[0],
        **environment(),
        "looks": looks,
        "rows": rows,
    }
    write(results, output)


if __name__ == "__main__":
    main()
