"""Summarise timed shuffles, and print the figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask.utils import format_bytes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.rows import GIB


@dataclass
class Run:
    """Record one timed run. ``turn`` 0 is the first run of its method and operation."""

    operation: str
    method: str
    turn: int
    seconds: float
    rows: int
    peak_bytes: dict[str, int]
    exchange_bytes: dict[str, int] = field(default_factory=dict)
    #: Bytes that moved to another worker, if known.
    moved: int | None = None


def summarise(
    runs: Sequence[Run], sizes: Mapping[str, int], limit: float, workers: int
) -> list[dict[str, Any]]:
    """Derive the figures of each operation and method from its runs.

    The share of the link limit counts the bytes that have to move to another worker: all but one part
    in ``workers``.
    """
    figures = []
    crossing = (workers - 1) / workers if workers > 1 else 1.0
    for name, method in dict.fromkeys((run.operation, run.method) for run in runs):
        mine = [run for run in runs if (run.operation, run.method) == (name, method)]
        warm = [run.seconds for run in mine if run.turn > 0]
        rate = sizes[name] / statistics.median(warm)
        figures.append(
            {
                "operation": name,
                "method": method,
                "first_seconds": mine[0].seconds,
                "median_seconds": statistics.median(warm),
                "min_seconds": min(warm),
                "max_seconds": max(warm),
                "bytes_per_second": rate,
                "gib_per_second": rate / GIB,
                "moved": statistics.median(run.moved for run in mine) if mine[0].moved is not None else None,
                "share_of_link_limit": rate * crossing / limit,
                "peak_bytes": {
                    tier: max(run.peak_bytes[tier] for run in mine) for tier in mine[0].peak_bytes
                },
            }
        )
    return figures


def warm_seconds(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of all but the first runs, by operation and method."""
    warm: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if run.turn > 0:
            warm.setdefault(run.operation, {}).setdefault(run.method, []).append(run.seconds)
    return warm


def print_summary(results: Mapping[str, Any]) -> None:
    """Print one line per operation and method, and the speedups."""
    parameters, limit = results["parameters"], results["link_limit"]
    console = Console()
    console.print(
        f"{format_bytes(parameters['size'])} in {parameters['partitions']} partitions, "
        f"{parameters['backend']}, {parameters['workers']} workers"
    )
    console.print(f"Link limit: {limit['bytes_per_second'] / GIB:.1f} GiB/s, {limit['what']}")
    console.print(_summary_table(results["figures"]))
    for method, ratio in results["speedups"].items():
        console.print(f"gpurt against {method}: {ratio:.2f} times as fast (geometric mean, warm)")


def _summary_table(figures: Sequence[Mapping[str, Any]]) -> Table:
    tiers = list(figures[0]["peak_bytes"])
    caption = "Seconds of the first and the warm runs; peak GiB of memory per tier"
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("operation", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for heading in ("first", "median", "min", "max", "GiB/s", "of limit", "GiB moved", *tiers):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        seconds = (f"{figure[f'{which}_seconds']:.2f}" for which in ("first", "median", "min", "max"))
        peaks = (f"{figure['peak_bytes'][tier] / GIB:.2f}" for tier in tiers)
        rates = (f"{figure['gib_per_second']:.2f}", f"{figure['share_of_link_limit']:.1%}")
        moved = "" if figure["moved"] is None else f"{figure['moved'] / GIB:.2f}"
        table.add_row(figure["operation"], figure["method"], *seconds, *rates, moved, *peaks)
    return table
