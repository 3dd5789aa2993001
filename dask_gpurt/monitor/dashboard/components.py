"""Define the base classes and helpers of dashboard components, drawn with bokeh like Dask's own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column
from bokeh.models import AdaptiveTicker, ColumnDataSource, NumeralTickFormatter
from bokeh.models.widgets import DataTable, Div, HTMLTemplateFormatter, TableColumn
from bokeh.palettes import YlOrRd9
from bokeh.plotting import figure
from dask.utils import format_bytes, format_time
from distributed.dashboard.components import DashboardComponent

from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.dashboard.sampler import WorkerSample

#: Finds the collector of a scheduler; None while the runtime is off.
Find = Callable[[], Collector | None]
#: Columns of a bokeh source.
Data = dict[str, Any]

#: Maximum fraction of a core for one component: after expensive updates, updates are skipped.
MAX_SHARE = 0.005
#: Maximum number of rows of a table, and the height in pixels of each, and of the headings.
MAX_ROWS, ROW_PX = 50, 25
OFF = "the runtime is off"
#: Tick positions of an axis of bytes between 1 and 1024 of a unit, as on Dask's own pages.
POWERS_OF_TWO = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
#: Palette for fractions from 0 (white) to 1 (dark red).
HEAT = ("#ffffff", *reversed(YlOrRd9))
#: Text is white on :data:`HEAT` colours above this fraction.
DARK_SHARE = 0.6
#: Shows the text of a cell, and the whole of it while the mouse is over a cell that is too narrow.
WITH_TOOLTIP = '<span title="<%- value %>"><%- value %></span>'


class Component(DashboardComponent):
    """Update one part of a page under its title, within a limit on the scheduler's CPU time.

    ``heading``: the title, and what :meth:`say` adds to it. Unlike the title of a figure, it wraps.
    ``root``: the bokeh model of all that is shown, with the heading.
    """

    title: ClassVar[str]
    root: Any
    source: Any

    def __init__(self, find: Find):
        self._find = find
        self._not_before = 0.0
        self.heading: Any = Div(text=f"<b>{self.title}</b>", sizing_mode="stretch_width")
        self.seconds = 0.0

    @without_property_validation  # type: ignore[untyped-decorator]
    def update(self) -> None:
        """Show the current data, unless the last updates were too expensive."""
        if time.monotonic() < self._not_before:
            return
        began = time.thread_time()
        if (collector := self._find()) is None:
            self.say(OFF)
        else:
            self.show(collector)
        before, self.seconds = self.seconds, time.thread_time() - began
        # Take the cheaper of two updates: a single expensive one has created objects that are then reused.
        self._not_before = time.monotonic() + min(before, self.seconds) / MAX_SHARE

    def update_now(self) -> None:
        """Show the current data, without delay."""
        self._not_before = 0.0
        self.update()

    def show(self, collector: Collector) -> None:
        """Show the data of a collector."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Show a text after the title, or only the title if the text is empty."""
        whole = f"<b>{self.title}</b>" + (f": {text}" if text else "")
        if self.heading.text != whole:
            self.heading.text = whole

    def limit_height(self, pixels: int) -> None:
        """Take at most this height, below other parts of a page, instead of the whole page."""
        self.root.sizing_mode, self.root.height = "stretch_width", pixels


class FigureComponent(Component):
    """Show a figure."""

    figure: Any

    def __init__(self, find: Find, **options: Any):
        super().__init__(find)
        self.figure = figure(toolbar_location=None, sizing_mode="stretch_both", **options)
        self.root = column(self.heading, self.figure, sizing_mode="stretch_both")


class TableComponent(Component):
    """Show rows of text in a table; without rows, only the heading.

    ``columns``: headings by name of the column.
    ``widths``: widths in pixels by name of the column, 80 by default.
    """

    columns: ClassVar[Mapping[str, str]]
    widths: ClassVar[Mapping[str, int]] = {}

    def __init__(self, find: Find):
        super().__init__(find)
        self.source = ColumnDataSource({name: [] for name in self.columns})
        self._drawn = 0
        self._most: int | None = None
        with_tooltip = HTMLTemplateFormatter(template=WITH_TOOLTIP)
        shown = [
            TableColumn(field=name, title=heading, width=self.widths.get(name, 80), formatter=with_tooltip)
            for name, heading in self.columns.items()
        ]
        self.table: Any = DataTable(
            source=self.source,
            columns=shown,
            index_position=None,
            selectable=False,
            row_height=ROW_PX,
            sizing_mode="stretch_both",
            visible=False,
        )
        self.root = column(self.heading, self.table, sizing_mode="stretch_both")

    def limit_height(self, pixels: int) -> None:
        self._most = pixels
        self.root.sizing_mode = self.table.sizing_mode = "stretch_width"
        self._fit(len(self.table.source.data[next(iter(self.columns))]))

    def _fit(self, rows: int) -> None:
        """Take no more room than the rows need."""
        self.table.visible = rows > 0
        if self._most is not None:
            self.table.height = min(self._most, (rows + 1) * ROW_PX + 5)

    def put_rows(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Replace the rows, if they have changed."""
        if put(self.source, {name: [row[name] for row in rows] for name in self.columns}):
            self._fit(len(rows))
            # The browser redraws a table when its view changes. Bokeh 3.9 does not detect a change if the
            # number of rows is the same, so change the name of the view.
            self._drawn += 1
            self.table.view.name = f"drawn {self._drawn} times"


def put(source: ColumnDataSource, data: Data) -> bool:
    """Replace the data of a source if they differ; return whether they did."""
    if source.data == data:
        return False
    source.data = data
    return True


def bytes_axis(axis: Any) -> None:
    """Make an axis or a colour bar show bytes in binary units, with ticks at powers of two."""
    axis.ticker = AdaptiveTicker(base=1024, mantissas=POWERS_OF_TWO)
    axis.formatter = NumeralTickFormatter(format="0.[00] b")


def short_bytes(nbytes: float) -> str:
    """Format bytes with about three digits, for narrow places."""
    number, unit = format_bytes(int(nbytes)).split()
    return f"{float(number):.3g} {unit}" if float(number) < 1000 else f"{float(number):.0f} {unit}"


def short_time(seconds: float) -> str:
    """Format a time in seconds with about three digits; 0 has no unit."""
    if not seconds:
        return "0"
    number, _, unit = format_time(seconds).partition(" ")
    return f"{float(number):.3g} {unit}" if "." in number else format_time(seconds)


def labels(workers: Mapping[str, WorkerSample]) -> dict[str, str]:
    """Return a unique label for each worker, by address."""
    plain = {
        address: worker.name if worker.gone_at is None else f"{worker.name} (gone)"
        for address, worker in workers.items()
    }
    count = Counter(plain.values())
    return {
        address: label if count[label] == 1 else f"{label} {address.rpartition('/')[2]}"
        for address, label in plain.items()
    }
