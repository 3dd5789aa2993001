"""Lay out the components on pages of Dask's dashboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bokeh.layouts import column, row
from distributed.dashboard.components import add_periodic_callback

from dask_gpurt.dask_hooks.dashboard import Page, fill
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.dashboard.components import Component, Find
from dask_gpurt.monitor.dashboard.views import (
    MemoryOverTime,
    OverTime,
    ShuffleProgress,
    ShuffleTable,
    SpillRates,
    State,
    TiersOfWorkers,
    TrafficHeat,
    worker_select,
)

#: The path of the page with all components.
PAGE = "gpurt"
TITLE = "Gpurt"
#: The component of each individual page and its update interval in milliseconds, by path.
PARTS: Mapping[str, tuple[type[Component], int]] = {
    "/individual-gpurt-state": (State, 1000),
    "/individual-gpurt-memory": (MemoryOverTime, 1000),
    "/individual-gpurt-spilling": (SpillRates, 1000),
    "/individual-gpurt-workers": (TiersOfWorkers, 1000),
    "/individual-gpurt-shuffles": (ShuffleProgress, 500),
    "/individual-gpurt-shuffle-table": (ShuffleTable, 1000),
    "/individual-gpurt-traffic": (TrafficHeat, 2000),
}
#: The rows of the page with all components: the largest height in pixels, and the components side by side.
LAYOUT = (
    (30, ("state",)),
    (260, ("memory", "spilling")),
    (260, ("shuffles",)),
    (240, ("shuffle-table",)),
    (320, ("workers", "traffic")),
)

#: Finds the collector of a scheduler.
Lookup = Callable[[Any], Collector | None]


def pages(lookup: Lookup) -> dict[str, Page]:
    """Return all pages, by path."""
    return {f"/{PAGE}": partial(_whole, lookup), **{path: partial(_part, lookup, path) for path in PARTS}}


def _whole(lookup: Lookup, scheduler: SchedulerServer, extra: Mapping[str, Any], document: Any) -> None:
    find = partial(lookup, scheduler)
    select, rows = worker_select(), []
    for height, names in LAYOUT:
        parts = [_started(f"/individual-gpurt-{name}", find, document) for name in names]
        for part in parts:
            part.limit_height(height)
            if isinstance(part, OverTime):
                part.follow(select)
        rows.append(row(*(part.root for part in parts), sizing_mode="stretch_width"))
    fill(document, column(select, *rows, sizing_mode="stretch_width"), TITLE, extra)


def _part(
    lookup: Lookup, path: str, scheduler: SchedulerServer, extra: Mapping[str, Any], document: Any
) -> None:
    part = _started(path, partial(lookup, scheduler), document)
    fill(document, part.root, part.title, None)


def _started(path: str, find: Find, document: Any) -> Component:
    """Create a component that is updated while the document is shown."""
    kind, interval = PARTS[path]
    component = kind(find)
    component.update()
    add_periodic_callback(document, component, interval)
    return component
