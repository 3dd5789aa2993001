"""Run ``dask gpurt qualify``: say which computations of stock Dask would gain from the runtime."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import dask
from distributed import Client

from dask_gpurt.cli.cluster import connected, local_cluster
from dask_gpurt.cli.explain import run_script
from dask_gpurt.client.session import is_on_cluster
from dask_gpurt.tools.qualify import recording
from dask_gpurt.tools.qualify.parts import computations
from dask_gpurt.tools.qualify.program import Plans, observed
from dask_gpurt.tools.qualify.recording import Recording
from dask_gpurt.tools.qualify.text import Qualified, lines

#: Why a cluster is not looked at.
IS_ON = "the runtime is on there: `dask gpurt explain` says where the time of a program goes with it"


@click.command(
    short_help="Say which computations of stock Dask would gain.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--workers", type=click.IntRange(1), help="Start a local cluster for SCRIPT, without GPUs.")
@click.argument("what", metavar="SCRIPT|ADDRESS|REPORT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def qualify(workers: int | None, what: str, arguments: tuple[str, ...]) -> None:
    """Say which computations of stock Dask would gain from the runtime, which stays off.

    \b
    dask gpurt qualify script.py ARGUMENTS                    runs it, on a cluster that it makes or --workers
    dask gpurt qualify tcp://HOST:PORT -- python script.py    runs it on a cluster
    dask gpurt qualify tcp://HOST:PORT                        looks at a cluster until ctrl-C
    dask gpurt qualify report.html                            reads a performance report of Dask

    For each computation it says where its time went, estimates that with the runtime, and says what to change
    in the program. Output goes to standard error. Only a script that is run by the first form is also planned
    as the runtime would.
    """
    plans, failed = Plans(), False
    if "://" in what:
        recorded, failed = _at(what, arguments[arguments[:1] == ("--",) :])
        found = [recorded]
    elif not Path(what).is_file():
        raise click.UsageError(f"{what} is neither a file nor an address such as tcp://HOST:PORT")
    elif what.endswith((".html", ".htm")):
        found = [_of_report(Path(what))]
    else:
        plans, found, failed = _script(what, arguments, workers)
    if any(each.has_runtime for each in found):
        raise click.ClickException(IS_ON)
    qualified = [
        Qualified(each, plans.of(each.rows, one.threads), one.threads)
        for one in found
        for each in computations(one)
    ]
    if not qualified:
        raise click.ClickException("no task has run on a cluster: a script without a client needs --workers")
    if plans.why_none:
        click.echo(f"plans were not seen: {plans.why_none}", err=True)
    for line in lines(qualified):
        click.echo(line, err=True)
    sys.exit(1 if failed else 0)


def _of_report(path: Path) -> Recording:
    try:
        return recording.of_report(path)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def _at(address: str, command: Sequence[str]) -> tuple[Recording, bool]:
    """Record a cluster while a command runs, or until ctrl-C; return whether the command has failed, too."""
    failed = False
    with connected(address) as client:
        if client.sync(is_on_cluster, client):
            raise click.ClickException(IS_ON)
        began = client.sync(recording.begin, client)
        try:
            if command:
                told = {"DASK_SCHEDULER_ADDRESS": address, "DASK_GPURT__ENABLED": "false"}
                failed = subprocess.run(command, env={**os.environ, **told}, check=False).returncode != 0
            else:
                click.echo("recording until ctrl-C", err=True)
                signal.pause()
        except KeyboardInterrupt:
            click.echo("ended", err=True)
        except OSError as error:
            raise click.ClickException(f"{command[0]}: {error.strerror}") from error
        found: Recording = client.sync(recording.take, client, began)
        return found, failed


def _script(
    script: str, arguments: Sequence[str], workers: int | None
) -> tuple[Plans, list[Recording], bool]:
    """Run a script in this process; return its plans, what was recorded, and whether it has failed."""
    with observed() as plans, ExitStack() as running:
        if workers is not None:
            cluster = running.enter_context(local_cluster("pandas", workers))
            running.enter_context(dask.config.set({"scheduler-address": cluster.scheduler_address}))
            running.enter_context(Client(cluster))
        failed = run_script(script, arguments) != 0  # what it did until then counts
        return plans, recording.taken(), failed
