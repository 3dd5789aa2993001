"""Run a session of queries over the same tables of a store, on two hosts whose links have a known speed.

    python -m benchmarks.two_hosts.session TPCH --links 0.1,1 --turns 5 --json two-hosts-session.json

The hosts, and that of the store, are on one switch. Each side is a cluster of its own on the same hosts:

- ``off``: nothing stays, and Dask chooses the workers,
- ``kept``: what was read stays, and Dask chooses,
- ``reads``: reads go where their files stay.

Sides take turns, in an order that alternates. Each begins a session with nothing kept, and runs the queries
once or several times (``--passes``). Bytes and CPU seconds hardly depend on what else runs on the machine.
What a pass would take on a quiet one is estimated of them: the CPU seconds of a worker, and the seconds of
the busiest link.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import dask
import pandas as pd
from distributed import Client

import dask_gpurt
from benchmarks.common.commandline import split_list, write
from benchmarks.common.environment import environment
from benchmarks.reads.passes import StoredTables, forget, read_bytes
from benchmarks.tpch.queries import QUERIES
from benchmarks.two_hosts.hosts import Host
from benchmarks.two_hosts.servers import link_bytes, servers
from benchmarks.two_hosts.star import make_star

SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"gpurt.cache": "off"},
    "kept": {},
    "reads": {},
}
STORE_PORT = 9000
WHAT = (
    "sessions of five queries of TPC-H from a store, on two hosts with a slow link each, by what stays and "
    "where tasks go; beside other programs (benchmarks.two_hosts.session)"
)
#: Queries that share tables, among them those that mostly read, and joins of several tables.
SESSION = (1, 3, 6, 12, 14)


@contextlib.contextmanager
def clusters(
    folder: Path, rate: int, names: Sequence[str], workers: int
) -> Iterator[tuple[str, dict[str, Client]]]:
    """Yield the URL of the store, and a client of each side."""
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        star = make_star(stack, 3, None)
        *hosts, store = star.hosts
        for at in range(len(hosts)):
            star._limit(at, rate)
        _serve(store, folder)
        found = {}
        for number, name in enumerate(names):
            common = {"gpurt.cache": "auto", "distributed.comm.timeouts.connect": "120s"}
            stack.enter_context(dask.config.set({**common, **SETTINGS[name]}))
            on = [*hosts] * workers
            client = stack.enter_context(
                servers(hosts[0], on, 8786 + 10 * number, Path(scratch) / name, "2 GiB")
            )
            dask_gpurt.enable(client)
            if name == "kept":
                client.run_on_scheduler(_unbind)
            found[name] = client
        with hosts[0].network():
            yield f"http://{store.address}:{STORE_PORT}", found


def _serve(host: Host, folder: Path) -> None:
    options = ("--rate", "1e12", "--latency", "0.01", "--port", str(STORE_PORT), "--address", host.address)
    host.start(sys.executable, "-m", "benchmarks.reads.store", str(folder), *options)


def _unbind(dask_scheduler: Any) -> None:
    places = dask_scheduler.extensions["gpurt"].read_places
    places.unbind()
    places.on_graph = lambda keys: None


def counts(client: Client) -> tuple[float, dict[str, tuple[int, int]]]:
    """Return the CPU seconds of the workers, and the bytes on the link of each host."""
    cpu = sum(client.run(time.process_time).values())
    hosts = {worker.rpartition(":")[0]: worker for worker in client.nthreads()}
    return cpu, link_bytes(client, list(hosts.values()))


def passed(client: Client, url: str, queries: Sequence[int], rate: int) -> dict[str, Any]:
    """Run the queries, and return what they took, and their results."""
    (cpu, links), read, began = counts(client), read_bytes(client), time.perf_counter()
    with client.as_current():
        results = [QUERIES[number].build(StoredTables(url)).compute() for number in queries]
    seconds = time.perf_counter() - began
    (cpu_now, links_now), read_now = counts(client), read_bytes(client)
    busiest = max(max(now) - max(links[host]) for host, now in links_now.items())
    cpu_now -= cpu
    return {
        "seconds": round(seconds, 3),
        "cpu": round(cpu_now, 3),
        "link": busiest,
        "estimated": round(cpu_now / len(client.nthreads()) + busiest / rate, 3),
        **{f"from {source}": int(read_now[source] - read[source]) for source in read},
        "results": results,
    }


def measure(
    folder: Path,
    rate: int,
    names: Sequence[str],
    queries: Sequence[int],
    turns: int,
    workers: int,
    passes: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each session of each side but the first, which imports modules."""
    with clusters(folder, rate, names, workers) as (url, sides):
        for turn in range(turns + 1):
            expected = None
            for name in names if turn % 2 else [*names][::-1]:
                forget(sides[name])
                for at in range(1, passes + 1):
                    found = passed(sides[name], url, queries, rate)
                    results = found.pop("results")
                    if expected is not None and not all(map(_same, expected, results)):
                        raise ValueError(f"{name}: other results")
                    expected = results
                    row = {"rate": rate, "side": name, "turn": turn, "pass": at, **found}
                    click.echo(str(row), err=True)
                    if turn:
                        yield row
        fallbacks = {name: dask_gpurt.report(client).fallbacks.to_dict() for name, client in sides.items()}
        click.echo(str(fallbacks), err=True)


