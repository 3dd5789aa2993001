"""Plot the budgets as stacked bars with bokeh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.budget import PHASES
from .figures import named

#: ``computing`` is split by whether task threads are busy or idle.
PARTS = (*PHASES[:4], "busy", "idle", PHASES[5])
COLOURS = ("#9467bd", "#7b4173", "#c5b0d5", "#d4a72c", "#22a06b", "#dddddd", "#8fa3bf")


def parts_of(spent: Mapping[str, Any]) -> dict[str, float]:
    """Split the time of a run into the parts of its bar."""
    seconds = dict(spent["seconds"])
    computing = seconds.pop("computing")
    seconds["busy"] = computing * spent["thread_busy"]
    seconds["idle"] = computing - seconds["busy"]
    return {part: seconds[part] for part in PARTS}


def write_plot(results: Mapping[str, Any], path: Path) -> None:
    """Write a page with the time budget of the median warm run, as a bar per query and contender."""
    from bokeh.models import ColumnDataSource, FactorRange
    from bokeh.plotting import figure, output_file, save

    bars = [each for each in results["figures"] if "seconds" in each.get("budget", ())]
    rows = [(f"Q{named(each['query'], each['style'])}", each["contender"]) for each in bars]
    cut = [parts_of(each["budget"]) for each in bars]
    data: dict[str, Any] = {"row": rows, **{part: [one[part] for one in cut] for part in PARTS}}
    page = figure(
        x_range=FactorRange(*rows),
        width=max(800, 24 * len(rows)),
        height=480,
        title=f"TPC-H at scale {results['parameters']['scale']:g}: seconds of a warm run",
        tooltips="@row: $name @$name{0.000} s",
        toolbar_location=None,
    )
    page.vbar_stack(
        PARTS, x="row", width=0.9, color=COLOURS, source=ColumnDataSource(data), legend_label=list(PARTS)
    )
    page.xaxis.major_label_orientation = 1.5
    page.y_range.start = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    output_file(path, title="TPC-H")
    save(page)
