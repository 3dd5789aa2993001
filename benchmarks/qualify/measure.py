"""Run programs on stock Dask, observed by ``qualify``, and with the runtime, in turns of two processes."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
from distributed import Client

import dask_gpurt
from benchmarks.common.counters import difference
from benchmarks.common.processes import SPAWN, Child
from benchmarks.qualify.programs import PROGRAMS
from benchmarks.tpch.measure import cpu_of_processes
from dask_gpurt.cli.cluster import local_cluster
from dask_gpurt.tools.qualify.parts import PARTS, computations
from dask_gpurt.tools.qualify.program import observed
from dask_gpurt.tools.qualify.recording import taken
from dask_gpurt.tools.qualify.text import Qualified

WORKERS, PATIENCE_S = 2, 600.0


@dataclass
class Run:
    """Record a program on stock Dask or with the runtime.

    Attributes
    ----------
    seconds
        The time of the program, without imports.
    cpu
        The CPU seconds of client, scheduler and workers.
    observed, estimated
        On stock Dask: the seconds that ``qualify`` has seen, and both estimates of those with the runtime.
    parts
        Where the seconds went.
    """

    program: str
    runtime: bool
    round: int
    seconds: float = 0.0
    cpu: float = 0.0
    load: float = 0.0
    observed: float = 0.0
    estimated: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""


def run_programs(
    names: Sequence[str], address: str, runtime: bool, turn: int, data: Path, gate: Any
) -> Iterator[Run]:
    """Run programs in this process, each once the gate lets it, and look at them if the runtime is off."""
    importlib.import_module("dask.dataframe")
    for name in names:
        if not gate.acquire(timeout=PATIENCE_S):
            raise TimeoutError(f"{name} has waited {PATIENCE_S:.0f} s for its turn")
        try:
            yield _run(name, address, runtime, turn, data)
        except Exception as error:  # a failure is a result, and the other programs continue
            yield Run(name, runtime, turn, error=repr(error))


def _run(name: str, address: str, runtime: bool, turn: int, data: Path) -> Run:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gpurt-qualify-") as store:
        preload = {"distributed.client.preload": ["dask_gpurt.preload"]}
        with dask.config.set({**preload, "gpurt.planning.store": f"{store}/results"}):
            if runtime:
                with Client(address) as client:
                    dask_gpurt.enable(client)
                    return Run(name, True, turn, *_measured(name, data, client), load)
            with observed() as plans, Client(address) as client:
                seconds, cpu = _measured(name, data, client)
                (recording,) = taken()
    found = [Qualified(each, plans.of(each.rows, WORKERS), WORKERS) for each in computations(recording)]
    parts = {part: sum(each.computation.parts[part] for each in found) for part in PARTS}
    estimated = [sum(each.estimate[at] for each in found) for at in (0, 1)]
    return Run(name, False, turn, seconds, cpu, load, sum(parts.values()), estimated, parts)


def _measured(name: str, data: Path, client: Client) -> tuple[float, float]:
    """Run a program, and return its seconds and those of all processes' CPUs."""
    before = cpu_of_processes(client)
    began = time.perf_counter()
    PROGRAMS[name](data)
    seconds = time.perf_counter() - began
    return seconds, sum(difference(before, cpu_of_processes(client)).values())


def measure(data: Path, rounds: int, names: Sequence[str]) -> Iterator[Run]:
    """Run programs in turns on two clusters, which are new in each round, as are the clients' processes."""
    for turn in range(rounds):
        with local_cluster("pandas", WORKERS) as off, local_cluster("pandas", WORKERS) as on:
            gates = {runtime: SPAWN.Semaphore(0) for runtime in (False, True)}
            children = {
                runtime: Child(
                    run_programs, names, cluster.scheduler_address, runtime, turn, data, gates[runtime]
                )
                for runtime, cluster in ((False, off), (True, on))
            }
            try:
                for at, _ in enumerate(names):
                    for runtime in (False, True) if (turn + at) % 2 else (True, False):
                        gates[runtime].release()
                        yield children[runtime].receive()
            finally:
                for child in children.values():
                    child.end()
