"""Profile the planning of queries: the work of the client before it has a graph.

    python -m benchmarks.tpch.planning --scale 1 --queries all --json planning.json

Each query is built and optimised several times without instrumentation, then with clocks around each
``_meta``, then under cProfile, for call counts and cumulative times. No cluster is needed; the shuffle method
is Dask's ``tasks``.
"""

from __future__ import annotations

import cProfile
import functools
import pstats
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import dask
from dask._expr import Expr
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.environment import environment
from dask_gpurt.client.planning.store import Store

from ..common.commandline import write
from .figures import rounded
from .options import planning_options
from .queries import QUERIES, Query
from .tables import ParquetTables

#: Functions that represent a part of planning: name, part of the file's path, function.
PARTS = (
    ("Merge._meta", "dask_expr/_merge.py", "_meta"),
    ("non-empty frames", "dask/dataframe/backends.py", "meta_nonempty_dataframe"),
    ("simplify_once", "dask/_expr.py", "simplify_once"),
    ("lower_once", "dask/_expr.py", "lower_once"),
    ("fuse", "dask_expr/_expr.py", "optimize_blockwise_fusion"),
    ("tokens", "dask/tokenize.py", "_tokenize_deterministic"),
    ("new expressions", "dask/_expr.py", "__new__"),
    ("pandas merge", "pandas/core/frame.py", "merge"),
    ("file statistics", "dask_expr/io/parquet.py", "_dataset_info"),
)
TOP_FUNCTIONS, TOP_KINDS = 15, 10


def plan_once(query: Query, tables: ParquetTables) -> tuple[float, float]:
    """Build and optimise a query as ``compute`` would; return the seconds of each."""
    start = perf_counter()
    lazy = query.build(tables)
    built = perf_counter()
    lazy.optimize(fuse=True)
    return built - start, perf_counter() - built


@dataclass(frozen=True)
class OnePlanner:
    """Plan for one client, with a store or without, and leave partitions to Dask."""

    kept: Store | None = None
    id: str = "client"

    def partition_sizes(self) -> None:
        """Leave partitions to Dask."""

    def store(self) -> Store | None:
        """Return the store."""
        return self.kept

    def tell_plan(self, plan: Mapping[str, Any]) -> None:
        """Tell nobody."""


class MetadataClock:
    """Time the computation of expressions' metadata within the context."""

    def __init__(self) -> None:
        #: Calls and own seconds, without nested calls, by class of expression.
        self.kinds: dict[str, dict[str, float]] = {}
        #: Distinct names of expressions; equal expressions with different names count separately.
        self.names: set[str] = set()
        self._nested: list[float] = [0.0]
        self._originals: list[tuple[Any, Any]] = []

    def __enter__(self) -> MetadataClock:
        for owner in _subclasses(Expr):
            original = vars(owner).get("_meta")
            if isinstance(original, functools.cached_property):
                timed = functools.cached_property(self._timed(original.func))
                timed.__set_name__(owner, "_meta")
                owner._meta = timed
                self._originals.append((owner, original))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, original in self._originals:
            owner._meta = original

    def _timed(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def meta(expr: Any) -> Any:
            self.names.add(expr._name)
            self._nested.append(0.0)
            start = perf_counter()
            try:
                return function(expr)
            finally:
                seconds = perf_counter() - start
                own = seconds - self._nested.pop()
                self._nested[-1] += seconds
                kind = self.kinds.setdefault(type(expr).__name__, {"calls": 0, "seconds": 0.0})
                kind["calls"] += 1
                kind["seconds"] += own

        return meta

    def summary(self) -> dict[str, Any]:
        """Return calls, distinct expressions, seconds, and the most expensive kinds."""
        ordered = sorted(self.kinds.items(), key=lambda item: -item[1]["seconds"])
        return {
            "calls": sum(kind["calls"] for kind in self.kinds.values()),
            "distinct": len(self.names),
            "seconds": sum(kind["seconds"] for kind in self.kinds.values()),
            "kinds": dict(ordered[:TOP_KINDS]),
        }


def _subclasses(of: type) -> set[Any]:
    return {of}.union(*(_subclasses(each) for each in of.__subclasses__()))


def profile(query: Query, tables: ParquetTables, repeat: int) -> dict[str, Any]:
    """Time and profile the planning of a query.

    Returns
    -------
    dict
        ``build`` and ``optimise``: median seconds without a profiler. ``first``: seconds of both, the first
        time in this process. ``metadata``: how often a ``_meta`` was computed, of how many distinct
        expressions, seconds, and the kinds of expressions that took most; without cProfile. ``profiled``:
        seconds of both under cProfile. ``parts``: calls of each of ``PARTS`` with cumulative seconds,
        recursion counted once. ``top``: the functions that took most themselves.
    """
    first = sum(plan_once(query, tables))
    timed = [plan_once(query, tables) for _ in range(repeat)]
    with MetadataClock() as metadata:
        plan_once(query, tables)
    profiler = cProfile.Profile()
    profiler.runcall(plan_once, query, tables)
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]]
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    most = sorted(stats.items(), key=lambda item: -item[1][2])
    return {
        "query": query.number,
        "first": first,
        "build": statistics.median(build for build, _ in timed),
        "optimise": statistics.median(optimise for _, optimise in timed),
        "metadata": metadata.summary(),
        "profiled": sum(own for _, _, own, _, _ in stats.values()),
        "parts": parts_of(stats),
        "top": [
            {"function": _named(*at), "calls": calls, "seconds": own}
            for at, (_, calls, own, _, _) in most[:TOP_FUNCTIONS]
        ],
    }


