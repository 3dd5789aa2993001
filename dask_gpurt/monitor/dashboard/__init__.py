"""Show the runtime on the dashboard of Dask's scheduler, and serve its JSON API.

Data are collected whether or not a page is open, so that a page also shows the history from before it was
opened. Bokeh is imported only if the scheduler has a dashboard, which needs it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from dask_gpurt.dask_hooks.types import SchedulerServer
from dask_gpurt.monitor.dashboard.collector import Collector
from dask_gpurt.monitor.json_api import serve_json
from dask_gpurt.observe import Fallback
from dask_gpurt.scheduler.plugin import GpurtSchedulerPlugin

__all__ = ["observe"]

_collectors: WeakKeyDictionary[Any, Collector] = WeakKeyDictionary()


def observe(runtime: GpurtSchedulerPlugin) -> Callable[[], None]:
    """Collect data from the scheduler plugin, and show them on the dashboard if there is one, and as JSON.

    Returns a function that stops collecting. The pages stay until the scheduler ends, and then say that the
    runtime is off.
    """
    scheduler: SchedulerServer = runtime.scheduler
    collector = _collectors[scheduler] = Collector(runtime)
    collector.install()
    end_json = serve_json(runtime, collector.sampler.shuffles)
    try:
        _show(scheduler)
    except Exception as error:  # includes any error of bokeh: the runtime works without pages
        runtime.metrics.fallback(Fallback.DASHBOARD_PAGES, repr(error))

    def end() -> None:
        end_json()
        _collectors.pop(scheduler, None)
        collector.uninstall()

    return end


def _show(scheduler: SchedulerServer) -> None:
    """Add the pages, if the scheduler has a dashboard."""
    if not getattr(scheduler, "services", {}).get("dashboard"):
        return
    try:
        from dask_gpurt.dask_hooks.dashboard import add_pages
        from dask_gpurt.monitor.dashboard.pages import PAGE, pages
    except ImportError:  # without bokeh, Dask has no dashboard either, and says so itself
        return
    add_pages(scheduler, pages(_collectors.get), PAGE)
