"""Show further pages on the dashboard of a scheduler that runs, in Dask's own frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bokeh.server.tornado import BokehTornado
from distributed.dashboard import scheduler as dashboard
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.core import BokehApplication

from dask_gpurt.dask_hooks.seams import DASHBOARD

#: Fills a document: the scheduler, what Dask's templates need, and the document.
Page = Callable[[Any, Mapping[str, Any], Any], None]


def add_pages(scheduler: Any, pages: Mapping[str, Page], menu: str) -> bool:
    """Add pages to the dashboard of a scheduler; False where it shows none, or has them already.

    Dask reads its list of pages once, as a scheduler is made, and that list is for all schedulers of a
    process. So a second application with Dask's pages and these comes in front of the first one, which goes
    on for the sessions that are open in it.

    Parameters
    ----------
    pages
        By path; those under ``/individual-`` are listed by Dask's JupyterLab extension too.
    menu
        The path of the one that has a place of its own in the menu, without the slash.

    Raises
    ------
    UnsupportedError
        When the dashboard is not built as it is known.
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
    return path.removeprefix("/individual-").replace("-", " ").title().replace("Gpurt", "GPU runtime:")


def fill(document: Any, root: Any, title: str, extra: Mapping[str, Any] | None) -> None:
    """Put a model into a document, in Dask's theme.

    Parameters
    ----------
    extra
        What Dask's templates need; None for a page without its menu, to be put into another.
    """
    document.title = f"Dask: {title}"
    document.add_root(root)
    document.theme = BOKEH_THEME
    if extra is not None:
        document.template = env.get_template("simple.html")
        document.template_variables.update(extra)
