"""Time first runs: each query in a new process, whose planning store is empty.

The cluster stays. A process imports its libraries and connects before the time begins; then it runs its query
once first and ``plan.warm`` times more. On GPUs the next processes import while one runs, since there are
many cores, and a library takes seconds to import.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask
from distributed import Client

from ..common.processes import SPAWN, Child
from .contenders import ClusterOptions, Contender, connected, start
from .measure import Plan, Run, run_case

#: How many processes import ahead, by backend.
AHEAD = {"pandas": 0, "cudf": 3}
#: The longest that a process waits for its turn, and may take, in seconds.
PATIENCE_S, LIMIT_S = 300.0, 120.0


class Case(NamedTuple):
    """What a process runs: a query in a style, with a contender."""

    style: str
    number: int
    contender: str


def run_alone(
    case: Case, address: str, backend: str, plan: Plan, round_number: int, store: Path, gate: Any
) -> Iterator[Any]:
    """Connect, yield once, wait for the gate, and yield each run."""
    if backend == "cudf":
        importlib.import_module("dask_cudf")
    else:
        importlib.import_module("dask.dataframe")
    with (
        dask.config.set({"gpurt.takeover": False, "gpurt.planning.store": str(store)}),
        dask.config.set({"dataframe.backend": backend}),
        connected(address, case.contender) as client,
    ):
        yield None
        if not gate.wait(PATIENCE_S):
            raise TimeoutError(f"{case} has waited {PATIENCE_S:.0f} s for its turn")
        contender = Contender(case.contender, client, backend == "cudf")
        for turn in range(plan.warm + 1):
            run = run_case(contender, case.style, case.number, plan, round_number, turn)
            yield run
            if run.error:
                return


def measure_fresh(
    options: ClusterOptions, groups: Sequence[Sequence[str]], plan: Plan, round_number: int
) -> Iterator[Run]:
    """Start a cluster for each group of contenders, and run each query in a new process, in turns."""
    with start(options, groups) as contenders, tempfile.TemporaryDirectory(prefix="gpurt-fresh-") as folder:
        addresses = {each.name: address_of(each.client) for each in contenders}
        cases = [
            Case(style, number, each.name)
            for at, number in enumerate(plan.queries)
            for style in plan.styles
            for each in [*contenders[at % len(contenders) :], *contenders[: at % len(contenders)]]
        ]
        started: list[tuple[Child, Any]] = []
        ended: list[Child] = []
        try:
            for at, case in enumerate(cases):
                while len(started) <= AHEAD[options.backend] and at + len(started) < len(cases):
                    gate, of = SPAWN.Event(), cases[at + len(started)]
                    store = Path(folder) / f"{at + len(started)}" / "results"
                    arguments = (of, addresses[of.contender], options.backend, plan, round_number, store)
                    started.append((Child(run_alone, *arguments, gate), gate))
                child, gate = started.pop(0)
                ended.append(child)
                yield from _runs_of(child, gate, case, plan, round_number)
                if not AHEAD[options.backend]:
                    ended.pop().end()
        finally:
            for child in [*ended, *(child for child, _ in started)]:
                child.end()


def _runs_of(child: Child, gate: Any, case: Case, plan: Plan, round_number: int) -> Iterator[Run]:
    """Let a process run, and yield its runs; a process that fails is a run with an error."""
    turn = 0
    try:
        values = child.values(LIMIT_S)
        next(values)
        gate.set()
        while turn <= plan.warm:
            run = next(values)
            yield run
            if run.error:
                return
            turn += 1
    except Exception as error:  # the next process may work
        yield Run(case.number, case.contender, round_number, turn, error=repr(error), style=case.style)


def address_of(client: Client) -> str:
    """Return the address of a client's scheduler."""
    assert client.scheduler is not None
    return str(client.scheduler.address)
