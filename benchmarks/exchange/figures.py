"""Summarise turns of the exchange by leg, and print the figures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dask.utils import format_bytes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common.rows import GIB
from benchmarks.exchange.legs import PHASES
from benchmarks.exchange.sides import Plan
from dask_gpurt.tools.demo.command import BYTES_PREFIX, speedups


def summarise(turns: Sequence[Mapping[str, Any]], plan: Plan, limit: float | None) -> list[dict[str, Any]]:
    """Derive the figures of each leg from its warm turns.

    The share of the link limit counts the bytes that have to move to another worker: all but one part in
    ``workers``. Phases and counters are means per turn and worker.
    """
    figures = []
    crossing = (plan.workers - 1) / plan.workers if plan.workers > 1 else 1.0
    for leg, warm in warm_turns(turns).items():
        seconds = [turn["seconds"] for turn in warm]
        rate = plan.size / statistics.median(seconds)
        workers = [worker for turn in warm for worker in turn["workers"]]
        counted = sum((Counter(turn["counters"]) for turn in warm), Counter[str]())
        figures.append(
            {
                "side": warm[0]["side"],
                "leg": leg,
                "median_seconds": statistics.median(seconds),
                "min_seconds": min(seconds),
                "max_seconds": max(seconds),
                "gib_per_second": rate / GIB,
                "share_of_link_limit": rate * crossing / limit if limit else None,
                "phases": {phase: statistics.mean(w[phase] for w in workers) for phase in PHASES},
                "counters": {name: n / len(workers) for name, n in counted.items() if "peak" not in name},
            }
        )
    return figures


def warm_turns(turns: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Collect all but the first turns, by leg."""
    warm: dict[int, list[Mapping[str, Any]]] = {}
    for turn in turns:
        if turn["turn"] > 0:
            warm.setdefault(turn["leg"], []).append(turn)
    return warm


def compare(turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return our speedup over the other side, by the medians of all warm turns."""
    seconds: dict[str, list[float]] = {}
    for warm in warm_turns(turns).values():
        seconds.setdefault(warm[0]["side"], []).extend(turn["seconds"] for turn in warm)
    return speedups({"exchange": seconds})


def print_summary(results: Mapping[str, Any]) -> None:
    """Print a line per leg, the runtime's counters, and errors."""
    parameters, limit = results["parameters"], results["link_limit"]
    console = Console(highlight=False, markup=False)
    console.print(
        f"{format_bytes(parameters['size'])} in {parameters['partitions']} partitions, "
        f"{parameters['backend']}, {parameters['workers']} workers"
    )
    if limit:
        console.print(f"Link limit: {limit['bytes_per_second'] / GIB:.1f} GiB/s, {limit['what']}")
    console.print(_summary_table(results["figures"]))
    for figure in results["figures"]:
        for line in _counted(figure["counters"]):
            console.print(f"{figure['side']}, leg {figure['leg']}, per turn and worker: {line}")
    for what, reason in results["fallbacks"].items():
        console.print(f"Fallback: {what}: {reason}")
    for side, ratio in results["speedups"].items():
        console.print(f"gpurt against {side}: {ratio:.2f} times as fast (medians, warm)")
    for failed in results["errors"]:
        console.print(f"{failed['side']}, leg {failed['leg']}, failed: {failed['error']}")


def _summary_table(figures: Sequence[Mapping[str, Any]]) -> Table:
    caption = "Milliseconds of the warm turns, and of their phases on average"
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("leg", no_wrap=True)
    for heading in ("median", "min", "max", "GiB/s", "of limit", *PHASES):
        table.add_column(heading, justify="right")
    for figure in figures:
        times = (f"{figure[f'{which}_seconds'] * 1e3:.1f}" for which in ("median", "min", "max"))
        share = figure["share_of_link_limit"]
        rates = (f"{figure['gib_per_second']:.1f}", "" if share is None else f"{share:.1%}")
        phases = (f"{figure['phases'][phase] * 1e3:.1f}" for phase in PHASES)
        table.add_row(figure["side"], *times, *rates, *phases)
    return table


def _counted(counters: Mapping[str, float]) -> Iterator[str]:
    """Describe how the bytes were moved, and where threads spent their time."""
    moved = [
        f"{n / GIB:.3f} GiB {name.removeprefix(BYTES_PREFIX)}"
        for name, n in counters.items()
        if name.startswith(BYTES_PREFIX)
    ]
    spent = [
        f"{n * 1e3:.1f} ms {name.rpartition('.')[2]}" for name, n in counters.items() if ".seconds." in name
    ]
    yield from (", ".join(parts) for parts in (moved, spent) if parts)
