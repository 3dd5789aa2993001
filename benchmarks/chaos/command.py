"""Run random operations and random faults; check every result against pandas."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import click
import dask
from distributed import Client
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.chaos import FAULTS, OPERATIONS, Chaos, Plan, Report, Step
from benchmarks.chaos.cluster import PATIENCE_S, start_cluster
from benchmarks.chaos.faults import CHECKS_THE_CHECKER, Site
from benchmarks.chaos.report import NEVER, Ending
from dask_gpurt.cli import INTERRUPTED
from dask_gpurt.cli.cluster import choose_backend, connected
from dask_gpurt.device.discover import gpu_count

#: Default number of processes on the host: one more than a pair.
WORKERS = 3
#: Characters of an error in the table.
MAX_ERROR_CHARACTERS = 600


@contextmanager
def running_cluster(address: str, workers: int) -> Iterator[tuple[Client, None, None]]:
    """Connect to a running cluster, once it has so many workers: a run checks that all of them come back."""
    with connected(address) as client:
        try:
            client.wait_for_workers(workers, timeout=PATIENCE_S)
        except TimeoutError as error:
            raise click.ClickException(
                f"{address} has {len(client.nthreads())} workers after {PATIENCE_S} s instead of {workers}: "
                "start more, or set --workers"
            ) from error
        yield client, None, None


@click.command(short_help="Break a cluster while it computes; check results.")
@click.option("--seconds", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Duration.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random choices.")
@click.option("--steps", type=click.IntRange(min=1), help="Maximum number of steps.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Worker processes, or those to wait for. [default: 3, one per GPU, or one of --scheduler]",
)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of a worker.")
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="pandas", show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option(
    "--scheduler", metavar="ADDRESS", help="Test this cluster instead of a local one. Its workers are killed."
)
@click.option("--only", default="*", show_default=True, help="Operations: patterns, separated by commas.")
@click.option(
    "--faults", default="*", show_default=True, help="Faults: patterns, separated by commas; '' for none."
)
@click.option(
    "--rows", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Rows of a frame."
)
@click.option(
    "--tight/--roomy", default=None, help="Give the runtime little memory, or its defaults. [default: random]"
)
@click.option(
    "--comms/--any-path",
    default=None,
    help="Use Dask's comms as the only path, or any path. [default: random]",
)
@click.option(
    "--limit",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Seconds after which an operation counts as hanging.",
)
@click.option(
    "--dumps",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    show_default=True,
    help="Folder for the description of a hang.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the report here."
)
@click.option(
    "--plan", "plan_only", is_flag=True, help="Print the steps without running them; --steps is their number."
)
def chaos(
    seconds: float,
    seed: int,
    steps: int | None,
    workers: int | None,
    threads: int,
    backend: str,
    protocol: str | None,
    scheduler: str | None,
    only: str,
    faults: str,
    rows: int,
    tight: bool | None,
    comms: bool | None,
    limit: float,
    dumps: Path,
    json_file: Path | None,
    plan_only: bool,
) -> None:
    """Break a cluster while it computes, and check every result against pandas.

    Shuffles, joins, sorts and groupbys of random frames, and queries of files that are replaced, run while
    workers are killed, replaced and stopped, messages are late, repeated or lost, and memory, disk and
    /dev/shm are full. The exit code is 1 if a result is wrong, an operation hangs, or a resource is left
    behind.
    """
    backend = choose_backend(backend)
    possible = chosen_faults(faults, scheduler, on_gpus=backend == "cudf")
    operations = [name for name, one in OPERATIONS.items() if not (scheduler and one.own_cluster)]
    plan = Plan(seed, chosen("--only", only, operations), possible, rows, tight, comms)
    if plan_only:
        click.echo(plan.setup)
        for number in range(steps or 1):
            click.echo(plan.step(number))
        return
    count = workers or (gpu_count() if backend == "cudf" else WORKERS)
    dumps.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    # Keep columns of strings distinct from columns of objects.
    with (
        dask.config.set({"dataframe.convert-string": False}),
        running_cluster(scheduler, workers or 1)
        if scheduler
        else start_cluster(backend, count, protocol, threads) as place,
        console.status("starting") as status,
    ):
        client, cluster, directory = place
        site = Site(client, cluster, count if cluster else len(client.nthreads()))

        def on_step(report: Report, step: Step) -> None:
            status.update(
                f"seed {seed}, step {step.number}, {len(report.outcomes)} operations, {len(report.bad())} bad"
            )

        run = Chaos(
            plan, site, backend=backend, limit_s=limit, dumps=dumps, directory=directory, on_step=on_step
        )
        try:
            report = run.run(seconds, steps)
        except KeyboardInterrupt:
            status.stop()
            print_report(run.report, Console())
            raise SystemExit(INTERRUPTED) from None
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=2))
    print_report(report, Console())
    raise SystemExit(0 if report.is_well else 1)


def chosen(option: str, patterns: str, known: Collection[str]) -> list[str]:
    """Return the known names that match a pattern, in their order.

    Raises click.UsageError if a pattern matches no name.
    """
    wanted = [pattern for pattern in patterns.split(",") if pattern]
    for pattern in wanted:
        if not any(fnmatch(name, pattern) for name in known):
            raise click.UsageError(f"{option} {pattern!r} matches none of {', '.join(known)}")
    return [name for name in known if any(fnmatch(name, pattern) for pattern in wanted)]


def chosen_faults(patterns: str, scheduler: str | None, *, on_gpus: bool) -> list[str]:
    """Return the possible faults that match. The fault that tests the checker must be named in full.

    ``scale-up`` is impossible on GPUs: there cannot be more workers than GPUs.
    """
    found = chosen("--faults", patterns, FAULTS)
    return [
        name
        for name in found
        if not (scheduler and FAULTS[name].own_cluster)
        and not (on_gpus and name == "scale-up")
        and (name != CHECKS_THE_CHECKER or name in patterns.split(","))
    ]


def print_report(report: Report, console: Console) -> None:
    """Print operations by kind, faults by kind, and all violations."""
    operations = Table("operation", *(str(ending) for ending in Ending), box=SIMPLE_HEAD)
    for kind in report.kinds():
        operations.add_row(kind, *(_count(ending, report.count(ending, kind)) for ending in Ending))
    operations.add_row("all", *(_count(ending, report.count(ending)) for ending in Ending), style="bold")
    faults = Table("fault", "injected", "hits", box=SIMPLE_HEAD)
    for kind in sorted(report.faults):
        faults.add_row(kind, str(report.faults[kind]), str(report.hits[kind]))
    console.print(operations, faults)
    for one in report.bad():
        where = f"step {one.step}, {one.kind} beside {', '.join(one.faults) or 'no fault'}"
        console.print(f"[red]{one.ending}[/]: {where}", highlight=False)
        console.print(one.detail[:MAX_ERROR_CHARACTERS], markup=False, highlight=False)
    for left in report.left:
        console.print("[red]left[/]:", end=" ")
        console.print(left, markup=False, highlight=False)
    for dump in report.dumps:
        console.print(f"description of the hang: {dump}", highlight=False)
    verdict = "[green]all is well[/]" if report.is_well else "[red]not well[/]"
    size = f"{report.steps} steps in {report.seconds:.0f} s on {report.workers} workers"
    console.print(f"{verdict}: seed {report.seed}, {size}")


def _count(ending: Ending, count: int) -> str:
    return f"[red]{count}[/]" if count and ending in NEVER else str(count)
