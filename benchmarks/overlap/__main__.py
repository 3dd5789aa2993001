"""Measure the gain of overlapping compute and communication, under each setting.

    python -m benchmarks.overlap --parts collectives,workers,pipeline --json results.json --plot results.png

collectives
    Matrix products and elementwise kernels beside NCCL's all-to-all and all-reduce, with PyTorch.
workers
    Groupby, join, sort, string split and matrix products beside running shuffles of the runtime.
pipeline
    Ten shuffles through Dask, each followed by a groupby and a join: under each mode, and each part alone.

Settings take turns, and each round also times compute and communication alone. Every part runs in a process
of its own with a time limit; each cell is written to ``--json`` as soon as it is measured. Without the
interposer, which ``pip install`` builds, nothing is capped.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.commandline import in_bytes, split_list, write
from benchmarks.common.environment import environment
from benchmarks.common.processes import GRACE, Child, say
from benchmarks.overlap.collectives import CELLS, collectives_part
from benchmarks.overlap.figures import Round, figures, plot, print_cells
from benchmarks.overlap.pipeline import modes, pipeline_part
from benchmarks.overlap.plan import MODES, Plan
from benchmarks.overlap.workers import workers_part
from benchmarks.overlap.workloads import NAMES
from dask_gpurt.cli.cluster import choose_backend, default_workers

PARTS = ("collectives", "workers", "pipeline")
#: Default of ``--timeouts``: seconds for each part.
SECONDS = (90.0, 120.0, 120.0)
#: Parameters of a rehearsal on the host, without a GPU.
REHEARSAL = {
    "seconds": 0.05,
    "task": 0.01,
    "size": 2**22,
    "partitions": 4,
    "rows": 20_000,
    "side": 256,
    "collective": 2**20,
}


class Results:
    """Collect the measurements, and write them to a file."""

    def __init__(self, plan: Plan, path: Path | None):
        self.path = path
        self.found: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "parameters": asdict(plan),
            **environment(),
            "errors": [],
            "parts": {},
        }

    def add(self, part: str, kind: str, value: Any) -> None:
        """Add a result of a part, and write everything."""
        known = self.found["parts"].setdefault(part, {})
        if kind == "cell":
            name, measured = value
            rounds = [Round(**one) for one in measured["rounds"]]
            known.setdefault("cells", {})[name] = {**figures(rounds), **measured}
            say(f"{part}: {name} is done")
        elif kind in ("run", "alone"):
            known.setdefault(kind, []).append(value)
            known["figures"] = modes(known.get("run", ()), known.get("alone", ()))
            told = (f"{of:.2f} s {name}" if isinstance(of, float) else str(of) for name, of in value.items())
            say(f"{part}: {', '.join(told)}")
        else:
            known[kind] = value
        self.write()

    def fail(self, part: str, error: str) -> None:
        """Record why a part ended early."""
        self.found["errors"].append({"part": part, "error": error})
        say(f"{part}: {error.strip().splitlines()[-1]}")
        self.write()

    def write(self) -> None:
        """Write all results so far."""
        write(self.found, self.path)

    def cells(self) -> dict[str, dict[str, Any]]:
        """Return the cells of each part that has any."""
        return {part: known["cells"] for part, known in self.found["parts"].items() if "cells" in known}


def measure(part: str, program: Callable[[Path], tuple[Any, ...]], seconds: float, results: Results) -> None:
    """Run a part within its time limit; results that arrive by then count."""
    began = time.monotonic()
    # In memory: on a disk, writing to a mapped page blocks while the page is written back.
    with tempfile.TemporaryDirectory(prefix="gpurt-overlap-", dir="/dev/shm") as folder:
        child = Child(*program(Path(folder)))
        try:
            for kind, value in child.values(seconds):
                results.add(part, kind, value)
        except (RuntimeError, TimeoutError) as error:
            results.fail(part, str(error))
        finally:
            child.end()
    results.add(part, "seconds", time.monotonic() - began)


def print_results(results: Results) -> None:
    """Print a table for each part, and errors."""
    console = Console(highlight=False, markup=False)
    for part, cells in results.cells().items():
        print_cells(part, cells)
    if of_pipeline := results.found["parts"].get("pipeline", {}).get("figures"):
        console.print(_pipeline_table(of_pipeline))
    for failed in results.found["errors"]:
        console.print(f"{failed['part']} ended early: {failed['error'].strip().splitlines()[-1]}")


def _pipeline_table(found: Mapping[str, Any]) -> Table:
    table = Table(title="pipeline", caption="Seconds of a run; f by medians", box=SIMPLE_HEAD)
    for heading in ("mode", "median", "least", "most", "f"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for name, of in {f"{part} alone": found[part] for part in ("compute", "shuffles")}.items():
        table.add_row(name, *(f"{of[which]:.3f}" for which in ("median", "least", "most") if of))
    for mode, of in found["modes"].items():
        hidden = f"{found['f'][mode]:.2f}" if mode in found["f"] else ""
        table.add_row(mode, *(f"{of[which]:.3f}" for which in ("median", "least", "most")), hidden)
    if found["against_off"] is not None:
        table.add_row(f"{found['best']} against off", f"{found['against_off']:.3f}")
    return table


def numbers(kind: type) -> Callable[[Any, Any, str], tuple[Any, ...]]:
    """Return a click callback that parses a comma-separated list of numbers."""

    def split(_: Any, parameter: click.Parameter, text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(word) for word in text.split(",") if word)
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not a list of numbers") from error

    return split


@click.command(help=__doc__.partition("\n")[0])
@click.option("--parts", default=",".join(PARTS), show_default=True, callback=split_list(PARTS))
@click.option("--cells", default=",".join(CELLS), callback=split_list(CELLS), help="Cells of collectives.")
@click.option(
    "--workloads", default=",".join(NAMES), callback=split_list(NAMES), help="Workloads of workers."
)
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="[default: 2, or one per GPU]")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds.")
@click.option("--seconds", default=0.2, show_default=True, help="Compute alone in a leg.")
@click.option("--task", default=0.025, show_default=True, help="Seconds of a task.")
@click.option("--caps", default="8,6,4", show_default=True, callback=numbers(int), help="Residency caps.")
@click.option("--size", default="16GiB", show_default=True, callback=in_bytes, help="Bytes of a shuffle.")
@click.option("--partitions", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--rows", type=click.IntRange(min=16), default=2**26, show_default=True, help="Rows of a frame."
)
@click.option("--side", type=click.IntRange(min=1), default=8192, show_default=True, help="Side of a matrix.")
@click.option(
    "--collective", default="896MiB", show_default=True, callback=in_bytes, help="Bytes on each GPU."
)
@click.option("--modes", default="off,priority", callback=split_list(MODES), help="Modes of pipeline.")
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads per worker."
)
@click.option("--timeline", is_flag=True, help="Record GPU activity in the pipeline with PyTorch's profiler.")
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--rmm-pool-size", type=click.FloatRange(0, 1), default=0.5, show_default=True)
@click.option(
    "--timeouts",
    default=",".join(f"{seconds:g}" for seconds in SECONDS),
    show_default=True,
    callback=numbers(float),
    help="Seconds for collectives, workers and pipeline.",
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help="PNG file to draw.")
@click.option(
    "--draw", type=click.Path(exists=True, path_type=Path), help="Only plot and print these results."
)
def main(
    parts: Sequence[str],
    cells: Sequence[str],
    workloads: Sequence[str],
    timeouts: Sequence[float],
    output: Path | None,
    picture: Path | None,
    draw: Path | None,
    **parameters: Any,
) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # our processes end with us
    plan = make_plan(parameters)
    results = Results(plan, output)
    if draw is not None:
        results.found = json.loads(draw.read_text())
    else:
        programs: dict[str, Callable[[Path], tuple[Any, ...]]] = {
            "collectives": lambda folder: (collectives_part, plan, cells, folder),
            "workers": lambda folder: (workers_part, plan, workloads, folder),
            "pipeline": lambda folder: (pipeline_part, plan),
        }
        limits = dict(zip(PARTS, timeouts, strict=True))
        for part in parts:
            measure(part, programs[part], limits[part] - GRACE, results)
    if picture is not None:
        try:
            plot(results.cells(), picture)
        except ImportError as missing:
            results.fail("plot", str(missing))
    print_results(results)
    sys.exit(bool(results.found["errors"]))


def make_plan(parameters: Mapping[str, Any]) -> Plan:
    """Make the plan from the options; for a rehearsal on the host the defaults are small."""
    backend = choose_backend(parameters["backend"])
    workers = parameters["workers"] or default_workers(backend)
    plan = Plan(**{**parameters, "backend": backend, "workers": workers})
    if backend == "cudf":
        return plan
    context = click.get_current_context()
    left = [
        name for name in REHEARSAL if context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
    ]
    return replace(plan, **{name: REHEARSAL[name] for name in left})


if __name__ == "__main__":
    # Import under the full name, so that other processes can unpickle functions of this module.
    importlib.import_module("benchmarks.overlap.__main__").main()
