"""Draw tiers over time and by worker, shuffles, and the transfers between workers."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from bokeh.models import ColumnDataSource, DataRange1d, FactorRange, HoverTool, LinearColorMapper, Range1d
from bokeh.models.annotations import ColorBar
from bokeh.models.widgets import Select
from dask.utils import format_bytes

from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.dashboard.components import (
    DARK_SHARE,
    HEAT,
    MAX_ROWS,
    Component,
    Data,
    FigureComponent,
    Find,
    TableComponent,
    bytes_axis,
    labels,
    put,
    short_bytes,
    short_time,
)
from dask_gpurt.monitor.dashboard.sampler import ALL, SPILLED, UNSPILLED, Flow, Level, WorkerSample
from dask_gpurt.observe.shown_tiers import SHOWN

#: Maximum number of workers in a figure with a row for each; the fullest come first.
MAX_WORKERS = 32
TIER_COLOURS = dict(
    zip(SHOWN, ("#e2803a", "#22a06b", "#64a5ab", "#d4a72c", "#3d7fc1", "#8a5bb5"), strict=True)
)
RATE_COLOURS = {SPILLED: "#c9475f", UNSPILLED: "#22a06b"}
#: Maximum number of shuffles in the figure.
MAX_BARS = 12
STATE_COLOURS = {"running": "#3d7fc1", "done": "#22a06b", "failed": "#c9475f", "cancelled": "#999999"}


class State(Component):
    """Say for how many clients the runtime plans, and why not for the others."""

    title = "Runtime"

    def __init__(self, find: Find):
        super().__init__(find)
        self.root = self.heading

    def show(self, collector: Collector) -> None:
        clients = collector.runtime.clients
        planned = clients.planned()
        on = f"on, and plans for {planned} client{'' if planned == 1 else 's'}"
        self.say(html.escape("; ".join([on, *clients.unplanned])))


# ---- tiers ---------------------------------------------------------------------------------


def worker_select() -> Any:
    """Return a select of a worker, for :class:`OverTime`, which fills in the options."""
    return Select(value=ALL, width=220)


class OverTime(FigureComponent):
    """Show series over time, for all workers or for a selected one, which may have left."""

    def __init__(self, find: Find, colours: dict[str, str]):
        tools, times = "pan,xwheel_zoom,reset", DataRange1d(range_padding=0)
        super().__init__(find, x_axis_type="datetime", tools=tools, x_range=times)
        self.source = ColumnDataSource({"time": [], **{name: [] for name in colours}})
        bytes_axis(self.figure.yaxis[0])
        self.lines = {
            name: self.figure.line(
                "time", name, source=self.source, color=colour, line_width=2, legend_label=name
            )
            for name, colour in colours.items()
        }
        hover = HoverTool(
            renderers=list(self.lines.values())[:1],
            tooltips=[("time", "@time{%H:%M:%S}"), *((name, f"@{{{name}}}{{0.00 b}}") for name in colours)],
            formatters={"@time": "datetime"},
            mode="vline",
        )
        self.figure.add_tools(hover)
        self.figure.y_range = DataRange1d(
            start=0, renderers=list(self.lines.values()), range_padding=0.3, min_interval=1e6
        )
        legend = self.figure.legend
        legend.location, legend.orientation = "top_left", "horizontal"
        legend.background_fill_alpha = 0.6
        legend.padding = legend.margin = 4
        self.select: Any = worker_select()
        self.select.on_change("value", self._on_chosen)
        self.root.children.insert(0, self.select)

    def follow(self, select: Any) -> None:
        """Show the worker that a select outside of this component chooses, instead of one of its own."""
        self.root.children.remove(self.select)
        select.options = self.select.options
        self.select = select
        select.on_change("value", self._on_chosen)

    def _on_chosen(self, attr: str, old: str, new: str) -> None:
        self.update_now()

    def offer(self, collector: Collector) -> str:
        """Offer current and past workers for selection; return the address of the selected one."""
        options = [ALL, *labels(collector.sampler.workers).items()]
        if self.select.options != options:
            self.select.options = options
        return str(self.select.value)


class MemoryOverTime(OverTime):
    """Show the bytes in each tier over time, and its limit as a dashed line."""

    title = "Memory tiers"

    def __init__(self, find: Find):
        super().__init__(find, TIER_COLOURS)
        self.limits = ColumnDataSource({"time": [], **{tier: [] for tier in TIER_COLOURS}})
        for tier, colour in TIER_COLOURS.items():
            self.figure.line("time", tier, source=self.limits, color=colour, line_dash="dashed", alpha=0.7)

    def show(self, collector: Collector) -> None:
        chosen, used = self.offer(collector), collector.sampler.used
        times = _milliseconds(used.times)
        data: Data = {"time": times, **{tier: used.values((chosen, tier)) for tier in TIER_COLOURS}}
        limits: Data = {"time": times[:1] + times[-1:]}
        shown = []
        for tier, line in self.lines.items():
            limit = collector.sampler.capacity(tier, chosen)
            limits[tier] = [limit or math.nan] * len(limits["time"])
            last = next((nbytes for nbytes in reversed(data[tier]) if not math.isnan(nbytes)), None)
            line.visible = last is not None
            if limit and last is not None:
                shown.append(f"{tier} {short_bytes(last)} of {short_bytes(limit)}")
        for item in self.figure.legend[0].items:  # hide legend items of lines without values
            item.visible = item.renderers[0].visible
        self.source.data, self.limits.data = data, limits
        self.say(", ".join(shown))


class SpillRates(OverTime):
    """Show the bytes per second that are spilled and unspilled."""

    title = "Spilling, bytes per second"

    def __init__(self, find: Find):
        super().__init__(find, RATE_COLOURS)

    def show(self, collector: Collector) -> None:
        chosen, sampler = self.offer(collector), collector.sampler
        self.source.data = {
            "time": _milliseconds(sampler.rates.times),
            **{direction: sampler.rates.values((chosen, direction)) for direction in RATE_COLOURS},
        }
        down, up = (int(sampler.moved(direction, chosen)) for direction in RATE_COLOURS)
        self.say(f"{format_bytes(down)} down, {format_bytes(up)} up so far")


class TiersOfWorkers(FigureComponent):
    """Show how full each tier is, for the fullest workers."""

    title = "Tiers by worker, shares of their limits"

    def __init__(self, find: Find):
        super().__init__(find, tools="", y_range=FactorRange(), x_range=FactorRange())
        self.source = ColumnDataSource({name: [] for name in ("worker", "tier", "share", "text", "colour")})
        heat = {"field": "share", "transform": LinearColorMapper(palette=HEAT, low=0, high=1)}
        where: dict[str, Any] = {"x": "tier", "y": "worker", "source": self.source}
        self.figure.rect(**where, width=0.96, height=0.9, line_color="#cccccc", fill_color=heat)
        centred = {"text_align": "center", "text_baseline": "middle"}
        self.figure.text(**where, **centred, text="text", text_font_size="11px", text_color="colour")
        self.figure.grid.grid_line_color = None

    def show(self, collector: Collector) -> None:
        workers = collector.sampler.workers
        named = labels(workers)
        fullest = sorted(workers, key=lambda address: -_fullness(workers[address]))[:MAX_WORKERS]
        rows = [
            (named[address], tier, level)
            for address in fullest
            for tier, level in workers[address].levels.items()
        ]
        put(
            self.source,
            {
                "worker": [worker for worker, _, _ in rows],
                "tier": [tier for _, tier, _ in rows],
                "share": [_share(level) for _, _, level in rows],
                "text": [f"{format_bytes(used)} of {format_bytes(limit)}" for _, _, (used, limit) in rows],
                "colour": ["white" if _share(level) > DARK_SHARE else "black" for _, _, level in rows],
            },
        )
        shown = [named[address] for address in reversed(fullest)]
        tiers = [tier for tier in TIER_COLOURS if any(tier == of for _, of, _ in rows)]
        if (self.figure.y_range.factors, self.figure.x_range.factors) != (shown, tiers):
            self.figure.y_range.factors, self.figure.x_range.factors = shown, tiers
        left = len(workers) - len(fullest)
        self.say(f"the fullest {len(fullest)} of {len(workers)}" if left else "")


def _share(level: Level) -> float:
    return level.used / max(1, level.capacity)


def _fullness(worker: WorkerSample) -> float:
    """Return the fraction used of a worker's fullest tier; -1 for a worker that has left, to sort it last."""
    return -1.0 if worker.gone_at is not None else max(map(_share, worker.levels.values()), default=0.0)


def _milliseconds(times: Sequence[float]) -> list[float]:
    return [1000 * at for at in times]


# ---- shuffles ------------------------------------------------------------------------------


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
            "bytes": format_bytes(row["bytes"]), "rows": "" if row["rows"] is None else f"{row['rows']:,}",
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
    yield _done_share(row["inputs"]), _counted(row["inputs"])
    yield arrived, text
    yield _done_share(row["outputs"]), _counted(row["outputs"])


def _done_share(tasks: Mapping[str, int]) -> float:
    return min(1.0, tasks["done"] / max(1, tasks["total"]))


def _counted(tasks: Mapping[str, int]) -> str:
    return f"{tasks['done']} / {tasks['total']}"


def _short(row: Mapping[str, Any]) -> str:
    return f"{row['id'][:8]} #{row['run']}"


# ---- transfers --------------------------------------------------------------------------------


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
