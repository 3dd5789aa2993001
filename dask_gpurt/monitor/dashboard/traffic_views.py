"""Draw the transfers between workers: the matrix of all pairs."""

from __future__ import annotations

import math

from bokeh.models import ColumnDataSource, FactorRange, HoverTool, LinearColorMapper
from bokeh.models.annotations import ColorBar
from dask.utils import format_bytes

from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.dashboard.components import (
    DARK_SHARE,
    HEAT,
    Data,
    FigureComponent,
    Find,
    bytes_axis,
    labels,
    put,
    short_bytes,
)
from dask_gpurt.monitor.dashboard.sampler import Flow


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


def _by_path(flow: Flow) -> str:
    return ", ".join(f"{path} {short_bytes(nbytes)}" for path, nbytes in flow.by_path.items())


def _rate(bytes_per_second: float) -> str:
    return f"{short_bytes(bytes_per_second)}/s"
