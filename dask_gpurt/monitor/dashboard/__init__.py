"""Show the runtime beside the dashboard of Dask's scheduler.

Data are collected whether or not a page is open, so that a page also shows the history from before it was
opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from dask_gpurt.dask_hooks.http import list_pages, serve
from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.monitor.dashboard import page
from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.observe import Fallback
from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin

__all__ = ["observe"]

#: The schedulers whose dashboard has the page in its menu.
_listed: WeakSet[Any] = WeakSet()


def observe(runtime: GpurtSchedulerPlugin) -> Callable[[], None]:
    """Collect data from the scheduler plugin, and show them on a page.

    Returns a function that stops collecting. A page in the menu of the dashboard stays until the scheduler
    ends, and says then that the runtime is off.
    """
    scheduler: SchedulerServer = runtime.scheduler
    collector = page.collectors[scheduler] = Collector(runtime)
    collector.install()
    with contextlib.ExitStack() as undo:
        try:
            if scheduler not in _listed:
                undo.callback(serve(scheduler, page.__name__))
                if _list(scheduler):
                    _listed.add(scheduler)
                    undo.pop_all()
        except Exception as error:  # includes any error of bokeh: the runtime works without pages
            runtime.metrics.fallback(Fallback.DASHBOARD_PAGES, repr(error))
        end_page = undo.pop_all().close

    def end() -> None:
        end_page()
        page.collectors.pop(scheduler, None)
        collector.uninstall()

    return end


def _list(scheduler: SchedulerServer) -> bool:
    """Add the page to the menu of Dask's dashboard; return False if the scheduler has none."""
    if not getattr(scheduler, "services", {}).get("dashboard"):
        return False
    try:
        return list_pages(scheduler, page.PAGE, page.PARTS)
    except ImportError:  # without bokeh, Dask has no dashboard either, and says so itself
        return False