def _same(one: Any, other: Any) -> bool:
    """Return whether two results are the same but for the order of sums."""
    try:
        if getattr(one, "ndim", 0):
            compare = pd.testing.assert_series_equal if one.ndim == 1 else pd.testing.assert_frame_equal
            compare(one.reset_index(drop=True), other.reset_index(drop=True), rtol=1e-6)
            return True
    except AssertionError:
        return False
    return bool(abs(one - other) <= 1e-6 * abs(one))


def figures(rows: list[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return medians of each side on each link, and the ratios to the first side."""
    found = []
    for rate, at in dict.fromkeys((row["rate"], row["pass"]) for row in rows):
        here = [row for row in rows if (row["rate"], row["pass"]) == (rate, at)]
        of = {name: [row for row in here if row["side"] == name] for name in names}
        for name, each in of.items():
            medians = {
                what: round(median(row[what] for row in each), 3)
                for what in ("seconds", "cpu", "link", "estimated", "from cache", "from store")
            }
            ratios = {
                f"{names[0]} / {name}, {what}": [
                    round(one[what] / other[what], 3) for one, other in zip(of[names[0]], each, strict=True)
                ]
                for what in ("seconds", "estimated")
            }
            means = {f"mean {what}": round(geometric_mean(each), 3) for what, each in ratios.items()}
            found.append({"rate": rate, "pass": at, "side": name, **medians, **means, **ratios})
            click.echo(str(found[-1]))
    return found


@click.command(help=__doc__.partition("\n")[0])
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--links", default="0.1,1", callback=split_list(["0.1", "0.3", "1"]), help="In GB/s.")
@click.option("--sides", default=",".join(SETTINGS), callback=split_list(list(SETTINGS)))
@click.option("--queries", default=",".join(map(str, SESSION)), callback=split_list(list(map(str, QUERIES))))
@click.option("--turns", default=5, show_default=True)
@click.option("--passes", default=1, show_default=True, help="Over the queries in a session.")
@click.option("--workers", default=2, show_default=True, help="On each host.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    folder: Path,
    links: Sequence[str],
    sides: Sequence[str],
    queries: Sequence[str],
    turns: int,
    passes: int,
    workers: int,
    output: Path | None,
) -> None:
    """Measure all sides on each link, and write the rows after each session."""
    rows: list[dict[str, Any]] = []
    about = {"what": WHAT, "date": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}
    for link in links:
        for row in measure(
            folder, round(1e9 * float(link)), sides, [*map(int, queries)], turns, workers, passes
        ):
            rows.append(row)
            write({**about, "workers": workers, "queries": queries, "rows": rows}, output)
    write(
        {**about, "workers": workers, "queries": queries, "rows": rows, "figures": figures(rows, sides)},
        output,
    )


if __name__ == "__main__":
    main()
