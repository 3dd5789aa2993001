"""Run ``dask gpurt calibrate``: learn the best settings for compute beside shuffles on a host's GPUs."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
from dask.dataframe.dispatch import make_meta
from dask.utils import parse_bytes
from distributed import Client, wait
from rich.console import Console

import dask_gpurt
from dask_gpurt.cli.cluster import choose_backend, local_cluster, visible_gpus
from dask_gpurt.cli.overlap import of_files, print_part
from dask_gpurt.config.cache_files import directory
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.observe import Fallback

Frame = Any

#: The fraction of the time that trials may cost: all of it, since this cluster only learns.
TRIAL_BUDGET_SHARE = 1.0
#: Bytes of a row (a key and a value), and the mean number of rows per key.
ROW_BYTES, ROWS_PER_KEY = 16, 16
#: Partitions per worker.
PARTITIONS_PER_WORKER = 16
#: Computations beside shuffles; their tasks have the same prefixes as in user programs.
QUERIES: dict[str, Callable[[Frame, Frame], Frame]] = {
    "groupby": lambda frame, small: frame.groupby("key").agg({"value": "sum"}),
    "join": lambda frame, small: frame.merge(small, on="key"),
    "sort": lambda frame, small: frame.map_partitions(sort_values, meta=make_meta(frame)),
    "text": lambda frame, small: frame.map_partitions(split_text, meta=("value", "int64")),
    "elementwise": lambda frame, small: (frame["value"] * 3 + frame["key"]) % 1000,
}


@click.command(short_help="Measure which settings pay off beside a shuffle.")
@click.option("--seconds", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Duration.")
@click.option("--size", default="4GiB", show_default=True, help="Size of the data on each GPU.")
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option(
    "--learned",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the statistics. [default: the file that workers use]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(seconds: float, size: str, protocol: str | None, learned: Path | None, as_json: bool) -> None:
    """Learn which settings pay for compute beside a shuffle, on all GPUs of this host.

    Groupbys, joins, sorts, string operations and arithmetic run beside shuffles, under every setting that may
    pay. The statistics are added to the file that workers in the mode "adaptive" read.
    """
    workers = visible_gpus()
    if not workers:
        raise click.ClickException("there is no GPU on this host, so there is nothing to calibrate")
    backend = choose_backend("cudf")
    began = time.time()
    with cluster_of(backend, workers, protocol, learned) as client:
        ensure_confined(client)
        steps = learn(client, backend, int(parse_bytes(size)) * workers, seconds)
    files = [learned] if learned else written_since(began)
    found = of_files(files)
    if as_json:
        click.echo(json.dumps({"steps": steps, "files": found}, indent=2))
        return
    for name, part in found.items():
        print_part(name, part)


@contextmanager
def cluster_of(backend: str, workers: int, protocol: str | None, learned: Path | None) -> Iterator[Client]:
    """Start a cluster on this host in the mode ``adaptive``; it writes the statistics on exit."""
    settings = {
        "gpurt.enabled": True,
        "gpurt.overlap.residency": "auto",
        "gpurt.overlap.mode": "adaptive",
        "gpurt.overlap.learned": str(learned) if learned else "auto",
        "dataframe.shuffle.method": "gpurt",
        # Nannies load the interposer through this hook, which pip may not have installed.
        "distributed.nanny.preload": ["dask_gpurt.preload"],
    }
    with (
        dask.config.set(settings),
        local_cluster(backend, workers, protocol) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        try:
            yield client
        finally:
            dask_gpurt.disable(client)


def ensure_confined(client: Client) -> None:
    """Check that all workers can confine compute.

    Raises
    ------
    click.ClickException
        If a worker cannot, with its reason.
    """
    for worker, reply in dask_gpurt.report(client).workers.items():
        if known := reply.fallbacks.get(Fallback.OVERLAP_UNCONFINED.id):
            raise click.ClickException(f"no statistics can be collected on worker {worker}: {known.reason}")


def learn(client: Client, backend: str, size: int, seconds: float) -> int:
    """Run the queries repeatedly, each alone and beside a shuffle; return the number of runs.

    Parameters
    ----------
    size
        Total bytes of the data on all workers.
    seconds
        Duration; each query runs at least once.
    """
    client.run(_allow, TRIAL_BUDGET_SHARE)
    workers = len(client.nthreads())
    frame, small = tables(backend, size, PARTITIONS_PER_WORKER * workers)
    ends = time.monotonic() + seconds
    steps = 0
    while steps < len(QUERIES) or time.monotonic() < ends:
        query = list(QUERIES)[steps % len(QUERIES)]
        with Console(stderr=True).status(
            f"{query} beside a shuffle, {max(0.0, ends - time.monotonic()):.0f} s left"
        ):
            step(frame, small, QUERIES[query])
        steps += 1
    return steps


def step(frame: Frame, small: Frame, query: Callable[[Frame, Frame], Frame]) -> None:
    """Run a shuffle alone, a query alone, and both together."""
    for collections in (
        (frame.shuffle("key"),),
        (query(frame, small),),
        # Submitted as separate graphs, so that Dask interleaves their tasks.
        (frame.shuffle("key"), query(frame, small)),
    ):
        wait([collection.persist() for collection in collections])


def tables(backend: str, size: int, partitions: int) -> tuple[Frame, Frame]:
    """Create a frame of random keys and values on the workers, and a partition with each key once."""
    rows = max(1, size // ROW_BYTES // partitions)
    # Keep the number of keys small enough to join with a single partition.
    keys = max(1, rows // ROWS_PER_KEY)
    meta = random_rows(0, 1, 2, backend).iloc[:0]
    frame = dd.from_map(random_rows, range(partitions), args=[rows, keys, backend], meta=meta)
    small = dd.from_map(each_key, [keys], args=[backend], meta=each_key(1, backend).iloc[:0])
    frame, small = frame.persist(), small.persist()
    wait([frame, small])
    return frame, small


def random_rows(number: int, rows: int, keys: int, backend: str) -> Frame:
    """Create a partition of random keys and values."""
    library, arrays = _modules(backend)
    random = arrays.random.RandomState(number)
    columns = {
        name: random.randint(0, most, rows, dtype="int64") for name, most in (("key", keys), ("value", 2**40))
    }
    return library.DataFrame(columns)


def each_key(keys: int, backend: str) -> Frame:
    """Create the partition with each key once, for the join."""
    library, arrays = _modules(backend)
    return library.DataFrame({"key": arrays.arange(keys, dtype="int64"), "weight": arrays.ones(keys)})


def sort_values(part: Frame) -> Frame:
    """Sort a partition. The name of this function becomes the prefix of its tasks."""
    return part.sort_values("key")


def split_text(part: Frame) -> Frame:
    """Convert numbers to text, split at a digit, and return the length of the first part."""
    return part["value"].astype("str").str.split("7", expand=True)[0].str.len().astype("int64")


def written_since(when: float) -> list[Path]:
    """Return the files in the default directory that workers have written since then."""
    return [path for path in sorted(directory().glob("overlap-*.json")) if path.stat().st_mtime >= when]


def _modules(backend: str) -> tuple[Any, Any]:
    arrays = {"pandas": "numpy", "cudf": "cupy"}[backend]
    return importlib.import_module(backend), importlib.import_module(arrays)


def _allow(share: float, dask_worker: WorkerServer) -> None:
    dask_worker.plugins["gpurt"].overlap.allow(share)
