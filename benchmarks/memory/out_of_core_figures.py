"""Summarise runs out of core, and print the figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask.utils import format_bytes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.rows import GIB


@dataclass
class Run:
    """Record one timed run; ``error`` is the reason for missing figures."""

    operation: str
    contender: str
    turn: int
    seconds: float | None = None
    error: str | None = None
    peak_bytes: Mapping[str, int] | None = None
    stalls: Mapping[str, float] | None = None
    counters: Mapping[str, float] | None = None
    #: Sampled stacks of the threads, with ``--samples``.
    samples: Mapping[str, Any] | None = None
    #: After a run that failed: the contents of the tiers, and the stack of each thread.
    held: Sequence[Any] | None = None
    stacks: Mapping[str, Mapping[str, str]] | None = None


def summarise(runs: Sequence[Run], size: int) -> list[dict[str, Any]]:
    """Derive the figures of each operation and contender from its runs."""
    figures = []
    for operation, contender in dict.fromkeys((run.operation, run.contender) for run in runs):
        mine = [run for run in runs if (run.operation, run.contender) == (operation, contender)]
        seconds = [run.seconds for run in mine if run.seconds is not None]
        figure: dict[str, Any] = {"operation": operation, "contender": contender, "runs": len(mine)}
        figure["errors"] = [run.error for run in mine if run.error]
        if seconds:
            done = [run for run in mine if run.seconds is not None]
            figure |= {
                "median_seconds": statistics.median(seconds),
                "gib_per_second": size / GIB / statistics.median(seconds),
                "longest_stall": max(run.stalls["max"] for run in done if run.stalls),
                "median_stall": statistics.median(run.stalls["median"] for run in done if run.stalls),
                "peak_bytes": {
                    tier: max(run.peak_bytes[tier] for run in done if run.peak_bytes)
                    for tier in done[0].peak_bytes or ()
                },
            }
        figures.append(figure)
    return figures


def print_summary(results: Mapping[str, Any]) -> None:
    """Print a line per operation and contender, and the bytes moved between tiers."""
    console = Console()
    console.print({name: value for name, value in results["parameters"].items() if name != "budget"})
    console.print({name: format_bytes(n) for name, n in results["parameters"]["budget"].items() if n})
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("operation", "contender", "seconds", "GiB/s", "longest stall", "host peak", "errors"):
        table.add_column(heading)
    for figure in results["figures"]:
        table.add_row(
            figure["operation"],
            figure["contender"],
            f"{figure.get('median_seconds', float('nan')):.2f}",
            f"{figure.get('gib_per_second', float('nan')):.2f}",
            f"{figure.get('longest_stall', float('nan')) * 1e3:.0f} ms",
            f"{figure.get('peak_bytes', {}).get('host', 0) / GIB:.2f}",
            "; ".join(figure["errors"])[:60] or "-",
        )
    console.print(table)
    for run in results["runs"]:
        if run["counters"] and run["turn"] == 0:
            console.print(run["operation"], {name: _readable(name, v) for name, v in run["counters"].items()})
        if run["samples"]:
            print_samples(console, run["samples"])


def print_samples(console: Console, samples: Mapping[str, Any]) -> None:
    """Print when which steps were made, and where the threads were."""
    for step in samples["tasks"]:
        span = f"{step['first']:7.3f} to {step['last']:7.3f}"
        console.print(
            f"{step['step']:36.36} {step['count']:5} x, {step['seconds']:8.3f} s, {span}", soft_wrap=True
        )
    for place in samples["places"][:25]:
        console.print(f"{place['share']:6.2f} {place['thread']:14.14} {place['place']}", soft_wrap=True)
    for gap in samples["gaps"]:
        where = "; ".join(f"{thread}: {place}" for thread, place in gap["places"])
        console.print(f"{gap['seconds'] * 1e3:.0f} ms without a sample, then {where}", soft_wrap=True)


def _readable(name: str, value: float) -> str:
    return format_bytes(int(value)) if "bytes" in name or "peak" in name else f"{value:.4g}"
