"""Run ``dask gpurt calibrate``: choose residency caps by measurement, and print them."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import dask
import dask.dataframe as dd
from dask.dataframe.dispatch import make_meta
from dask.utils import parse_bytes
from distributed import Client, wait
from rich.console import Console
from rich.table import Table

import dask_gpurt
from dask_gpurt.cli.cluster import choose_backend, local_cluster
from dask_gpurt.cli.doctor import installed_versions
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.device.discover import gpu_count
from dask_gpurt.overlap import Caps
from dask_gpurt.overlap.table import Measurement, OverlapTable, chosen, kernel_caps, write

Frame = Any

#: The caps that are compared, in blocks on an SM: the usual number is 16, of 2048 threads in blocks of 128.
CAPS = (8, 6, 4)
#: How often each workload is measured under each cap at least.
MIN_ROUNDS = 6
#: Bytes of a row (a key and a value), and the mean number of rows per key.
ROW_BYTES, ROWS_PER_KEY = 16, 16
#: Partitions per worker.
PARTITIONS_PER_WORKER = 16
#: Libraries that launch kernels.
KERNEL_LIBRARIES = ("cudf", "cupy")
#: What is computed beside shuffles.
WORKLOADS: dict[str, Callable[[Frame, Frame], Frame]] = {
    "groupby": lambda frame, small: frame.groupby("key").agg({"value": "sum"}),
    "join": lambda frame, small: frame.merge(small, on="key"),
    "sort": lambda frame, small: frame.map_partitions(sort_values, meta=make_meta(frame)),
    "text": lambda frame, small: frame.map_partitions(split_text, meta=("value", "int64")),
    "elementwise": lambda frame, small: (frame["value"] * 3 + frame["key"]) % 1000,
}


@click.command(short_help="Measure which residency caps pay beside a shuffle.")
@click.option("--seconds", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Duration.")
@click.option("--size", default="4GiB", show_default=True, help="Size of the data on each GPU.")
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(seconds: float, size: str, protocol: str | None, as_json: bool) -> None:
    """Choose residency caps for kernels beside a shuffle, on all GPUs of this host.

    Groupbys, joins, sorts, string operations and arithmetic run beside shuffles, under several caps and
    without. Workers whose "gpurt.overlap.mode" is "calibrated" read the table that this writes.
    """
    workers = gpu_count()
    if not workers:
        raise click.ClickException("there is no GPU on this host, so there is nothing to calibrate")
    backend = choose_backend("cudf")
    with cluster_of(backend, workers, protocol) as client:
        table = measure(client, backend, int(parse_bytes(size)) * workers, seconds)
    try:
        path = write(table)
    except OSError as error:
        raise click.ClickException(f"the table cannot be written: {error}") from error
    if as_json:
        click.echo(json.dumps({"path": str(path), **asdict(table)}, indent=2))
    else:
        print_table(path, table)


def print_table(path: Path, table: OverlapTable) -> None:
    """Print the measurements of a table, with the chosen caps in bold, and the number of its kernels."""
    console = Console(highlight=False)
    libraries = "".join(f", {name} {version}" for name, version in table.versions.items())
    console.print(f"{table.device}{libraries}: {path}", style="bold", markup=False)
    shown = Table("beside a shuffle", "cap", "time", "rounds", box=None)
    best = table.chosen()
    for one in table.measured:
        ratio = f"{one.ratio:.3f} ± {one.error:.3f}"
        used = best.get(one.workload) == one.cap
        shown.add_row(one.workload, str(one.cap), ratio, str(one.rounds), style="bold" if used else "")
    console.print(shown)
    console.print(
        "time as a share of that without a cap, with its standard error; "
        f"{len(table.kernels)} kernels are capped: those that only workloads in bold launch"
    )


@contextmanager
def cluster_of(backend: str, workers: int, protocol: str | None) -> Iterator[Client]:
    """Start a cluster on this host whose workers have the interposer."""
    settings = {
        "gpurt.enabled": True,
        "gpurt.overlap.mode": max(CAPS),
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


def device_of(client: Client) -> str:
    """Return the model of the workers' devices.

    Raises click.ClickException if a worker cannot cap kernels, with its reason, or the models differ.
    """
    for worker, reply in dask_gpurt.report(client).workers.items():
        if reason := reply.error or reply.overlap["reason"]:
            raise click.ClickException(f"kernels cannot be capped on worker {worker}: {reason}")
    models: list[str] = sorted(set(client.run(_model).values()))
    if len(models) > 1:
        raise click.ClickException(
            f"this host has {' and '.join(models)}: calibrate one model at a time, with CUDA_VISIBLE_DEVICES"
        )
    return models[0]


def measure(client: Client, backend: str, size: int, seconds: float) -> OverlapTable:
    """Measure all workloads beside shuffles, each under each cap and without, and choose the caps of kernels.

    ``size``: total bytes of the data on all workers.
    ``seconds``: duration; each is measured `MIN_ROUNDS` times at least.
    """
    device = device_of(client)
    frame, small = tables(backend, size, PARTITIONS_PER_WORKER * len(client.nthreads()))
    launched = {name: launched_by(client, query(frame, small)) for name, query in WORKLOADS.items()}
    shuffle = launched_by(client, frame.shuffle("key"))
    times: dict[str, dict[int | None, list[float]]] = {
        name: {cap: [] for cap in (None, *CAPS)} for name in WORKLOADS
    }
    ends, rounds = time.monotonic() + seconds, 0
    while rounds < MIN_ROUNDS or time.monotonic() < ends:
        for name, query in WORKLOADS.items():
            with Console(stderr=True).status(f"{name}, {max(0.0, ends - time.monotonic()):.0f} s left"):
                for cap in _rotated(rounds):
                    client.run(_cap, cap)
                    # Submitted as separate graphs, so that Dask interleaves their tasks.
                    times[name][cap].append(_seconds(frame.shuffle("key"), query(frame, small)))
        rounds += 1
    measured = [
        Measurement.of(name, cap, under[cap], under[None]) for name, under in times.items() for cap in CAPS
    ]
    kernels = kernel_caps(chosen(measured), launched, shuffle)
    return OverlapTable(device, installed_versions(KERNEL_LIBRARIES), tuple(measured), kernels)


def _rotated(turn: int) -> list[int | None]:
    """Return the caps, and None for no cap, in an order that differs from round to round."""
    caps = [None, *CAPS]
    first = turn % len(caps)
    return [*caps[first:], *caps[:first]]


def _seconds(*collections: Frame) -> float:
    began = time.perf_counter()
    wait([collection.persist() for collection in collections])
    return time.perf_counter() - began


def launched_by(client: Client, collection: Frame) -> dict[int, str]:
    """Return the names of the kernels that a collection launches, by id."""
    before = _launches(client)
    client.run(_watch, True)
    wait(collection.persist())
    client.run(_watch, False)
    return {id: name for (id, name), count in _launches(client).items() if count > before.get((id, name), 0)}


def _launches(client: Client) -> dict[tuple[int, str], int]:
    counts: dict[tuple[int, str], int] = {}
    for kernels in client.run(_kernels).values():
        for id, name, launches in kernels:
            counts[id, name] = counts.get((id, name), 0) + launches
    if counts and not any(name for _, name in counts):
        raise click.ClickException("the driver does not report the names of kernels: CUDA 12.3 or newer does")
    return {kernel: launches for kernel, launches in counts.items() if kernel[1]}


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
    """Sort a partition."""
    return part.sort_values("key")


def split_text(part: Frame) -> Frame:
    """Convert numbers to text, split at a digit, and return the length of the first part."""
    return part["value"].astype("str").str.split("7", expand=True)[0].str.len().astype("int64")


def _modules(backend: str) -> tuple[Any, Any]:
    arrays = {"pandas": "numpy", "cudf": "cupy"}[backend]
    return importlib.import_module(backend), importlib.import_module(arrays)


# ---- on the workers --------------------------------------------------------------------


def _overlap(worker: WorkerServer) -> Any:
    runtime: Any = worker.plugins["gpurt"]
    return runtime.overlap


def _model(dask_worker: WorkerServer) -> str:
    model: str = _overlap(dask_worker).model()
    return model


async def _cap(cap: int | None, dask_worker: WorkerServer) -> None:
    _overlap(dask_worker).use(Caps(cap))


async def _watch(on: bool, dask_worker: WorkerServer) -> None:
    """Have the interposer list all launches, without a cap, or only those beside runs."""
    _overlap(dask_worker).use(Caps(), always=on)


def _kernels(dask_worker: WorkerServer) -> list[tuple[int, str, int]]:
    kernels = _overlap(dask_worker).residency.kernels()
    return [(kernel.id, kernel.name, kernel.launches) for kernel in kernels]
