"""Run TPC-H with all contenders in turns, check every result, and break down the time.

    python -m benchmarks.tpch --scale 1 --backend pandas --json results.json --plot results.html
    python -m benchmarks.tpch --scale 100 --backend cudf --protocol ucx --workers 2 --data /dev/shm/tpch

A query is timed from its first expression to the sorted result on the client. Contenders take turns; the
first run of a query on a new cluster is reported separately from the warm ones. On the host all clusters run
at the same time, and idle ones cost nothing; on GPUs they run one after the other, and ``--rounds`` repeats
them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.common.environment import environment
from dask_gpurt.cli.cluster import choose_backend, default_workers
from dask_gpurt.cli.doctor import installed_versions

from ..common.commandline import split_list, write
from ..common.processes import Child
from .contenders import CONTENDERS, CUDF_POLARS, GPURT, P2P, TASKS, ClusterOptions, clusters_of
from .cudf_polars import is_installed, run_polars
from .figures import by_style, print_summary, ratios, rounded, summarise
from .fresh import measure_fresh
from .measure import Plan, Run, measure_clusters
from .options import style_option
from .plot import write_plot
from .reference import expected, numbers_of
from .tables import default_parts, prepare

console = Console(stderr=True)


def _numbers(_: Any, __: Any, text: str) -> list[int]:
    try:
        return numbers_of(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def run_rounds(parameters: dict[str, Any], plan: Plan) -> Iterator[Run]:
    """Start the clusters in each round, and run all queries on them.

    On GPUs each cluster has a process of its own: a client that has received data over UCX keeps the GPU
    memory of workers allocated after they have ended.
    """
    names = parameters["contenders"]
    names_of_options = ("backend", "workers", "threads", "protocol", "rmm_pool_size")
    options = ClusterOptions(**{name: parameters[name] for name in names_of_options})
    groups = clusters_of(names)
    for number in range(parameters["rounds"]):
        if parameters["fresh"]:
            turn = number % max(1, len(groups))
            yield from measure_fresh(options, [*groups[turn:], *groups[:turn]], plan, number)
        elif options.backend == "pandas":
            yield from measure_clusters(options, groups, plan, number, trace=False)
        else:
            turn = number % max(1, len(groups))
            for group in [*groups[turn:], *groups[:turn]]:
                child = Child(measure_clusters, options, [group], plan, number, parameters["trace"])
                try:
                    with suppress(EOFError):
                        while True:
                            yield child.receive()
                finally:
                    child.end()
        if CUDF_POLARS in names:
            yield from run_polars(plan, workers=options.workers, round_number=number)


def _tell(run: Run) -> None:
    outcome, style = (run.error, "red") if run.error else (f"{run.seconds:.3f} s", "dim")
    console.print(
        f"Q{run.query}, {run.style}, {run.contender}, run {run.turn}: {outcome}", style=style, markup=False
    )


def results_of(parameters: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """Return the results to write."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": parameters,
        **environment(),
        "others": installed_versions(("duckdb", "polars", "cudf-polars", "tpchgen-cli")),
        "figures": rounded(summarise(runs)),
        "styles": rounded(by_style(runs)),
        "ratios": rounded(ratios(runs, parameters["contenders"][0])),
    }


@click.command(help=__doc__.partition("\n")[0])
@click.option("--scale", type=float, default=1.0, show_default=True, help="Scale factor: GB as text.")
@click.option("--parts", type=click.IntRange(min=1), help="Files of a large table. [default: 8 for scale 1]")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the tables; made if missing.")
@click.option("--queries", default="all", show_default=True, callback=_numbers, help="Such as 1,3,7-9.")
@click.option(
    "--contenders",
    default=f"{GPURT},{TASKS},{P2P}",
    show_default=True,
    callback=split_list(CONTENDERS),
    help="The first is the baseline.",
)
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="[default: 2, or one per GPU]")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of a worker.")
@style_option
@click.option("--fresh", is_flag=True, help="Run each query in a new process, whose planning store is empty.")
@click.option("--repeat", type=click.IntRange(min=0), default=3, show_default=True, help="Warm runs.")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--rmm-pool-size", type=float, default=0.6, show_default=True, help="A share of the GPU.")
@click.option("--check/--no-check", default=True, show_default=True, help="Against DuckDB.")
@click.option("--trace/--no-trace", default=True, show_default=True, help="Add an untimed run with CUPTI.")
@click.option("--prepare-only", is_flag=True, help="Only make the tables and DuckDB's results.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="HTML page of budgets; needs bokeh."
)
def main(
    scale: float,
    parts: int | None,
    data: Path | None,
    check: bool,
    prepare_only: bool,
    output: Path | None,
    plot: Path | None,
    **parameters: Any,
) -> None:
    parts = parts or default_parts(scale)
    directory = data or Path(tempfile.gettempdir()) / "tpch" / f"scale-{scale:g}-{parts}"
    tables = prepare(directory, scale, parts)
    if prepare_only:
        if check:
            expected(tables, parameters["queries"])
        return
    backend = parameters["backend"] = choose_backend(parameters["backend"])
    if plot is not None and find_spec("bokeh") is None:
        raise click.UsageError("--plot needs bokeh: pip install bokeh")
    if CUDF_POLARS in parameters["contenders"] and not (backend == "cudf" and is_installed()):
        raise click.UsageError(f"{CUDF_POLARS} needs --backend cudf and pip install cudf-polars-cu13")
    parameters["workers"] = parameters["workers"] or default_workers(backend)
    parameters |= {"scale": tables.scale, "parts": tables.parts, "checked": check}
    wanted = expected(tables, parameters["queries"]) if check else {}
    plan = Plan(tables, parameters["queries"], wanted, parameters["repeat"], parameters["styles"])
    runs: list[Run] = []
    for run in run_rounds(parameters, plan):
        _tell(run)
        if runs and run.query != runs[-1].query:
            write(results_of(parameters, runs), output)  # keeps results if the program is interrupted
        runs.append(run)
    results = results_of(parameters, runs)
    write(results, output)
    print_summary(results)
    if plot is not None:
        write_plot(results, plot)
    if any(run.error for run in runs):
        raise click.ClickException("some queries failed or had wrong results")


if __name__ == "__main__":
    main()