def parts_of(stats: Any) -> dict[str, dict[str, float]]:
    """Sum the calls and cumulative seconds of the functions of each part."""
    found = {name: {"calls": 0, "seconds": 0.0} for name, _, _ in PARTS}
    for (file, _, function), (_, calls, _, cumulative, _) in stats.items():
        for name, of_file, of_function in PARTS:
            if function == of_function and of_file in file:
                found[name]["calls"] += calls
                found[name]["seconds"] += cumulative
                break
    return found


def _named(file: str, line: int, function: str) -> str:
    package = file.partition("site-packages/")[2] or Path(file).name
    return f"{function} ({package}:{line})" if line else function


def print_profiles(profiles: Sequence[dict[str, Any]]) -> None:
    """Print one line per query: milliseconds of planning, and calls and milliseconds of its parts."""
    caption = (
        "Milliseconds of planning, and, from metadata on, calls and milliseconds, what they call included; "
        "from profiled on under cProfile"
    )
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("query", "first", "build", "optimise", "metadata", "profiled"):
        table.add_column(heading, justify="right")
    for heading, _, _ in PARTS:
        table.add_column(heading, justify="right")
    for one in profiles:
        first, build, optimise, profiled = (
            f"{1e3 * one[name]:.0f}" for name in ("first", "build", "optimise", "profiled")
        )
        metadata, *parts = (
            f"{part['calls']:.0f}: {1e3 * part['seconds']:.0f}"
            for part in (one["metadata"], *one["parts"].values())
        )
        table.add_row(str(one["query"]), first, build, optimise, metadata, profiled, *parts)
    Console(width=200).print(table)


@click.command(help=__doc__.partition("\n")[0])
@planning_options
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True)
def main(tables: ParquetTables, queries: list[int], backend: str, repeat: int, output: Path | None) -> None:
    with dask.config.set({"dataframe.shuffle.method": "tasks", "dataframe.backend": backend}):
        profiles = [profile(QUERIES[number], tables, repeat) for number in queries]
    results = {
        "parameters": {"scale": tables.scale, "parts": tables.parts, "backend": backend, "repeat": repeat},
        **environment(),
        "profiles": rounded(profiles),
    }
    write(results, output)
    print_profiles(profiles)


if __name__ == "__main__":
    main()
