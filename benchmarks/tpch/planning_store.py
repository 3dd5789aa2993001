"""Compare the first planning of queries in new processes: by Dask, with the cache, and with the store.

    python -m benchmarks.tpch.planning_store --scale 1 --turns 5 --json planning-store.json

Each contender plans all queries once, each turn in a process of its own:

- ``dask``: as shipped;
- ``kept``: with the cache, which is empty at first;
- ``filled``: with the cache and an empty store, which is written at the end;
- ``loaded``: with the cache and the store that ``filled`` has written.

Planning means building a query and optimising it; with a cluster, the scheduler makes the graph. Seconds are
the CPU time of the process, without the imports of libraries before the first query.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import process_time
from typing import Any

import click
import dask
from rich.console import Console

from benchmarks.common.environment import environment
from dask_gpurt.client.planning import PlanningCache
from dask_gpurt.client.planning.store import Store
from dask_gpurt.observe import Metrics

from ..common.commandline import write
from ..common.processes import SPAWN
from .figures import rounded, spread
from .options import planning_options
from .planning import OnePlanner
from .queries import QUERIES
from .tables import ARROW, FOLDER, PATTERN, ParquetTables

DASK, KEPT, FILLED, LOADED = CONTENDERS = ("dask", "kept", "filled", "loaded")


def plan_all(
    contender: str, queries: Sequence[int], directory: Path, named: str, backend: str, file: Path
) -> dict[str, Any]:
    """Plan all queries once in this process; return the seconds of each, of saving, and the counters."""
    if backend == "cudf":
        importlib.import_module("dask_cudf")
    tables, metrics = ParquetTables(directory, named), Metrics()
    store = Store(file, metrics) if contender in (FILLED, LOADED) else None
    cache = PlanningCache(lambda: OnePlanner(store), metrics)
    seconds = []
    with dask.config.set({"dataframe.shuffle.method": "tasks", "dataframe.backend": backend}):
        if contender != DASK:
            cache.install()
        for number in queries:
            start = process_time()
            QUERIES[number].build(tables).optimize(fuse=True)
            seconds.append(process_time() - start)
        start = process_time()
        if store is not None:
            store.save()
        saving = process_time() - start
    return {"seconds": seconds, "saving": saving, **metrics.snapshot()}


def take_turns(
    queries: Sequence[int], directory: Path, named: str, backend: str, turns: int
) -> dict[str, list[dict[str, Any]]]:
    """Return what :func:`plan_all` returns, by contender, turn by turn. The order alternates."""
    found: dict[str, list[dict[str, Any]]] = {contender: [] for contender in CONTENDERS}
    for turn in range(turns):
        with tempfile.TemporaryDirectory(prefix="gpurt-planning-") as folder:
            # What `loaded` loads is written before.
            others = [DASK, KEPT] if turn % 2 == 0 else [KEPT, DASK]
            stored = [FILLED, LOADED]
            for contender in [*others, *stored] if turn % 2 == 0 else [*stored, *others]:
                with ProcessPoolExecutor(1, mp_context=SPAWN) as process:
                    arguments = (contender, queries, directory, named, backend, Path(folder) / "results")
                    found[contender].append(process.submit(plan_all, *arguments).result())
    return found


def figures_of(found: dict[str, list[dict[str, Any]]], numbers: Sequence[int]) -> dict[str, Any]:
    """Return medians over the turns with their intervals.

    Returns
    -------
    dict
        ``sums``: of all queries, with saving. ``saving``: of that. ``queries``: of each. ``ratios``: how many
        times as long the others take as ``loaded``, in the same turn.
    """
    sums = {who: [sum(run["seconds"]) + run["saving"] for run in runs] for who, runs in found.items()}
    by_query = {who: list(zip(*(run["seconds"] for run in runs), strict=True)) for who, runs in found.items()}
    return {
        "sums": {who: spread(values) for who, values in sums.items()},
        "saving": {who: spread([run["saving"] for run in found[who]]) for who in (FILLED, LOADED)},
        "queries": [
            {"query": number, **{who: statistics.median(by_query[who][at]) for who in found}}
            for at, number in enumerate(numbers)
        ],
        "ratios": {
            who: spread([one / other for one, other in zip(sums[who], sums[LOADED], strict=True)])
            for who in (DASK, KEPT, FILLED)
        },
    }


@click.command(help=__doc__.partition("\n")[0])
@planning_options
@click.option("--named", type=click.Choice([FOLDER, PATTERN, ARROW]), default=FOLDER, show_default=True)
@click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True)
def main(
    tables: ParquetTables, queries: list[int], backend: str, named: str, turns: int, output: Path | None
) -> None:
    found = take_turns(queries, tables.directory, named, backend, turns)
    results = {
        "parameters": {
            **{"scale": tables.scale, "parts": tables.parts, "backend": backend},
            **{"named": named, "turns": turns, "clock": "cpu"},
        },
        **environment(),
        "figures": rounded(figures_of(found, queries)),
        "counters": {who: runs[-1]["counters"] for who, runs in found.items()},
        "fallbacks": {who: runs[-1]["fallbacks"] for who, runs in found.items() if runs[-1]["fallbacks"]},
    }
    write(results, output)
    Console().print({name: results["figures"][name] for name in ("sums", "saving", "ratios")})


if __name__ == "__main__":
    main()
