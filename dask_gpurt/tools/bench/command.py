"""Run ``dask gpurt bench``: a few queries with and without the runtime, and their time budgets."""

from __future__ import annotations

import importlib.util
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click
from distributed import Client

import dask_gpurt
from dask_gpurt.cli.cluster import (
    choose_backend,
    connected,
    default_workers,
    local_cluster,
    progress,
    rmm_pool_option,
)
from dask_gpurt.cli.environment import environment
from dask_gpurt.tools.bench import measure
from dask_gpurt.tools.bench.measure import METHODS
from dask_gpurt.tools.bench.results import Run


@click.command(short_help="Compare the runtime with your shuffle on your cluster.")
@click.option(
    "--scheduler", metavar="ADDRESS", help="Your own idle cluster. [default: a local one on this machine]"
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Workers of a local cluster. [default: 2, or one per GPU]"
)
@click.option("--protocol", help="Protocol of a local cluster, such as tcp or ucx.")
@rmm_pool_option
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option(
    "--scale",
    type=click.FloatRange(min=0, min_open=True),
    default=0.1,
    show_default=True,
    help="Size of the tables: at 1, orders have 6 million items.",
)
@click.option(
    "--partitions", type=click.IntRange(min=1), help="Partitions of large tables. [default: 2 per thread]"
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--against",
    type=click.Choice(METHODS),
    help="Method to compare with. [default: the configured one]",
)
@click.option(
    "--data",
    metavar="FOLDER",
    help="Folder that all workers can write and read, for tables in gpurt-bench. [default: a temporary one "
    "for a local cluster; on another cluster each query makes the tables]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def bench(
    scheduler: str | None,
    workers: int | None,
    protocol: str | None,
    rmm_pool_size: str,
    backend: str,
    data: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure what the runtime gains on a cluster, and where the time goes.

    The command runs four queries over generated tables, alternating between the runtime and your current
    shuffle, and compares all results. On your own cluster it switches the runtime on and off, and restores
    the original state at the end.
    """
    if scheduler is not None and (workers or protocol):
        raise click.UsageError("--workers and --protocol apply to a local cluster, not to one of --scheduler")
    with ExitStack() as stack:
        if scheduler is not None:
            client = stack.enter_context(connected(scheduler))
            backend = _backend_of(client) if backend == "auto" else choose_backend(backend)
        else:
            backend = choose_backend(backend)
            client = stack.enter_context(_here(backend, workers, protocol, rmm_pool_size))
            data = data or stack.enter_context(tempfile.TemporaryDirectory(prefix="gpurt-bench-"))
        try:
            with _progress(quiet=as_json) as on_run:
                result = measure(client, backend=backend, folder=data, on_run=on_run, **options)
        except ImportError as error:
            raise click.ClickException(
                f"{error}: dask-gpurt {dask_gpurt.__version__} has to be installed on the scheduler and all "
                "workers too"
            ) from error
        except (RuntimeError, ValueError, OSError) as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(result.to_dict() | environment()))
    else:
        click.echo(result)


@contextmanager
def _here(backend: str, workers: int | None, protocol: str | None, rmm_pool_size: str) -> Iterator[Client]:
    """Start a cluster on this machine; yield a client that is not the default client."""
    count = workers or default_workers(backend)
    with (
        local_cluster(backend, count, protocol, rmm_pool_size) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(count)
        yield client


def _backend_of(client: Client) -> str:
    """Return the backend for a cluster: cudf if each worker has a GPU and this process can use cudf too."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    has_gpus = bool(workers) and all(worker.get("gpu") for worker in workers)
    return "cudf" if has_gpus and importlib.util.find_spec("dask_cudf") is not None else "pandas"


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[Run, int], None]]:
    """Show progress; yield the callback to call after each run."""
    numbers = itertools.count(1)
    with progress(width=28, quiet=quiet) as show:
        show("starting", 0, None)
        yield lambda run, total: show(f"{run.query}, {run.contender}", next(numbers), total)
