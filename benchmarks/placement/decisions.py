"""Measure the scheduler's cost per decision, Dask's and ours, on its real state without workers.

    python -m benchmarks.placement.decisions --workers 64,256,1024,2048 --tasks 40000 --json placement.json

Each worker count runs the same graphs with Dask's choices, and with slow links between hosts with which Dask
reckons: ``pairs`` has root tasks, and tasks
with two of their results as inputs; ``tree`` sums results eight at a time; ``random_dag`` has ten layers of
tasks with one to four inputs anywhere in the two layers before. It prints the scheduler's CPU time per task
in microseconds, from the arrival of the graph to the end of the task; the part after the graph has been
received and ordered; and the part spent choosing workers.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask
from dask._task_spec import Task, TaskRef
from dask.typing import Key
from distributed.scheduler import Scheduler

from benchmarks.common.commandline import write
from benchmarks.simulate.clock import Clock
from benchmarks.simulate.scheduler import VirtualScheduler
from dask_gpurt.cli.environment import environment
from dask_gpurt.observe import Metrics
from dask_gpurt.placement.links import SlowLinks
from dask_gpurt.topology import Place, Topology

PER_HOST = 8
NBYTES = 64 << 20
#: Layers of ``random_dag``.
LAYERS = 10
#: Dask and ours; and the timed parts: everything, all after the graph's arrival, and the choices alone.
SIDES = ("stock", "ours")
PARTS = ("", "state_", "choice_")
LINE = (
    "{graph:11}{workers:8}{stock_us:9.1f}{ours_us:9.1f}{stock_state_us:15.1f}{ours_state_us:8.1f}"
    "{stock_choice_us:17.1f}{ours_choice_us:8.1f}"
)


class BareState(VirtualScheduler):
    """Dask's scheduler with simulated workers; it keeps the messages to them."""

    def __init__(self, workers: int, threads: int = 1):
        with dask.config.set({"distributed.scheduler.work-stealing": False}):
            super().__init__(Clock(), 0.0, _no_listener)
        self.sent: deque[tuple[str, Any]] = deque()
        for number in range(workers):
            host, device = divmod(number, PER_HOST)
            address = f"tcp://10.{host // 250}.{host % 250}.1:{device + 1}"
            self.join(address, threads, 80 << 30, partial(self._keep, address))

    def _keep(self, address: str, *messages: dict[str, Any]) -> None:
        self.sent.extend((address, m["key"]) for m in messages if m["op"] == "compute-task")

    def run(self) -> list[tuple[Any, str]]:
        """Finish the sent tasks in order; return the worker of each task."""
        done = []
        while self.sent:
            address, key = self.sent.popleft()
            self.finish(key, address)
            done.append((key, address))
        return done

    def finish(self, key: Any, address: str, nbytes: int = NBYTES) -> None:
        """Complete the fetches and the run of a task on a worker."""
        ts, ws = self.tasks[key], self.workers[address]
        for dts in ts.dependencies:
            self.add_replica(dts, ws)
        self.handle_task_finished(
            key=key,
            worker=address,
            stimulus_id="finish",
            run_id=ts.run_id,
            metadata={},
            nbytes=nbytes,
            type=b"",
            typename="int",
            startstops=[{"action": "compute", "start": 0.0, "stop": 0.1}],
        )


def _no_listener(*messages: Any) -> None:
    """Drop reports to the client."""


def graph_of(inputs: Mapping[Key, Sequence[Key]]) -> tuple[dict[Key, Task], set[Key]]:
    """Build tasks from their inputs; also return the keys without dependents, which a client wants."""
    graph = {key: Task(key, tuple, *map(TaskRef, names)) for key, names in inputs.items()}
    return graph, set(graph) - {name for names in inputs.values() for name in names}


def pairs(tasks: int) -> dict[Key, list[Key]]:
    half = tasks // 2
    load: dict[Key, list[Key]] = {("load", i): [] for i in range(half)}
    return load | {("add", i): [("load", i), ("load", (i + 1) % half)] for i in range(half)}


