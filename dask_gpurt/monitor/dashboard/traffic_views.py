"""Draw the transfers between workers: the matrix of all pairs, and a table of the busiest pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from bokeh.models import ColumnDataSource, FactorRange, HoverTool, LinearColorMapper
from bokeh.models.annotations import ColorBar
from dask.utils import format_bytes

from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.dashboard.components import (
    DARK_SHARE,
    HEAT,
    MAX_ROWS,
    Data,
    FigureComponent,
    Find,
    TableComponent,
    bytes_axis,
    labels,
    put,
    short_bytes,
)
from dask_gpurt.monitor.dashboard.sampler import Flow
from dask_gpurt.topology.links import THROUGH_MEMORY, Link, Speed


class TrafficHeat(FigureComponent):
    """Show the bytes between all pairs of workers, with paths, bandwidth and the estimate for the link."""

    title = "Bytes from worker (row) to worker (column)"

    def __init__(self, find: Find):
        super().__init__(
            find, tools="", x_range=FactorRange(), y_range=FactorRange(), x_axis_location="above"
        )
        names = ("source", "target", "nbytes", "total", "paths", "bandwidth", "estimate", "text", "colour")
        self.source = ColumnDataSource({name: [] for name in names})
        self._mapper = LinearColorMapper(palette=HEAT, low=0, high=1)
        self.figure.rect(
            "target",
            "source",
            0.97,
            0.97,
            source=self.source,
            line_color="#cccccc",
            fill_color={"field": "nbytes", "transform": self._mapper},
        )
        self.figure.text(
            "target",
            "source",
            "text",
            source=self.source,
            text_align="center",
            text_baseline="middle",
            text_font_size="10px",
            text_color="colour",
        )
        bar = ColorBar(color_mapper=self._mapper, width=12)
        bytes_axis(bar)
        self.figure.add_layout(bar, "right")
        self.figure.add_tools(
            HoverTool(
                tooltips=[
                    ("from", "@source"),
                    ("to", "@target"),
                    ("bytes", "@total"),
                    ("by path", "@paths"),
                    ("while copied", "@bandwidth"),
                    ("link, estimated", "@estimate"),
                ]
            )
        )
        self.figure.xaxis.major_label_orientation = math.pi / 5
        self.figure.grid.grid_line_color = None

    def show(self, collector: Collector) -> None:
        traffic, workers = collector.sampler.traffic, collector.sampler.workers
        named = labels(workers)
        label = {end: named.get(end, end) for end in traffic.ends}
        data: Data = {name: [] for name in self.source.data}
        few = len(label) <= 8
        for source, target, flow in traffic.flows():
            way, speed = collector.way(source, target), flow.bandwidth
            total = format_bytes(flow.nbytes)
            data["source"].append(label[source])
            data["target"].append(label[target])
            data["nbytes"].append(flow.nbytes)
            data["total"].append(total)
            data["paths"].append(_by_path(flow))
            data["bandwidth"].append(_rate(speed) if speed else "read in place")
            data["estimate"].append(f"{way[0]}, {_rate(way[1].bandwidth)}" if way else "")
            data["text"].append(total if few else "")
        self._mapper.high = largest = max([1, *data["nbytes"]])
        data["colour"] = ["white" if nbytes > DARK_SHARE * largest else "black" for nbytes in data["nbytes"]]
        ends = sorted(label.values())
        if self.figure.x_range.factors != ends:
            self.figure.x_range.factors, self.figure.y_range.factors = ends, ends[::-1]
        put(self.source, data)
        self.say(format_bytes(sum(data["nbytes"])) if data["nbytes"] else "none yet")


class LinkTable(TableComponent):
    """Show the pairs with the most bytes, with paths, bandwidth and the estimate for the link."""

    title = "Transfers"
    columns: ClassVar[Mapping[str, str]] = {
        "source": "From", "target": "To", "nbytes": "Bytes", "paths": "By path", "bandwidth": "While copied",
        "link": "Link", "estimate": "Estimate", "share": "Of estimate",
    }  # fmt: skip
    widths: ClassVar[Mapping[str, int]] = {
        "source": 60,
        "target": 60,
        "nbytes": 75,
        "paths": 270,
        "bandwidth": 95,
        "link": 105,
        "estimate": 80,
        "share": 80,
    }

    def show(self, collector: Collector) -> None:
        named = labels(collector.sampler.workers)
        flows = sorted(collector.sampler.traffic.flows(), key=lambda flow: -flow[2].nbytes)
        rows = []
        for source, target, flow in flows[:MAX_ROWS]:
            way, speed = collector.way(source, target), flow.bandwidth
            rows.append(
                {
                    "source": named.get(source, source),
                    "target": named.get(target, target),
                    "nbytes": format_bytes(flow.nbytes),
                    "paths": _by_path(flow),
                    "bandwidth": _rate(speed) if speed else "read in place",
                    "link": str(way[0]) if way else "",
                    "estimate": _rate(way[1].bandwidth) if way else "",
                    "share": share_of(speed, *way) if speed and way else "",
                }
            )
        self.put_rows(rows)
        self.table.columns[-1].visible = any(row["share"] for row in rows)
        self.say("" if rows else "none yet")


def share_of(bandwidth: float, link: Link, estimate: Speed) -> str:
    """Return the share of a link's estimated bandwidth that copies have reached.

    Empty for copies through a memory, which is not the workers' alone. The mean over all copies can exceed
    the estimate, which follows the latest of them.
    """
    if link in THROUGH_MEMORY:
        return ""
    share = bandwidth / estimate.bandwidth
    return f"{share:.0%}" if share <= 1 else "over 100%"


def _by_path(flow: Flow) -> str:
    return ", ".join(f"{path} {short_bytes(nbytes)}" for path, nbytes in flow.by_path.items())


def _rate(bytes_per_second: float) -> str:
    return f"{short_bytes(bytes_per_second)}/s"
