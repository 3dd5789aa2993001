"""List pages on the dashboard of a running scheduler: in its menu, and for Dask's JupyterLab extension."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from bokeh.server.tornado import BokehTornado
from distributed.dashboard import scheduler as dashboard
from tornado.web import Application

from dask_gpurt.dask_hooks.seams import DASHBOARD
from dask_gpurt.dask_hooks.types import SchedulerServer


class _Listed(BokehTornado):
    """Name pages to JupyterLab, which asks the first application of this class for its paths; serve none."""

    def __init__(self, paths: set[str]):
        Application.__init__(self)  # there is no application of bokeh to begin
        self._paths = paths

    @property
    def app_paths(self) -> set[str]:
        return self._paths

    def stop(self, wait: bool = True) -> None:
        """Stop nothing."""

    async def stop_async(self) -> None:
        """Stop nothing."""


def list_pages(scheduler: SchedulerServer, page: str, parts: Collection[str]) -> bool:
    """Add a page to the menu of a scheduler's dashboard, and its parts to the list of plots. Idempotent.

    ``page``: its path without the slash.
    ``parts``: their paths, which begin with ``/individual-``.
    Returns False if the scheduler serves no dashboard.
    Raises UnsupportedError if Dask's dashboard differs from the known one.
    """
    DASHBOARD.require()
    served: Any = scheduler
    applications = served.http_application.applications
    first = next((at for at, each in enumerate(applications) if isinstance(each, BokehTornado)), None)
    if first is None:
        return False
    known: dict[str, Any] = dashboard.template_variables(scheduler)
    if page in known["pages"]:
        return True
    known["pages"].insert(-1, page)  # before "info"
    known["plots"] += [{"url": path.strip("/"), "name": _title(path)} for path in parts]
    known["plots"].sort(key=lambda plot: str(plot["name"]))
    applications.insert(first, _Listed({*applications[first].app_paths, *parts}))
    return True


def menu_of(scheduler: SchedulerServer) -> list[str]:
    """Return the pages in the menu of a scheduler's dashboard."""
    pages: list[str] = dashboard.template_variables(scheduler)["pages"]
    return pages


def _title(path: str) -> str:
    return path.removeprefix("/individual-").replace("-", " ").title().replace("Gpurt", "Gpurt:")
