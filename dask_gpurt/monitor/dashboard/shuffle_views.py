"""Draw the last shuffles: their progress in each phase, and their figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from bokeh.models import ColumnDataSource, FactorRange, Range1d
from dask.utils import format_bytes

from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.dashboard.components import (
    MAX_ROWS,
    Data,
    FigureComponent,
    Find,
    TableComponent,
    put,
    short_time,
)

#: Maximum number of shuffles in the figure.
MAX_BARS = 12
STATE_COLOURS = {"running": "#3d7fc1", "done": "#22a06b", "failed": "#c9475f", "cancelled": "#999999"}


class ShuffleProgress(FigureComponent):
    """Show the progress of the last shuffles in each phase."""

    title = "Progress of shuffles, the latest on top"
    phases = ("split and sent", "received", "assembled")

    def __init__(self, find: Find):
        super().__init__(find, tools="", y_range=FactorRange(), x_range=Range1d(start=0, end=3))
        names = ("shuffle", "left", "right", "back", "text", "at", "colour")
        self.source = ColumnDataSource({name: [] for name in names})
        self.figure.hbar("shuffle", 0.7, "back", "left", source=self.source, color="#eeeeee")
        self.figure.hbar("shuffle", 0.7, "right", "left", source=self.source, color="colour", alpha=0.75)
        self.figure.text(
            "at", "shuffle", "text", source=self.source, text_baseline="middle", text_font_size="11px"
        )
        self.figure.xaxis.ticker = [0.5, 1.5, 2.5]
        self.figure.xaxis.major_label_overrides = {at + 0.5: name for at, name in enumerate(self.phases)}
        self.figure.grid.grid_line_color = None

    def show(self, collector: Collector) -> None:
        rows = collector.sampler.shuffles.rows(time.time(), MAX_BARS)
        data: Data = {name: [] for name in self.source.data}
        for row in rows:
            for at, (share, text) in enumerate(_progress(row)):
                data["shuffle"].append(_short(row))
                data["left"].append(at + 0.02)
                data["right"].append(at + 0.02 + 0.96 * share)
                data["back"].append(at + 0.98)
                data["text"].append(text)
                data["at"].append(at + 0.05)
                data["colour"].append(STATE_COLOURS[row["state"]])
        labels = [_short(row) for row in reversed(rows)]
        if self.figure.y_range.factors != labels:
            self.figure.y_range.factors = labels
        put(self.source, data)
        states = [row["state"] for row in rows]
        self.say(", ".join(f"{states.count(s)} {s}" for s in STATE_COLOURS if s in states) or "none yet")


class ShuffleTable(TableComponent):
    """Show the figures of the last shuffles: time by step, skew, restarts and recoveries."""

    title = "Figures of shuffles"
    columns: ClassVar[Mapping[str, str]] = {
        "shuffle": "Shuffle", "state": "State", "seconds": "Time", "inputs": "Inputs", "outputs": "Outputs",
        "bytes": "Sent", "rows": "Rows", "skew": "Skew", "splitting": "Split", "packing": "Pack",
        "assembling": "Assemble", "restarts": "Restarts", "recoveries": "Recovered", "reason": "Last reason",
    }  # fmt: skip
    widths: ClassVar[Mapping[str, int]] = {
        "shuffle": 95,
        "state": 60,
        "seconds": 55,
        "inputs": 60,
        "outputs": 65,
        "skew": 110,
        "splitting": 65,
        "packing": 65,
        "assembling": 75,
        "restarts": 65,
        "recoveries": 105,
        "reason": 210,
    }

    def show(self, collector: Collector) -> None:
        rows = collector.sampler.shuffles.rows(time.time(), MAX_ROWS)
        self.put_rows([self._texts(row) for row in rows])
        self.say("" if rows else "none yet")

    def _texts(self, row: Mapping[str, Any]) -> dict[str, str]:
        skew = row["skew"]
        seconds = {name: short_time(row[name]) for name in ("splitting", "packing", "assembling")}
        return {
            "shuffle": _short(row), "state": row["state"], "seconds": f"{row['seconds']:.1f} s",
            "inputs": _counted(row["inputs"]), "outputs": _counted(row["outputs"]),
            "bytes": format_bytes(row["bytes"]), "rows": f"{row['rows']:,}",
            "skew": "" if skew is None else f"{skew:.2f} (output {row['largest']})",
            **seconds, "restarts": str(row["restarts"]),
            "recoveries": (
                f"{row['recoveries']} ({row['moved']} outputs)" if row["recoveries"] or row["moved"] else "0"
            ),
            "reason": row["reason"],
        }  # fmt: skip


def _progress(row: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """Yield the share that is done of each phase, and its text."""
    sent, received = row["bytes"], row["received"]
    text = format_bytes(sent) if received == sent else f"{format_bytes(received)} of {format_bytes(sent)}"
    arrived = 1.0 if row["phase"] != "transfer" else received / max(1, sent)
    yield _share(row["inputs"]), _counted(row["inputs"])
    yield arrived, text
    yield _share(row["outputs"]), _counted(row["outputs"])


def _share(tasks: Mapping[str, int]) -> float:
    return min(1.0, tasks["done"] / max(1, tasks["total"]))


def _counted(tasks: Mapping[str, int]) -> str:
    return f"{tasks['done']} / {tasks['total']}"


def _short(row: Mapping[str, Any]) -> str:
    return f"{row['id'][:8]} #{row['run']}"