def tree(tasks: int) -> dict[Key, list[Key]]:
    level, width = 0, tasks * 7 // 8
    found: dict[Key, list[Key]] = {("sum0", i): [] for i in range(width)}
    while width > 1:
        level, before, width = level + 1, width, -(-width // 8)
        for i in range(width):
            inputs = range(8 * i, min(8 * i + 8, before))
            found[f"sum{level}", i] = [(f"sum{level - 1}", j) for j in inputs]
    return found


def random_dag(tasks: int) -> dict[Key, list[Key]]:
    rng, width = random.Random(0), -(-tasks // LAYERS)
    layers: list[list[Key]] = []
    found: dict[Key, list[Key]] = {}
    for level in range(LAYERS):
        before = [key for layer in layers[-2:] for key in layer]
        layers.append([(f"layer{level}", i) for i in range(width)])
        for key in layers[-1]:
            found[key] = rng.sample(before, rng.randint(1, 4)) if before else []
    return found


#: The graphs by the name of their function.
GRAPHS = (pairs, tree, random_dag)


def topology_of(state: Scheduler) -> Topology:
    topology = Topology()
    for address in state.workers:
        host, _, device = address.rpartition(":")
        topology.add(address, Place(host, f"{host}/{device}"))
    return topology


class Timed:
    """Measure the time in a scheduler's choices."""

    def __init__(self, state: Any):
        self.seconds = 0.0
        for name in (
            "decide_worker_non_rootish",
            "decide_worker_rootish_queuing_enabled",
        ):
            setattr(state, name, self._timed(getattr(state, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            found = call(*args, **kwargs)
            self.seconds += time.process_time() - began
            return found

        return timed


class Stopwatch:
    """Measure the time after the graph was received: tasks are created and ordered, and none is placed."""

    def __init__(self, state: Any):
        self._state, self._transitions = state, state.transitions
        state.transitions = self._first

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        self._state.transitions = self._transitions
        self._began = time.process_time()
        return self._transitions(*args, **kwargs)

    @property
    def seconds(self) -> float:
        return time.process_time() - self._began


def measure(graph: Callable[[int], Any], workers: int, tasks: int, ours: bool, part: str) -> float:
    """Return the microseconds per task of one of :data:`PARTS`."""
    state = BareState(workers)
    if ours:
        links = SlowLinks(state, topology_of(state), Metrics())
        links.on_places_changed()
        assert links.is_on
    watch = {"": None, "state_": Stopwatch, "choice_": Timed}[part]
    watched = watch(state) if watch else None
    submitted = graph_of(graph(tasks))
    began = time.process_time()
    state.submit(*submitted)
    done = state.run()
    seconds = watched.seconds if watched else time.process_time() - began
    assert len(done) == len(state.tasks), f"{len(done)} of {len(state.tasks)} tasks ran"
    return 1e6 * seconds / len(done)


def compared(graph: Callable[[int], Any], workers: int, tasks: int, repeat: int) -> dict[str, Any]:
    """Return the figures of one graph on ``workers`` workers; Dask and ours take turns."""
    found: dict[str, list[float]] = {f"{side}_{part}us": [] for part in PARTS for side in SIDES}
    for _, part, side in product(range(repeat), PARTS, SIDES):
        found[f"{side}_{part}us"].append(measure(graph, workers, tasks, side == "ours", part))
    return {"graph": graph.__name__, "workers": workers, **{name: median(us) for name, us in found.items()}}


@click.command(help=__doc__.partition("\n")[0])
@click.option("--workers", default="64,256,1024,2048", show_default=True, help="Numbers of workers.")
@click.option("--tasks", type=click.IntRange(min=100), default=40_000, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(workers: str, tasks: int, repeat: int, output: Path | None) -> None:
    logging.getLogger("distributed.scheduler").setLevel(logging.WARNING)
    rows = []
    click.echo(
        "graph       workers    stock     ours    stock, state    ours  chosen by stock   by us   (µs a task)"
    )
    for graph, number in product(GRAPHS, map(int, workers.split(","))):
        rows.append(row := compared(graph, number, tasks, repeat))
        click.echo(LINE.format(**row))
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {"tasks": tasks, "repeat": repeat},
        "load": os.getloadavg()[0],
        **environment(),
        "rows": rows,
    }
    write(results, output)


if __name__ == "__main__":
    main()
