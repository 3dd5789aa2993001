"""Render the report of a demo run as one HTML file, without scripts or external resources."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from dask.utils import format_bytes

from dask_gpurt.tools.demo.tier_view import tier_chart

METHOD_COLOURS = {"gpurt": "var(--gpurt)", "tasks": "var(--tasks)", "p2p": "var(--p2p)"}
PATH_COLOURS = {
    "shared-memory": "#7c5cfc",
    "cuda-ipc": "#22a06b",
    "through-host": "#d4a72c",
    "local": "#8fa3bf",
    "comms": "#e2803a",
    "disk": "#c9475f",
}


def speedups(seconds: Mapping[str, Mapping[str, Sequence[float]]], of: str = "gpurt") -> dict[str, float]:
    """Return the speedup of one method over each other method.

    Parameters
    ----------
    seconds
        Timings by operation, then by method.
    of
        The method to compare with all others.

    Returns
    -------
    dict
        Speedups by other method: geometric means over the operations that both methods finished.
    """
    ratios: dict[str, list[float]] = {}
    for by_method in seconds.values():
        if not by_method.get(of):
            continue
        mine = statistics.median(by_method[of])
        for method, timings in by_method.items():
            if method != of and timings:
                ratios.setdefault(method, []).append(statistics.median(timings) / mine)
    return {method: statistics.geometric_mean(values) for method, values in ratios.items()}


def write_report(results: Mapping[str, Any], path: Path) -> None:
    """Write the HTML report of a demo run.

    Parameters
    ----------
    results
        The output of ``dask gpurt demo --json``.
    path
        The file to write; missing folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_report(results), encoding="utf-8")


def render_report(results: Mapping[str, Any]) -> str:
    """Render the HTML report of a demo run.

    Parameters
    ----------
    results
        The output of ``dask gpurt demo --json``.

    Returns
    -------
    str
        A complete HTML page.
    """
    page = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
    )
    page.filters.update(bytes=format_bytes, seconds="{:.3f}".format)
    return page.get_template("report.html").render(
        run=results,
        tiles=_tiles(results),
        timing_chart=_timing_chart(results["operations"], results["methods"]),
        traffic_chart=_traffic_chart(results["operations"]),
        tier_chart=tier_chart(results["tiers"]),
        method_colours=METHOD_COLOURS,
    )


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    operations = results["operations"]
    passed = sum(sum(operation["checks"].values()) for operation in operations)
    compared = len(operations) * len(results["methods"])
    moved = sum(sum(operation["bytes"].values()) for operation in operations)
    faster = speedups({operation["name"]: operation["seconds"] for operation in operations})
    return [
        *(
            (f"{ratio:.2f} times", f"as fast as {method}, in the geometric mean")
            for method, ratio in faster.items()
        ),
        (f"{passed} of {compared}", "results equal to pandas"),
        *([(format_bytes(moved), "read through the exchange")] if moved else []),
    ]


def _timing_chart(operations: Iterable[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, Any]:
    """Lay out one bar per operation and method, all on one scale."""
    medians = {
        (operation["name"], method): statistics.median(timings)
        for operation in operations
        for method in methods
        if (timings := operation["seconds"].get(method))
    }
    scale = 440 / max(medians.values(), default=1.0)
    bar, gap, top = 15, 14, 4
    rows = []
    for operation in operations:
        bars = [
            {
                "y": top + i * bar,
                "width": max(2, round(medians[operation["name"], method] * scale)),
                "colour": METHOD_COLOURS.get(method, "var(--p2p)"),
                "label": f"{medians[operation['name'], method]:.2f} s",
                "title": f"{operation['name']}, {method}",
            }
            for i, method in enumerate(methods)
            if (operation["name"], method) in medians
        ]
        rows.append({"name": operation["name"], "y": top + len(methods) * bar / 2, "bars": bars})
        top += len(methods) * bar + gap
    return {"height": top, "rows": rows, "bar": bar - 3}


def _traffic_chart(operations: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Lay out one stacked bar per operation, with a segment per path; empty if nothing was moved."""
    largest = max((sum(operation["bytes"].values()) for operation in operations), default=0)
    scale = 440 / largest if largest else 0
    used: list[str] = []
    rows = []
    for i, operation in enumerate(operations):
        left, segments = 220.0, []
        for path, size in sorted(operation["bytes"].items()):
            if not size:
                continue
            used += [] if path in used else [path]
            segments.append(
                {
                    "x": round(left, 1),
                    "width": max(1, math.ceil(size * scale)),
                    "colour": PATH_COLOURS.get(path, "var(--p2p)"),
                    "title": f"{path}: {format_bytes(size)}",
                }
            )
            left += size * scale
        total = format_bytes(sum(operation["bytes"].values()))
        rows.append(
            {"name": operation["name"], "y": 4 + i * 26, "segments": segments, "end": left, "label": total}
        )
    legend = {path: PATH_COLOURS.get(path, "var(--p2p)") for path in used}
    return {"height": 4 + len(rows) * 26, "rows": rows, "legend": legend}
