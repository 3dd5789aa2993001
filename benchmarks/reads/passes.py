"""Read the tables of TPC-H again and again from an object store, with and without what workers keep of it.

``python -m benchmarks.reads.passes DATA --rate 200e6 --json benchmarks/results/NAME.json``

With ``--backend cudf`` each side is a worker on a GPU, or several. With ``--total 200e6`` all connections of
the store have so much together, as a worker opens many of them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import click
import dask
import dask.dataframe as dd
from distributed import Client, LocalCluster

import dask_gpurt
from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from benchmarks.tpch.queries import QUERIES
from benchmarks.tpch.tables import TABLES

WHAT = (
    "passes over tables in an object store: without the cache, with an empty one, and with what that has "
    "kept; beside other programs (benchmarks.reads.passes)"
)


class StoredTables:
    """Read the tables of a bucket."""

    scale = 1.0

    def __init__(self, url: str):
        self._options = {"key": "k", "secret": "s", "endpoint_url": url}

    def __getitem__(self, name: str) -> Any:
        """Return the dask.dataframe of a table."""
        return dd.read_parquet(f"s3://bucket/{name}", storage_options=self._options)


@contextlib.contextmanager
def store(folder: Path, rate: float, latency: float, total: float) -> Iterator[str]:
    """Serve a folder in a process of its own; yield the URL."""
    options = ["--rate", str(rate), "--latency", str(latency), "--total", str(total)]
    command = [sys.executable, "-m", "benchmarks.reads.store", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def copies(tables: StoredTables) -> None:
    """Read all columns of all tables, and do nothing with them."""
    dask.compute(*[tables[name].map_partitions(len, meta=("n", int)).sum() for name in TABLES])


def flags(tables: StoredTables) -> None:
    """Read the columns of query 6, and add them up."""
    QUERIES[6].build(tables).compute()


#: Queries that have failed: dask_cudf cannot run some. They are left out after the first pass.
IMPOSSIBLE: set[int] = set()


def queries(tables: StoredTables) -> None:
    """Run all queries."""
    for number in QUERIES.keys() - IMPOSSIBLE:
        try:
            QUERIES[number].build(tables).compute()
        except Exception as error:
            click.echo(f"query {number} is left out: {error!r}")
            IMPOSSIBLE.add(number)


PASSES: dict[str, Callable[[StoredTables], None]] = {"all columns": copies, "query 6": flags, "22": queries}


def read_bytes(client: Client) -> dict[str, float]:
    """Return the bytes that tasks have read, from the cache and from the store."""

    def counted(dask_worker: Any) -> dict[str, float]:
        total = dask_worker.plugins["gpurt"].metrics.total("reads.bytes.{source}")
        return {source: total.get((source,), 0) for source in ("cache", "store")}

    found = client.run(counted).values()
    return {source: sum(each[source] for each in found) for source in ("cache", "store")}


def forget(client: Client) -> None:
    """Drop what the workers have kept."""

    def drop(dask_worker: Any) -> None:
        tiers = dask_worker.plugins["gpurt"].tiers
        for kept in (tiers.ranges, tiers.columns, tiers.below):
            kept.release(kept.nbytes)

    client.run(drop)


def _local(workers: int, backend: str) -> Any:
    if backend == "pandas":
        return LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0")
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(n_workers=workers, rmm_pool_size=0.12, dashboard_address=":0")


@contextlib.contextmanager
def cluster(cache: str, workers: int, backend: str) -> Iterator[Client]:
    """Run a cluster of workers with a thread each."""
    with _local(workers, backend) as local, Client(local, set_as_default=False) as client:
        with dask.config.set({"gpurt.cache": cache}):
            dask_gpurt.enable(client)
        yield client


def requests(url: str) -> int:
    """Return how many requests the store has had."""
    with urlopen(f"{url}/requests") as answer:
        return int(answer.read())


def timed(client: Client, url: str, what: str) -> dict[str, float]:
    """Return the seconds of a pass, the CPU time of its workers, the requests, and what tasks have read."""

    def now() -> dict[str, float]:
        cpu = sum(client.run(time.process_time).values())
        return {"seconds": time.perf_counter(), "cpu": cpu, "requests": requests(url), **read_bytes(client)}

    before = now()
    with client.as_current():
        PASSES[what](StoredTables(url))
    return {name: round(value - before[name], 3) for name, value in now().items()}


@click.command(help=__doc__)
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--rate", default=200e6, help="Bytes per second for each connection.")
@click.option("--latency", default=0.03, help="Seconds before the first byte of an answer.")
@click.option("--total", default=1e12, help="Bytes per second for all connections.")
@click.option("--workers", default=4)
@click.option("--backend", type=click.Choice(["pandas", "cudf"]), default="pandas")
@click.option("--cache", default="auto", help="The setting of the side that keeps files.")
@click.option("--off/--no-off", default=True, help="Whether to measure without the cache, too.")
@click.option("--rounds", default=5)
@click.option("--what", "chosen", multiple=True, default=tuple(PASSES), type=click.Choice(tuple(PASSES)))
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(data: Path, output: Path | None, chosen: tuple[str, ...], **options: Any) -> None:
    """Measure passes without the cache, with an empty one, and with what that pass has kept, in turns."""
    rows = []
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(store(data, *(options[name] for name in ("rate", "latency", "total"))))
        stack.enter_context(dask.config.set({"dataframe.backend": options["backend"]}))

        def side(cache: str) -> Client:
            return stack.enter_context(cluster(cache, options["workers"], options["backend"]))

        kept = side(options["cache"])
        sides = {**({"off": side("off")} if options["off"] else {}), "first": kept, "second": kept}
        for what in chosen:
            for client in dict.fromkeys(sides.values()):  # imports, and plans
                timed(client, url, what)
            for _ in range(options["rounds"]):
                forget(kept)
                for name, client in sides.items():
                    rows.append({"what": what, "pass": name, **timed(client, url, what)})
                    click.echo(str(rows[-1]))
    about = {"what": WHAT, "date": datetime.now(UTC).isoformat(), **options, **environment()}
    left_out = sorted(IMPOSSIBLE)
    write({**about, "left out": left_out, "passes": rows, "figures": figures(rows)}, output)


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return medians of each kind of pass, the ratio of seconds, and the share of bytes from the cache."""
    found = []
    for what in dict.fromkeys(row["what"] for row in rows):
        of = {
            name: [row for row in rows if (row["what"], row["pass"]) == (what, name)]
            for name in dict.fromkeys(row["pass"] for row in rows)
        }
        seconds = {name: [row["seconds"] for row in each] for name, each in of.items()}
        fetched = [sum(row["store"] for row in of[name]) for name in ("first", "second")]
        medians = {
            f"{figure} {name}": round(median(row[figure] for row in each), 3)
            for name, each in of.items()
            for figure in ("seconds", "cpu", "requests")
        }
        ratios = {
            f"second / {name}": round(median(map(truediv, seconds["second"], each)), 3)
            for name, each in seconds.items()
            if name != "second"
        }
        found.append({"what": what, **medians, **ratios, "share": round(1 - fetched[1] / fetched[0], 4)})
        click.echo(str(found[-1]))
    return found


if __name__ == "__main__":
    main()
