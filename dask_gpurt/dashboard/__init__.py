"""Show the runtime on the dashboard of Dask's scheduler.

Data are collected whether a page is open or not, so that a page shows the history from before it was opened.
Bokeh is imported only where the scheduler shows a dashboard, which needs it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from dask_gpurt.dashboard.collector import Collector
from dask_gpurt.observe import Fallback
from dask_gpurt.plugins.scheduler import GpurtSchedulerPlugin

__all__ = ["observe"]

_collectors: WeakKeyDictionary[Any, Collector] = WeakKeyDictionary()


def observe(runtime: GpurtSchedulerPlugin) -> Callable[[], None]:
    """Collect what a scheduler's plugin knows, and show it on the dashboard if there is one.

    Returns
    -------
    Callable
        Ends it. The pages stay until the scheduler ends, and say that the runtime is off.
    """
    scheduler: Any = runtime.scheduler
    collector = _collectors[scheduler] = Collector(runtime)
    collector.install()
    try:
        _show(scheduler)
    except Exception as error:  # of bokeh's, too: the runtime works without pages
        runtime.metrics.fallback(Fallback.DASHBOARD_PAGES, repr(error))

    def end() -> None:
        _collectors.pop(scheduler, None)
        collector.uninstall()

    return end


def _show(scheduler: Any) -> None:
    """Add the pages, unless the scheduler shows none at all."""
    if not getattr(scheduler, "services", {}).get("dashboard"):
        return
    try:
        from dask_gpurt.dashboard.pages import PAGE, pages
        from dask_gpurt.dask_hooks.dashboard import add_pages
    except ImportError:  # without bokeh Dask shows no pages either, and says so there
        return
    add_pages(scheduler, pages(_collectors.get), PAGE)
