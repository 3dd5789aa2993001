"""Define the base classes and helpers of dashboard components, drawn with bokeh like Dask's own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column
from bokeh.models import AdaptiveTicker, ColumnDataSource, NumeralTickFormatter
from bokeh.models.widgets import DataTable, Div, TableColumn
from bokeh.palettes import YlOrRd9
from dask.utils import format_bytes, format_time
from distributed.dashboard.components import DashboardComponent

from dask_gpurt.dashboard.collector import Collector
from dask_gpurt.dashboard.sampler import WorkerSample

#: Finds the collector of a scheduler; None while the runtime is off.
Find = Callable[[], Collector | None]
#: Columns of a bokeh source.
Data = dict[str, Any]

#: Maximum fraction of a core for one component: after expensive updates, updates are skipped.
MAX_SHARE = 0.005
#: Maximum number of rows of a table.
MAX_ROWS = 50
OFF = "the runtime is off"
#: Tick positions of an axis of bytes between 1 and 1024 of a unit, as on Dask's own pages.
POWERS_OF_TWO = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
#: Palette for fractions from 0 (white) to 1 (dark red).
HEAT = ("#ffffff", *reversed(YlOrRd9))
#: Text is white on :data:`HEAT` colours above this fraction.
DARK_SHARE = 0.6


class Component(DashboardComponent):
    """Update one part of a page, within a limit on the scheduler's CPU time.

    Parameters
    ----------
    find
        Returns the collector with the data to show.

    Attributes
    ----------
    root
        The bokeh model.
    seconds
        CPU time of the last update, in seconds.
    """

    title: ClassVar[str]
    root: Any
    source: Any

    def __init__(self, find: Find):
        self._find = find
        self._not_before = 0.0
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
        raise NotImplementedError


class FigureComponent(Component):
    """Show a figure.

    Attributes
    ----------
    figure
        The figure: ``root`` itself or a part of it.
    """

    figure: Any

    def say(self, text: str) -> None:
        whole = f"{self.title}: {text}" if text else self.title
        if self.figure.title.text != whole:
            self.figure.title.text = whole


class TableComponent(Component):
    """Show rows of text in a table under a title.

    Attributes
    ----------
    columns
        Headings by name of the column.
    widths
        Widths in pixels by name of the column, 80 by default.
    """

    columns: ClassVar[Mapping[str, str]]
    widths: ClassVar[Mapping[str, int]] = {}

    def __init__(self, find: Find):
        super().__init__(find)
        self.source = ColumnDataSource({name: [] for name in self.columns})
        self._drawn = 0
        shown = [
            TableColumn(field=name, title=heading, width=self.widths.get(name, 80))
            for name, heading in self.columns.items()
        ]
        self._table = table = DataTable(
            source=self.source,
            columns=shown,
            index_position=None,
            selectable=False,
            sizing_mode="stretch_both",
        )
        self._heading = Div(text=f"<b>{self.title}</b>", sizing_mode="stretch_width")
        self.root = column(self._heading, table, sizing_mode="stretch_both")

    def say(self, text: str) -> None:
        whole = f"<b>{self.title}</b>" + (f": {text}" if text else "")
        if self._heading.text != whole:
            self._heading.text = whole

    def put_rows(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Replace the rows, if they have changed."""
        if put(self.source, {name: [row[name] for row in rows] for name in self.columns}):
            # The browser redraws a table when its view changes. Bokeh 3.9 does not detect a change if the
            # number of rows is the same, so change the name of the view.
            self._drawn += 1
            self._table.view.name = f"drawn {self._drawn} times"


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
    """Format a time in seconds; 0 has no unit."""
    return format_time(seconds) if seconds else "0"


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
