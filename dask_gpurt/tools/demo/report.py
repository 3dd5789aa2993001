"""Render the report of a demo run as one HTML file, without scripts or external resources."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from dask.utils import format_bytes

METHOD_COLOURS = {"gpurt": "var(--gpurt)", "tasks": "var(--tasks)", "p2p": "var(--p2p)"}


def speedups(seconds: Mapping[str, Mapping[str, Sequence[float]]], of: str = "gpurt") -> dict[str, float]:
    """Return the speedup of one method over each other method.

    Parameters
    ----------
    seconds
        Timings by operation, then by method.

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
    """Return a complete HTML page about the output of ``dask gpurt demo --json``."""
    page = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
    )
    page.filters.update(bytes=format_bytes, seconds="{:.3f}".format, median=statistics.median)
    medians = [statistics.median(t) for one in results["operations"] for t in one["seconds"].values() if t]
    return page.get_template("report.html").render(
        run=results,
        tiles=_tiles(results),
        longest=max(medians, default=1.0),
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
        *([(format_bytes(results["spilled"]), "spilled to lower tiers")] if results["spilled"] else []),
    ]
