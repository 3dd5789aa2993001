"""Run a session whose tables do not fit into what the GPU has left, with a tier below it and without.

``python -m benchmarks.reads.tier TPCH --device 6GiB --rounds 2 --json FILE``

On one cluster, in turns: ``off`` keeps nothing, ``device`` columns on the GPU only, ``tier`` those that find
no room there in pinned memory, too. A side begins with nothing kept; its second pass counts. All results are
compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import dask
from distributed import Client, LocalCluster

import dask_gpurt
from benchmarks.common.commandline import split_list, write
from benchmarks.common.environment import environment
from benchmarks.reads.passes import forget
from benchmarks.tpch.queries import QUERIES
from benchmarks.tpch.tables import ParquetTables
from benchmarks.two_hosts.session import _same

WHAT = (
    "passes of TPC-H in one session whose columns do not fit into what the device tier has left, by what "
    "keeps them; medians of second passes, in turns (benchmarks.reads.tier)"
)
SIDES = ("tier", "device", "off")
SOURCES = ("decoded", "device", "pinned")


def use(side: str, dask_worker: Any = None) -> None:
    """Switch a worker to a side."""
    tiers = dask_worker.plugins["gpurt"].tiers
    tiers.columns._room = int if side == "off" else tiers._left_for_columns
    tiers.columns.below = tiers.below if side == "tier" else None


def read(dask_worker: Any = None) -> dict[str, float]:
    """Return the bytes that a worker has read, and what it keeps now."""
    plugin = dask_worker.plugins["gpurt"]
    total = plugin.metrics.total("reads.bytes.{source}")
    kept = {"kept": plugin.tiers.columns.nbytes, "kept below": plugin.tiers.below.nbytes}
    spilled = sum(plugin.metrics.total("memory.spill.bytes.{from}.{to}").values())
    return {source: total.get((source,), 0) for source in SOURCES} | {"moved": spilled} | kept


def counts(client: Client) -> dict[str, float]:
    """Return the sums over all workers."""
    found = list(client.run(read).values())
    return {name: sum(each[name] for each in found) for name in found[0]}


def passed(client: Client, tables: ParquetTables, queries: Sequence[int]) -> tuple[dict[str, Any], list[Any]]:
    """Return what a pass took, and its results on the host."""
    before, results, seconds = counts(client), [], []
    for number in queries:
        began = time.perf_counter()
        results.append(QUERIES[number].build(tables).compute())
        seconds.append(time.perf_counter() - began)
    after = counts(client)
    moved = {f"GB {name}": round((after[name] - before[name]) / 1e9, 3) for name in (*SOURCES, "moved")}
    kept = {f"GB {name}": round(after[name] / 1e9, 3) for name in ("kept", "kept below")}
    hosted = [each.to_pandas() if hasattr(each, "to_pandas") else each for each in results]
    return {"seconds": round(sum(seconds), 3), **moved, **kept}, hosted


def ordered(result: Any) -> Any:
    """Return a result with its rows in an order that follows from them: groups come in any."""
    if getattr(result, "ndim", 0) < 2:
        return result
    plain = result.reset_index(drop=True)
    floats = list(plain.select_dtypes("float").columns)
    rounded = plain.assign(**plain[floats].round(2))
    return plain.iloc[rounded.sort_values(list(rounded.columns)).index].reset_index(drop=True)


def is_possible(tables: ParquetTables, number: int) -> bool:
    """Return whether a query can be run: dask_cudf cannot run some."""
    try:
        QUERIES[number].build(tables).compute()
    except Exception as error:
        click.echo(f"query {number} is left out: {error!r}")
        return False
    return True


def cluster(backend: str, pool: str) -> Any:
    """Return a cluster of one worker."""
    if backend == "pandas":
        return LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0")
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(n_workers=1, rmm_pool_size=pool, dashboard_address=":0")


@click.command(help=__doc__.partition("\n")[0])
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--device", default="6GiB", show_default=True, help="The device tier.")
@click.option("--pool", default="20GB", show_default=True, help="RMM's pool.")
@click.option("--backend", type=click.Choice(["pandas", "cudf"]), default="cudf")
@click.option("--queries", default=",".join(map(str, QUERIES)), callback=split_list(list(map(str, QUERIES))))
@click.option("--rounds", default=2, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    folder: Path,
    device: str,
    pool: str,
    backend: str,
    queries: Sequence[str],
    rounds: int,
    output: Path | None,
) -> None:
    """Measure all sides in turns."""
    rows: list[dict[str, Any]] = []
    tables, numbers = ParquetTables(folder), [*map(int, queries)]
    expected: list[Any] = []
    about = {"what": WHAT, "date": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}
    given = {"tables": str(tables.scale), "device": device, "pool": pool, "queries": queries}
    settings = {"dataframe.backend": backend, "gpurt.memory.device": device}
    with dask.config.set(settings), cluster(backend, pool) as local, Client(local) as client:
        dask_gpurt.enable(client)
        numbers = [number for number in numbers if is_possible(tables, number)]  # imports, and plans
        for turn in range(rounds):
            for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                forget(client)
                client.run(partial(use, side))
                for at in ("first", "second")[: 1 if side == "off" else 2]:
                    row, results = passed(client, tables, numbers)
                    rows.append({"side": side, "turn": turn, "pass": at, **row})
                    click.echo(str(rows[-1]))
                    results = [ordered(each) for each in results]
                    wrong = [
                        number
                        for number, one, other in zip(numbers, expected, results, strict=False)
                        if not _same(one, other)
                    ]
                    rows[-1]["other results"] = wrong
                    if wrong:
                        click.echo(f"{side}: other results of {wrong}")
                    expected = expected or results
                    write({**about, **given, "rows": rows}, output)
        fallbacks = str(dask_gpurt.report(client)["fallbacks"])
        click.echo(f"fallbacks {fallbacks}")
    found = figures(rows)
    write({**about, **given, "fallbacks": fallbacks, "rows": rows, "figures": found}, output)


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return medians of second passes, and ratios to the side without the tier."""
    last = {"off": "first", "device": "second", "tier": "second"}
    of = {side: [row for row in rows if (row["side"], row["pass"]) == (side, last[side])] for side in SIDES}
    found = []
    for side, each in of.items():
        medians = {
            name: median(row[name] for row in each)
            for name in each[0]
            if name.startswith(("s", "GB"))
            if name != "side"
        }
        ratio = geometric_mean([a["seconds"] / b["seconds"] for a, b in zip(each, of["device"], strict=True)])
        found.append({"side": side, **medians, "of device": round(ratio, 3)})
        click.echo(str(found[-1]))
    return found


if __name__ == "__main__":
    main()
