"""Add pages to the dashboard of a running scheduler, in Dask's own template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bokeh.server.tornado import BokehTornado
from distributed.dashboard import scheduler as dashboard
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.core import BokehApplication

from dask_gpurt.dask_hooks.seams import DASHBOARD
from dask_gpurt.dask_hooks.types import SchedulerServer

#: Fills a document; takes the scheduler, the variables of Dask's templates, and the document.
Page = Callable[[Any, Mapping[str, Any], Any], None]


def add_pages(scheduler: SchedulerServer, pages: Mapping[str, Page], menu: str) -> bool:
    """Add pages to the dashboard of a scheduler; return False if it has no dashboard, or the pages already.

    Dask reads its list of pages once, when a scheduler is created, and the list is shared by all schedulers
    of a process. So this inserts a second application with Dask's pages and these in front of the first one,
    which keeps serving its open sessions.

    ``pages``: the pages by path. Dask's JupyterLab extension also lists those under ``/individual-``.
    ``menu``: the path of the page with its own entry in the menu, without the slash.
    Raises UnsupportedError if Dask's dashboard differs from the known one.
    """
    DASHBOARD.require()
    http = getattr(scheduler, "http_application", None)
    shown = [app for app in getattr(http, "applications", ()) if isinstance(app, BokehTornado)]
    if http is None or not shown or pages.keys() <= shown[0].app_paths:
        return False
    known = dashboard.template_variables(scheduler)
    if menu not in known["pages"]:
        known["pages"].insert(-1, menu)  # before "info"
        known["plots"] += [{"url": path.strip("/"), "name": _title(path)} for path in _individual(pages)]
        known["plots"].sort(key=lambda plot: str(plot["name"]))
    ours = BokehApplication(
        {**dashboard.applications, **pages},
        scheduler,
        prefix=shown[0].prefix,
        template_variables=known,
    )
    ours.initialize(shown[0].io_loop)
    ours.start()
    http.applications.insert(http.applications.index(shown[0]), ours)
    return True


def _individual(pages: Mapping[str, Page]) -> list[str]:
    return [path for path in pages if path.startswith("/individual-")]


def _title(path: str) -> str:
    return path.removeprefix("/individual-").replace("-", " ").title().replace("Gpurt", "Gpurt:")


def fill(document: Any, root: Any, title: str, extra: Mapping[str, Any] | None) -> None:
    """Add a model to a document, in Dask's theme.

    ``extra``: the variables of Dask's templates; None for a page without a menu, to be embedded in another.
    """
    document.title = f"Dask: {title}"
    document.add_root(root)
    document.theme = BOKEH_THEME
    if extra is not None:
        document.template = env.get_template("simple.html")
        document.template_variables.update(extra)
